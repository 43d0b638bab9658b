// The frame: who is here, where one is, the command bar, the keys, and one view.
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { CommandBar, Help, VIEWS, keys } from "./commands.js";
import { route, start, to } from "./router.js";
import { enter, logOut, session, unreachable } from "./session.js";
import { useSignal } from "./signal.js";
import { connect, link, revision } from "./socket.js";
import { Freshness, Loading, html, said } from "./ui.js";
import { Fleet } from "./views/fleet.js";
import { Leases } from "./views/leases.js";
import { Login } from "./views/login.js";
import { Operations } from "./views/operations.js";
import { Playground } from "./views/playground.js";
import { Policies } from "./views/policies.js";
import { Queue } from "./views/queue.js";
import { WhatIf } from "./views/whatif.js";
import { Why } from "./views/why.js";

/** @type {Record<string, any>} */
const SHOWN = { fleet: Fleet, queue: Queue, leases: Leases, why: Why, policies: Policies, playground: Playground, whatif: WhatIf, operations: Operations };

function App() {
	const { view, rest, query } = useSignal(route);
	const who = useSignal(session);
	const silent = useSignal(unreachable);
	const lost = useSignal(link) === "lost";
	const name = VIEWS.find((each) => each.view === view)?.name || "Not found";
	useEffect(() => {
		document.title = `${who === null ? "Log in" : [name, ...rest].join(" · ")} – Moorage`;
	}, [view, rest.join("/"), who]);
	useEffect(connect, [who]);
	if (who === undefined) {
		return silent ? html`<p class="alert" role="alert">${silent} It is tried again.</p>` : html`<${Loading} what="the console" />`;
	}
	if (who === null) return html`<${Login} />`;
	const View = SHOWN[view];
	return html`
		<a class="skip" href="#view">Skip to the view</a>
		<header>
			<a class="brand" href=${to("fleet")}>Moorage</a>
			<nav aria-label="Views">${VIEWS.map((each) => html`<a href=${to(each.view)} aria-current=${each.view === view ? "page" : undefined}>${each.name}</a>`)}</nav>
			<${CommandBar} />
			<span class="status"><${Freshness} /><${Revision} />
				<span>${who.tenant}${who.operator ? ", operator" : ""}</span>
				${who.login ? html`<button type="button" onClick=${logOut}>Log out</button>` : null}</span>
		</header>
		<main id="view" tabindex="-1" class=${lost ? "is-stale" : ""}>
			<h1>${name}</h1>
			${View ? html`<${View} rest=${rest} query=${query} />` : html`<p class="empty">There is no view “${view}”. <a href=${to("fleet")}>Go to the fleet</a>.</p>`}
		</main>
		<${Help} />
		<div class="hidden" aria-live="polite"><${Said} /></div>`;
}

function Revision() {
	const now = useSignal(revision);
	return now === null ? null : html` <span>as of revision ${now}</span>`;
}

const Said = () => html`${useSignal(said)}`;

start();
keys();
enter();
const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);

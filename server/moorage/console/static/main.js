// The frame: the session, the views, the command bar, the keys, and one view.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { CommandBar, Help, VIEWS, keys } from "./commands.js";
import { zone } from "./format.js";
import { route, start, to } from "./router.js";
import { comeBack, enter, logOut, session, unreachable } from "./session.js";
import { useSignal } from "./signal.js";
import { connect, link, listen } from "./socket.js";
import { choose, chosen } from "./theme.js";
import { Button, Choice, Freshness, Loading, html, readAliases, said } from "./ui.js";
import { Fleet } from "./views/fleet.js";
import { Leases } from "./views/leases.js";
import { Login } from "./views/login.js";
import { Operations } from "./views/operations.js";
import { Overview } from "./views/overview.js";
import { Playground } from "./views/playground.js";
import { Policies } from "./views/policies.js";
import { Queue } from "./views/queue.js";
import { WhatIf } from "./views/whatif.js";
import { Why } from "./views/why.js";

const SHOWN = { overview: Overview, fleet: Fleet, queue: Queue, leases: Leases, why: Why, policies: Policies, playground: Playground, whatif: WhatIf, operations: Operations };

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
	useEffect(() => {
		if (!who) return;
		readAliases();
		return listen("policies", readAliases);
	}, [who]);
	if (who === undefined) {
		return silent ? html`<p class="alert" role="alert">${silent} The page tries again.</p>` : html`<${Loading} what="the console" />`;
	}
	if (who === null) return html`<${Login} />`;
	const View = SHOWN[view];
	return html`
		<a class="skip" href="#view">Skip to the view</a>
		<${Head} view=${view} name=${name} who=${who} />
		<main id="view" tabindex="-1" class=${lost ? "is-stale" : ""}>
			<p class="zone">Times in ${zone()}</p>
			<h1>${name}</h1>
			${View ? html`<${View} rest=${rest} query=${query} />` : html`<p class="empty">There is no view “${view}”. <a href=${to("overview")}>Go to the overview</a>.</p>`}
		</main>
		<${Help} />
		<div class="hidden" aria-live="polite"><${Said} /></div>`;
}

function Head({ view, name, who }) {
	const [open, setOpen] = useState(false);
	const theme = useSignal(chosen);
	useEffect(() => setOpen(false), [view]);
	return html`<header>
		<a class="brand" href=${to("overview")} title=${`Server ${location.host}, version ${who.version}`}><b>Moorage</b> <small>${location.host}<br />${who.version}</small></a>
		<${Button} class="menu" aria-expanded=${String(open)} aria-controls="views" onClick=${() => setOpen(!open)}>☰ ${name}<//>
		<nav id="views" aria-label="Views" class=${open ? "open" : ""}>${VIEWS.map((each) => html`<a href=${to(each.view)} aria-current=${each.view === view ? "page" : undefined}>${each.name}</a>`)}</nav>
		<${CommandBar} />
		<span class="status"><${Freshness} />
			<span class="who" title="Tenant and role">${who.tenant}<br />${who.role}</span>
			<span class="theme"><${Choice} label=${html`<span class="hidden">Theme</span>`} value=${theme} set=${choose} options=${["auto", "light", "dark"].map((each) => [each, `◐ ${each}`])} /></span>
			${who.login && html`<${Button} onClick=${logOut}>Log out<//>`}</span>
	</header>`;
}

const Said = () => html`${useSignal(said)}`;

start();
keys();
enter().then(comeBack);
// Another tab may have signed in, or out.
document.addEventListener("visibilitychange", () => document.hidden || enter());
const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);

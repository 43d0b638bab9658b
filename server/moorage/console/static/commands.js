// Keys and the command bar: the keyboard reaches everything that the mouse reaches.
import { useRef, useState } from "preact/hooks";
import { go, to } from "./router.js";
import { signal, useSignal } from "./signal.js";
import { ask } from "./socket.js";
import { Button, Dialog, Grid, handle, html, typed } from "./ui.js";

export const VIEWS = ["v Overview", "f Fleet", "q Queue", "l Leases", "w Why", "p Policies", "y Playground", "i What-if", "o Operations"].map((each) => ({
	view: each.slice(2).toLowerCase().replace("-", ""), name: each.slice(2), key: each[0],
}));

const GO_MS_MAX = 1500;
const help = signal(false);
export async function meant(text) {
	const [word, ...rest] = text.trim().split(/\s+/);
	const view = VIEWS.find((each) => each.view === word.toLowerCase() || each.name.toLowerCase() === text.trim().toLowerCase());
	if (view) return to(view.view, ...rest);
	if (/[:]/.test(word)) return to("policies", word);
	if (word.includes("/")) return to("fleet", ...word.split("/"));
	const status = await ask({ op: "status", lease: word }).catch(() => null);
	if (status?.state === "waiting") return to("queue", word);
	return status ? to("leases", word) : to("why", word);
}

/** The field at the top; `/` goes there. */
export function CommandBar() {
	const field = useRef(null);
	const [text, setText] = useState("");
	const run = handle(async () => {
		if (!text.trim()) return;
		go(await meant(text));
		setText("");
		field.current?.blur();
		document.getElementById("view")?.focus();
	});
	return html`<form role="search" class="bar" onSubmit=${run}>
		<input ref=${field} id="bar" type="search" aria-label="Command bar" placeholder="/ view, id, policy or node"
			value=${text} autocomplete="off" spellcheck="false"
			onInput=${typed(setText)}
			onKeyDown=${(e) => e.key === "Escape" && field.current?.blur()} />
		<${Button} aria-label="Keys" title="Keys (?)" onClick=${() => (help.value = true)}>?<//>
	</form>`;
}

/** The list of keys; `?` opens it. */
export function Help() {
	if (!useSignal(help)) return null;
	const close = () => (help.value = false);
	return html`<${Dialog} title="Keys" close=${close}>
		<${Grid} label="Keys" heads=${["key", "what it does"]} rows=${[["/", "the command bar: a view, an id, a policy, cluster/node"], ...VIEWS.map((each) => [`g ${each.key}`, each.name]),
			["j, k", "the next row, the one before; Enter opens it"], ["arrows", "in the tree of the fleet: rows, open, close"], ["?", "this list"], ["Escape", "closes it"]].map(([key, text]) => [html`<kbd>${key}</kbd>`, text])} />
		<p class="buttons"><${Button} onClick=${close}>Close<//></p>
	<//>`;
}

export function keys() {
	let went = 0;
	document.addEventListener("keydown", (event) => {
		const target = event.target;
		if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
		if (/^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable) return;
		if (document.querySelector("dialog[open]")) return;
		if (went && Date.now() - went < GO_MS_MAX) {
			went = 0;
			const view = VIEWS.find((each) => each.key === event.key);
			if (view) go(to(view.view));
			return;
		}
		if (event.key === "g") went = Date.now();
		else if (event.key === "/") document.getElementById("bar")?.focus();
		else if (event.key === "?") help.value = true;
		else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
		else return;
		if (event.key !== "g") event.preventDefault();
	});
}
function step(by) {
	const rows = [...document.querySelectorAll("main a.row, main [role=treegrid] [role=row][tabindex]")];
	if (!rows.length) return;
	const at = rows.indexOf(document.activeElement);
	const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
	rows[next].focus();
	rows[next].scrollIntoView({ block: "nearest" });
}

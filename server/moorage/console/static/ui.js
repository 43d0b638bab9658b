// The parts of all views.
import htm from "htm";
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { signal, useSignal } from "./signal.js";
import { address, ask, connection, heardAt, link } from "./socket.js";
import { brief, count, when } from "./format.js";
import { go, to } from "./router.js";
import { http, lacks, session } from "./session.js";

export const html = htm.bind(h);

/** A button; `off`: why it is disabled, or "". */
export const Button = ({ off, disabled, title, ...more }) => html`<button type="button" disabled=${!!(off || disabled)} title=${off || title} ...${more} />`;

/** Text for screen readers only. */
export const said = signal("");

export const Loading = ({ what }) => html`<p class="loading" role="status">Loading ${what}…</p>`;
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Refused = ({ error }) =>
	error ? html`<p class="alert" role="alert">${error.code ? html`<code>${error.code}</code> ` : ""}${error.code === "unknown_op" ? "This server does not serve that yet." : error.message}</p>` : null;

/** How fresh the shown data is; if stale, since when. */
export function Freshness() {
	const state = useSignal(link);
	if (state === "open") return html`<span class="fresh">live</span>`;
	const since = heardAt.value ? `as of ${when(heardAt.value / 1000)}, ` : "";
	return html`<span class="stale" role="status">${since}${state === "lost" ? "reconnecting" : "connecting"}</span>`;
}

/** An answer as JSON. */
export function Raw({ value, label = "JSON" }) {
	const [open, setOpen] = useState(false);
	return html`<details class="raw" onToggle=${(e) => setOpen(e.target.open)}>
		<summary>${label}</summary>
		${open && html`<${Text} label=${label} text=${JSON.stringify(value, null, 2)} />`}
	</details>`;
}

export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** The code of `policy.py` as lines that write it to a new folder. */
function written(code) {
	let end = "END";
	while (code.includes(end)) end += "_";
	return `folder=$(mktemp -d)\ncat > "$folder/policy.py" <<'${end}'\n${code.trimEnd()}\n${end}\n`;
}

/** The equivalent `moorage` or `curl` command; `code`: the contents of its `policy.py`. */
export function Command({ words, code }) {
	const curl = words[0] === "curl";
	const line = [...(curl ? [] : ["moorage", "--url", address(), "--http-url", location.origin]), ...words].map((each) => (code && each === "policy.py" ? '"$folder/policy.py"' : quoted(each))).join(" ");
	const needs = curl && session.value?.login ? ' -H "Authorization: Bearer $MOORAGE_TOKEN"' : "";
	const text = (code ? written(code) : "") + line + needs;
	const [copied, setCopied] = useState(0);
	const timer = useRef(0);
	const shown = useRef(null);
	const copy = async () => {
		clearTimeout(timer.current);
		try {
			await navigator.clipboard.writeText(text);
			setCopied(1);
			said.value = `Copied: ${line}`;
			timer.current = setTimeout(() => setCopied(0), 8000);
		} catch {
			setCopied(2); // Pages without TLS may not write to the clipboard.
			said.value = `Selected: ${line}`;
			requestAnimationFrame(() => getSelection().selectAllChildren(shown.current));
		}
	};
	return html`<span class="command"><${Button} title=${text} onClick=${copy}>Copy as command<//>
		${copied > 0 && html`<code ref=${shown}>${copied === 1 ? "Copied" : text}</code>`}</span>`;
}
export function Dialog({ title, close, children }) {
	const ref = useRef(null);
	useEffect(() => {
		const before = document.activeElement;
		ref.current?.showModal();
		return () => before?.isConnected && before.focus();
	}, []);
	return html`<dialog ref=${ref} aria-label=${title} onClose=${close}><h2>${title}</h2>${children}</dialog>`;
}

/**
 * An action: shows its effects, then carries it out. `message`: an operation with a dry run; `say`: words for the
 * answer; `right`: the right that it needs; `destroys`: it cannot be undone; `idle`: why there is nothing to do. */
export function Action({ label, title, message, dry = () => ask({ ...message, dry_run: true }), act = () => ask(message), say, right, destroys, words, code, done, idle }) {
	const [open, setOpen] = useState(false);
	const [found, look] = useAnswer();
	const [acted, run, forget] = useAnswer();
	const start = () => {
		setOpen(true);
		forget();
		look(dry);
	};
	const carryOut = () => run(async () => {
		const answer = await act();
		setOpen(false);
		said.value = `Done: ${title}`;
		done?.(answer);
	});
	return html`<${Button} class=${destroys ? "destroys" : ""} off=${(right && lacks(right)) || idle} disabled=${useSignal(link) === "connecting"} onClick=${start}>${label}<//>
		${open
			? html`<${Dialog} title=${title} close=${() => setOpen(false)}>
					<${Refused} error=${acted.error} /><${Loaded} found=${found} what="what would happen">${(shown) => (say ? html`<div>${say(shown)}</div><${Raw} value=${shown} label="The dry run as JSON" />` : shown)}<//>
					<p class="buttons">
						<${Button} class=${destroys ? "primary destroys" : "primary"} disabled=${acted.busy || found.value === undefined} onClick=${carryOut}>${label} now<//>
						<${Button} onClick=${() => setOpen(false)}>Change nothing<//>
						${words && html`<${Command} words=${words} code=${code} />`}
					</p>
				<//>`
			: null}`;
}

/** A part of a view with its heading; with `found`, `children` render the loaded value. */
export const Section = ({ title, children, id, found, what }) =>
	html`<section aria-label=${title} id=${id}><h2>${title}</h2>${found ? html`<${Loaded} found=${found} what=${what}>${children}<//>` : children}</section>`;
export const Facts = ({ pairs }) =>
	html`<dl>${pairs.filter(([, value]) => (value ?? "") !== "")
		.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

const MARKS = { active: "●", granted: "●", starting: "◐", warm: "◍", failing: "✕", queued: "…", ending: "◌", ended: "○", refused: "✕", waiting: "…", advised: "○" };

/** A state, as a mark and a word. */
export const State = ({ state }) => html`<span class=${"state " + state}><span aria-hidden>${MARKS[state] || "·"}</span> ${state}</span>`;

/** Load a value; load it again `every` ms, and when `needs` or the connection change. */
export function useLoaded(load, needs, every = 0) {
	const [state, setState] = useState({ value: undefined, error: null });
	const [turn, setTurn] = useState(0);
	useEffect(() => {
		let current = true;
		load().then(
			(value) => current && setState({ value, error: null }),
			(error) => current && setState((old) => (error.code === "lost" ? { ...old } : { value: old.value, error })),
		);
		return () => {
			current = false;
		};
	}, [...needs, turn, useSignal(connection)]);
	const again = () => setTurn((n) => n + 1);
	useEvery(again, every, [...needs]);
	return { ...state, again };
}

/** Load the answer to a message, as `useLoaded` does; also again when `turn` changes. */
export const useAsk = (message, every, turn) => useLoaded(() => ask(message), [JSON.stringify(message), turn], every);

/** The same over HTTP. */
export const useGet = (path, every) => useLoaded(() => http("GET", path), [path], every);

/** The outcome of an action that a person starts, and the function that starts it. */
export function useAnswer() {
	const [state, setState] = useState({ idle: true });
	const run = async (work) => {
		setState({ busy: true });
		try {
			setState({ value: await work() });
		} catch (error) {
			setState({ error });
		}
	};
	return [state, run, () => setState({ idle: true })];
}

/** Call `work` at intervals while the page is visible; 0: never. */
export function useEvery(work, ms, needs) {
	useEffect(() => {
		if (!ms) return;
		const timer = setInterval(() => document.hidden || work(), ms);
		return () => clearInterval(timer);
	}, needs);
}
export const typed = (set) => (e) => set(e.target.value);

/** The first `most` of a list, and the button that shows the others. */
export function useFirst(all, most = Infinity) {
	const [open, setOpen] = useState(false);
	const rest = all.length - most;
	return open || rest <= 0 ? [all, null] : [all.slice(0, most), html`<p><${Button} onClick=${() => setOpen(true)}>${count(rest)} more<//></p>`];
}

/** A table; the first cell of each row is its head. `wordy`: the last column has sentences; `empty`: the text without rows. */
export function Grid({ label, heads, rows, current, wordy, most, empty }) {
	const [shown, more] = useFirst(rows, most);
	if (empty && !rows.length) return html`<${Empty}>${empty}<//>`;
	return html`<table aria-label=${label} class=${wordy === true ? "wordy" : wordy}><thead><tr>${heads.map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
		<tbody>${shown.map(([first, ...cells], row) => html`<tr class=${row === current ? "current" : ""}><th scope="row">${first}</th>${cells.map((each, at) => html`<td data-head=${heads[at + 1]}>${each}</td>`)}</tr>`)}</tbody></table>${more}`;
}

/** A part that scrolls separately, also by keys. */
export const Scroll = ({ label, children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${`${label}, scrollable`}>${children}</div>`;

/** A choice of one of several options; with `name`, a field of a form. */
export const Choice = ({ label, name: field, value, set, options }) => html`<label>${label} <select name=${field} value=${set && value} onChange=${set && typed(set)}>${options.map((each) => {
	const [name, text] = Array.isArray(each) ? each : [each, each];
	return html`<option value=${name} selected=${name === value}>${text}</option>`;
})}</select></label>`;
export const Text = ({ label, text }) => html`<pre class="output" tabindex="0" role="region" aria-label=${label}>${text}</pre>`;

/** Renders the loaded value by `children`. */
export const Loaded = ({ found, what, children }) =>
	html`<${Refused} error=${found.error} />${found.value !== undefined ? children(found.value) : found.error || found.idle ? null : html`<${Loading} what=${what} />`}`;
export const Panel = ({ title, found, children }) =>
	html`<aside aria-label=${title}><h2>${title}</h2><${Loaded} found=${found} what=${title}>${children}<//></aside>`;
export const aliases = signal(new Map());

export const readAliases = () => http("GET", "/policy-alias").then((all) => (aliases.value = new Map(all.map((each) => [each.alias, each.policy_rule_uri]))), () => {});

/** The version of an alias, or the aliases of a version. */
export function Means({ name }) {
	const all = useSignal(aliases);
	const other = all.get(name) || [...all].filter(([, each]) => each === name).map(([alias]) => alias).join(", ");
	return other ? html` <span class="note">(now ${other})</span>` : null;
}

/** A link to a version or an alias, with its `Means`; `bare`: without it. */
export const Policy = ({ name, row, bare }) => html`<a class=${row && "row"} href=${to("policies", name)}>${name}</a>${bare ? null : html`<${Means} name=${name} />`}`;

/** A link to an object by its id, in a view. */
export const Id = ({ of, view = "leases" }) => html`<a href=${to(view, of)}>${brief(of)}</a>`;
export const Place = ({ cluster_id: cluster, node_id: node }) => html`<a href=${node ? to("fleet", cluster, node) : to("fleet", cluster)}>${cluster}${node ? `/${node}` : ""}</a>`;

/** A list of events. */
export function History({ of, most }) {
	const [shown, more] = useFirst(of, most);
	return html`<ol class="history">${shown.map(({ at, what, more: text }) => html`<li>${at && html`<time>${when(at)}</time> `}<b>${what}</b> ${text}</li>`)}</ol>${more}`;
}

/** An object as a command and as JSON. */
export const Copies = ({ words, value }) => html`<p class="buttons"><${Command} words=${words} /></p><${Raw} value=${value} />`;

/** Handle a submitted form. */
export const handle = (work) => (event) => {
	event.preventDefault();
	return work(event.currentTarget);
};

/** Put a form's fields into the query of this view's address. */
export const filters = (view) => handle((form) => {
	const given = [...new FormData(form)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
	go(to(view) + (given.length ? `?${new URLSearchParams(given)}` : ""));
});

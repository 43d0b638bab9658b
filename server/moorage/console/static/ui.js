// What all views are made of.
import htm from "htm";
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { signal, useSignal } from "./signal.js";
import { address, ask, connection, heardAt, link } from "./socket.js";
import { brief, time, when } from "./format.js";
import { go, to } from "./router.js";
import { http, may, missing, session } from "./session.js";

export const html = htm.bind(h);

/** Text for screen readers, beside what is seen. */
export const said = signal("");

export const Loading = ({ what }) => html`<p class="loading" role="status">Loading ${what}…</p>`;

/** Nothing is there, which is known. */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** A "no" of the server. */
export const Refused = ({ error }) =>
	error ? html`<p class="alert" role="alert">${error.code ? html`<code>${error.code}</code> ` : ""}${error.code === "unknown_op" ? "This server does not serve that yet." : error.message}</p>` : null;

/** How fresh what is shown is; where it is stale, since when. */
export function Freshness() {
	const state = useSignal(link);
	if (state === "open") return html`<span class="fresh">live</span>`;
	const since = heardAt.value ? `as of ${time(heardAt.value / 1000)}, ` : "";
	return html`<span class="stale" role="status">${since}${state === "lost" ? "reconnecting" : "connecting"}</span>`;
}

/** What was answered, as it was answered. */
export function Raw({ value, label = "JSON" }) {
	const [open, setOpen] = useState(false);
	return html`<details class="raw" onToggle=${(e) => setOpen(e.target.open)}>
		<summary>${label}</summary>
		${open ? html`<${Text} label=${label} text=${JSON.stringify(value, null, 2)} />` : null}
	</details>`;
}

export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** The address that `moorage` uses where none is given. */
const USUAL = [/^ws:\/\/(127\.0\.0\.1|localhost|\[::1\]):8765$/, /^http:\/\/(127\.0\.0\.1|localhost|\[::1\]):8080$/];

/** What tells `moorage` of this server, where it is not the usual one. */
function server() {
	const at = [address(), location.origin];
	return at.every((url, n) => USUAL[n].test(url)) ? [] : ["--url", at[0], "--http-url", at[1]];
}

/** The code of `policy.py` as lines that write it to a new folder. */
function written(code) {
	let end = "END";
	while (code.includes(end)) end += "_";
	return `folder=$(mktemp -d)\ncat > "$folder/policy.py" <<'${end}'\n${code.trimEnd()}\n${end}\n`;
}

/** The command that does the same; `code` is that of its `policy.py`. */
export function Command({ words: [program, ...rest], code }) {
	const words = [program, ...(program === "moorage" ? server() : []), ...rest];
	const line = words.map((each) => (code && each === "policy.py" ? '"$folder/policy.py"' : quoted(each))).join(" ");
	const needs = program === "curl" && session.value?.login ? ' -H "Authorization: Bearer $MOORAGE_TOKEN"' : "";
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
	return html`<span class="command"><button type="button" title=${text} onClick=${copy}>Copy as command</button>
		${copied ? html`<code ref=${shown}>${copied === 1 ? "Copied" : text}</code>` : null}</span>`;
}

/** A modal dialog. */
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
 * An action: shows what would happen, then does it. `message` is an operation with a dry run; `say` puts what that
 * answers into words; `right` is what a role needs for it; `destroys`: it cannot be taken back. */
export function Action({ label, title, message, dry = () => ask({ ...message, dry_run: true }), act = () => ask(message), say, right, destroys, words, code, done, disabled }) {
	const lacks = right && !may(right) ? missing(right) : "";
	const [open, setOpen] = useState(false);
	const [shown, setShown] = useState(null);
	const [error, setError] = useState(null);
	const [busy, setBusy] = useState(false);
	const start = async () => {
		setOpen(true);
		setShown(null);
		setError(null);
		try {
			setShown(await dry());
		} catch (failure) {
			setError(failure);
		}
	};
	const run = async () => {
		setBusy(true);
		try {
			const answer = await act();
			setOpen(false);
			said.value = `Done: ${title}`;
			done?.(answer);
		} catch (failure) {
			setError(failure);
		}
		setBusy(false);
	};
	return html`<button type="button" class=${destroys ? "destroys" : ""} disabled=${disabled || !!lacks} title=${lacks || undefined} onClick=${start}>${label}</button>
		${open
			? html`<${Dialog} title=${title} close=${() => setOpen(false)}>
					${error ? html`<${Refused} error=${error} />` : shown === null ? html`<${Loading} what="what would happen" />` : html`<${Outcome} shown=${shown} say=${say} />`}
					<p class="buttons">
						<button type="button" class=${destroys ? "primary destroys" : "primary"} disabled=${busy || shown === null} onClick=${run}>${label} now</button>
						<button type="button" onClick=${() => setOpen(false)}>Change nothing</button>
						${words ? html`<${Command} words=${words} code=${code} />` : null}
					</p>
				<//>`
			: null}`;
}

/** What a dry run said, in words where there are some; JSON folded. */
function Outcome({ shown, say }) {
	return html`<div class="outcome">${say ? html`<div class="words">${say(shown)}</div><${Raw} value=${shown} label="The dry run as JSON" />` : shown}</div>`;
}

/** A part of a view with its heading; with `found`, `children` make it of what is loaded. */
export const Section = ({ title, children, id, found, what }) =>
	html`<section aria-label=${title} id=${id}><h2>${title}</h2>${found ? html`<${Loaded} found=${found} what=${what}>${children}<//>` : children}</section>`;

/** Names and values. */
export const Facts = ({ pairs }) =>
	html`<dl>${pairs.filter(([, value]) => value !== undefined && value !== "" && value !== null)
		.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

const MARKS = { active: "●", granted: "●", starting: "◐", warm: "◍", failing: "✕", queued: "…", ending: "◌", ended: "○", refused: "✕", waiting: "…", advised: "○" };

/** A state, as a mark and a word. */
export const State = ({ state }) => html`<span class=${"state " + state}><span aria-hidden="true">${MARKS[state] || "·"}</span> ${state}</span>`;

/** Load something, again `every` ms, and when `needs` or the connection change. */
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

/** Load an answer over HTTP, as `useLoaded` does. */
export const useGet = (path, needs, every) => useLoaded(() => http("GET", path), needs, every);

/** What came of what a person started, and how to start it. */
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

/** Do something every so often while the page is seen; 0: never. */
export function useEvery(work, ms, needs) {
	useEffect(() => {
		if (!ms) return;
		const timer = setInterval(() => document.hidden || work(), ms);
		return () => clearInterval(timer);
	}, needs);
}

/** Take what is typed. */
export const typed = (set) => (e) => set(e.target.value);

/** A table; the first cell of each row is its head. `wordy`: the last has sentences */
export const Grid = ({ label, heads, rows, current, wordy }) => html`<table aria-label=${label} class=${wordy === true ? "wordy" : wordy}><thead><tr>${heads.map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
	<tbody>${rows.map(([first, ...cells], row) => html`<tr class=${row === current ? "current" : ""}><th scope="row">${first}</th>${cells.map((each, at) => html`<td data-head=${heads[at + 1]}>${each}</td>`)}</tr>`)}</tbody></table>`;

/** What scrolls by itself, also by keys. */
export const Scroll = ({ label, few, children }) => html`<div class=${few ? "scroll few" : "scroll"} tabindex="0" role="region" aria-label=${`${label}, scrollable`}>${children}</div>`;

/** One of several. */
export const Choice = ({ label, value, set, options }) => html`<label>${label} <select value=${value} onChange=${typed(set)}>${options.map((each) => {
	const [name, text] = Array.isArray(each) ? each : [each, each];
	return html`<option value=${name} selected=${name === value}>${text}</option>`;
})}</select></label>`;

/** Text as it was written. */
export const Text = ({ label, text }) => html`<pre class="output" tabindex="0" role="region" aria-label=${label}>${text}</pre>`;

/** What `children` makes of what is loaded. */
export const Loaded = ({ found, what, children }) =>
	html`<${Refused} error=${found.error} />${found.value !== undefined ? children(found.value) : found.error || found.idle ? null : html`<${Loading} what=${what} />`}`;

/** One object beside a list. */
export const Panel = ({ title, found, children }) =>
	html`<aside aria-label=${title}><h2>${title}</h2><${Loaded} found=${found} what=${title}>${children}<//></aside>`;

/** A version or an alias. */
export const Policy = ({ name, row }) => html`<a class=${row && "row"} href=${to("policies", name)}>${name}</a>`;

/** Something by its id, in a view. */
export const Id = ({ of, view = "leases" }) => html`<a href=${to(view, of)}>${brief(of)}</a>`;

/** A node, or a cluster. */
export const Place = ({ cluster_id: cluster, node_id: node }) => html`<a href=${node ? to("fleet", cluster, node) : to("fleet", cluster)}>${cluster}${node ? `/${node}` : ""}</a>`;

/** What happened to an object. */
export const History = ({ of }) => html`<ol class="history">${of.map(({ at, what, more }) => html`<li>${at ? html`<time>${when(at)}</time> ` : null}<b>${what}</b> ${more}</li>`)}</ol>`;

/** An object as a command and as JSON. */
export const Copies = ({ words, value }) => html`<p class="buttons"><${Command} words=${words} /></p><${Raw} value=${value} />`;

/** Have a form's fields be the query of this view. */
export const filters = (view) => (event) => {
	event.preventDefault();
	const given = [...new FormData(event.currentTarget).entries()].map(([name, value]) => [name, String(value).trim()]).filter(([, value]) => value);
	go(to(view) + (given.length ? `?${new URLSearchParams(given)}` : ""));
};

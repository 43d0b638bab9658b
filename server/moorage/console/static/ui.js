// What all views are made of: states of loading, raw JSON, commands to copy, actions, dialogs.
import htm from "htm";
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { signal, useSignal } from "./signal.js";
import { address, ask, connection, heardAt, link } from "./socket.js";
import { moment, time } from "./format.js";
import { go, to } from "./router.js";
import { session } from "./session.js";

export const html = htm.bind(h);

/** What a screen reader is told, beside what is seen. */
export const said = signal("");

/** @param {{what: string}} props */
export const Loading = ({ what }) => html`<p class="loading" role="status">Loading ${what}…</p>`;

/** Nothing is there, which is known. @param {{children?: any}} props */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** A "no" of the server. @param {{error: any}} props */
export const Refused = ({ error }) =>
	error ? html`<p class="alert" role="alert">${error.code ? html`<code>${error.code}</code> ` : ""}${error.code === "unknown_op" ? "This server does not serve that yet." : error.message}</p>` : null;

/** How fresh what is shown is; where it is stale, since when. */
export function Freshness() {
	const state = useSignal(link);
	if (state === "open") return html`<span class="fresh">live</span>`;
	const since = heardAt.value ? `as of ${time(heardAt.value / 1000)}, ` : "";
	return html`<span class="stale" role="status">${since}${state === "lost" ? "reconnecting" : "connecting"}</span>`;
}

/** What was answered, as it was answered. @param {{value: any, label?: string}} props */
export function Raw({ value, label = "JSON" }) {
	const [open, setOpen] = useState(false);
	return html`<details class="raw" onToggle=${(e) => setOpen(e.target.open)}>
		<summary>${label}</summary>
		${open ? html`<${Text} label=${label} text=${JSON.stringify(value, null, 2)} />` : null}
	</details>`;
}

/** @param {string} word */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** Where `moorage` looks for a server that it is told nothing of. */
const USUAL = [/^ws:\/\/(127\.0\.0\.1|localhost|\[::1\]):8765$/, /^http:\/\/(127\.0\.0\.1|localhost|\[::1\]):8080$/];

/** What tells `moorage` of this server, where it is not the usual one. */
function server() {
	const at = [address(), location.origin];
	return at.every((url, n) => USUAL[n].test(url)) ? [] : ["--url", at[0], "--http-url", at[1]];
}

/** The code of `policy.py` as lines that write it to a new folder. @param {string} code */
function written(code) {
	let end = "END";
	while (code.includes(end)) end += "_";
	return `folder=$(mktemp -d)\ncat > "$folder/policy.py" <<'${end}'\n${code.trimEnd()}\n${end}\n`;
}

/** The command that does the same; `code` is that of its `policy.py`. @param {{words: string[], code?: string}} props */
export function Command({ words: [program, ...rest], code }) {
	const words = [program, ...(program === "moorage" ? server() : []), ...rest];
	const line = words.map((each) => (code && each === "policy.py" ? '"$folder/policy.py"' : quoted(each))).join(" ");
	const needs = program === "curl" && session.value?.login ? ' -H "Authorization: Bearer $MOORAGE_TOKEN"' : "";
	const text = (code ? written(code) : "") + line + needs;
	const [copied, setCopied] = useState("");
	const copy = async () => {
		try {
			await navigator.clipboard.writeText(text);
			setCopied("Copied");
		} catch {
			setCopied(text); // Pages without TLS may not write to the clipboard: it can be selected here.
		}
		said.value = `Copied: ${line}`;
		setTimeout(() => setCopied(""), 8000);
	};
	return html`<span class="command"><button type="button" title=${text} onClick=${copy}>Copy as command</button>
		${copied ? html`<code>${copied}</code>` : null}</span>`;
}

/** A modal dialog. @param {{title: string, close: () => void, children?: any}} props */
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
 * An action: shows what would happen, then does it. `message` is an operation with a dry run.
 * @param {{label: string, title: string, message?: any, dry?: () => Promise<any>, act?: () => Promise<any>,
 *   words?: string[], code?: string, done?: (answer: any) => void, disabled?: boolean}} props
 */
export function Action({ label, title, message, dry = () => ask({ ...message, dry_run: true }), act = () => ask(message), words, code, done, disabled }) {
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
	return html`<button type="button" disabled=${disabled} onClick=${start}>${label}</button>
		${open
			? html`<${Dialog} title=${title} close=${() => setOpen(false)}>
					${error ? html`<${Refused} error=${error} />` : shown === null ? html`<${Loading} what="what would happen" />` : html`<${Outcome} shown=${shown} />`}
					<p class="buttons">
						<button type="button" class="primary" disabled=${busy || shown === null} onClick=${run}>${label} now</button>
						<button type="button" onClick=${() => setOpen(false)}>Change nothing</button>
						${words ? html`<${Command} words=${words} code=${code} />` : null}
					</p>
				<//>`
			: null}`;
}

/** What a dry run said. @param {{shown: any}} props */
function Outcome({ shown }) {
	if (typeof shown === "string" || shown?.type || Array.isArray(shown)) return html`<div class="outcome">${shown}</div>`;
	const { text, ...rest } = shown;
	return html`<div class="outcome"><p>${text || "This would happen:"}</p><${Raw} value=${rest} label="The dry run as JSON" /></div>`;
}

/** A part of a view with its heading. @param {{title: string, children?: any, id?: string}} props */
export const Section = ({ title, children, id }) =>
	html`<section aria-label=${title} id=${id}><h2>${title}</h2>${children}</section>`;

/** Names and values. @param {{pairs: [string, any][]}} props */
export const Facts = ({ pairs }) =>
	html`<dl>${pairs.filter(([, value]) => value !== undefined && value !== "" && value !== null)
		.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** @type {Record<string, string>} */
const MARKS = { active: "●", granted: "●", starting: "◐", warm: "◍", failing: "✕", queued: "…", ending: "◌", ended: "○", refused: "✕", waiting: "…", advised: "○" };

/** A state, as a mark and a word. @param {{state: string}} props */
export const State = ({ state }) => html`<span class=${"state " + state}><span aria-hidden="true">${MARKS[state] || "·"}</span> ${state}</span>`;

/** Load something, and again when `needs` change or the connection is a new one. @param {() => Promise<any>} load
 * @param {any[]} needs @returns {{value: any, error: any, again: () => void}} */
export function useLoaded(load, needs) {
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
	return { ...state, again: () => setTurn((n) => n + 1) };
}

/** Do something every so often while the page is seen. @param {() => void} work @param {number} ms @param {any[]} needs */
export function useEvery(work, ms, needs) {
	useEffect(() => {
		const timer = setInterval(() => document.hidden || work(), ms);
		return () => clearInterval(timer);
	}, needs);
}

/** Take what is typed. @param {(text: string) => void} set */
export const typed = (set) => (e) => set(e.target.value);

/** A table; the first cell of each row is its head. @param {{label: string, heads: string[], rows: any[][], current?: number}} props */
export const Grid = ({ label, heads, rows, current }) => html`<table aria-label=${label}><thead><tr>${heads.map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
	<tbody>${rows.map(([first, ...cells], row) => html`<tr class=${row === current ? "current" : ""}><th scope="row">${first}</th>${cells.map((each, at) => html`<td>${each}</td>`)}</tr>`)}</tbody></table>`;

/** Text as it was written. @param {{label: string, text: string}} props */
export const Text = ({ label, text }) => html`<pre class="output" tabindex="0" role="region" aria-label=${label}>${text}</pre>`;

/** What `children` makes of what is loaded; until then that it is loading, or why not.
 * @param {{found: any, what: string, children?: any}} props */
export const Loaded = ({ found, what, children }) =>
	html`<${Refused} error=${found.error} />${found.value !== undefined ? children(found.value) : found.error ? null : html`<${Loading} what=${what} />`}`;

/** One object beside a list. @param {{title: string, found: any, children?: any}} props */
export const Panel = ({ title, found, children }) =>
	html`<aside aria-label=${title}><h2>${title}</h2><${Loaded} found=${found} what=${title}>${children}<//></aside>`;

/** A version or an alias. @param {{name: string, row?: boolean}} props `row`: `j` and `k` stop there. */
export const Policy = ({ name, row }) => html`<a class=${row && "row"} href=${to("policies", name)}>${name}</a>`;

/** What happened to an object. @param {{of: {at?: number, what: string, more?: any}[]}} props */
export const History = ({ of }) => html`<ol class="history">${of.map(({ at, what, more }) => html`<li>${at ? html`<time>${moment(at)}</time> ` : null}<b>${what}</b> ${more}</li>`)}</ol>`;

/** An object as a command and as JSON. @param {{words: string[], value: any}} props */
export const Copies = ({ words, value }) => html`<p class="buttons"><${Command} words=${words} /></p><${Raw} value=${value} />`;

/** Have a form's fields be the query of this view. @param {string} view */
export const filters = (view) => (event) => {
	event.preventDefault();
	const given = [...new FormData(event.currentTarget).entries()].map(([name, value]) => [name, String(value).trim()]).filter(([, value]) => value);
	go(to(view) + (given.length ? `?${new URLSearchParams(given)}` : ""));
};

// A text area for Python: colours, times of lines, and errors at their lines.
import { useRef } from "preact/hooks";
import { Button, html } from "./ui.js";

const TOKEN = /(#.*)|("""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|[rbf]?"(?:\\.|[^"\\\n])*"?|[rbf]?'(?:\\.|[^'\\\n])*'?)|\b(False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield)\b|\b(\d[\w.]*)|(?<=\b(?:def|class)\s+)(\w+)/g;
const KINDS = ["comment", "string", "keyword", "number", "name"];
const COLOURED_MAX = 50000;

/** Pieces of code with their kinds. */
export function coloured(code) {
	if (code.length > COLOURED_MAX) return [["", code]];
	const found = [];
	let from = 0;
	for (const match of code.matchAll(TOKEN)) {
		if (match.index > from) found.push(["", code.slice(from, match.index)]);
		found.push([KINDS[match.slice(1).findIndex((each) => each !== undefined)], match[0]]);
		from = match.index + match[0].length;
	}
	found.push(["", code.slice(from)]);
	return found;
}

/** `lines`: the times of lines; `wrong`: errors by line. */
export function Editor({ code, change, lines, wrong }) {
	const numbers = useRef(null);
	const colours = useRef(null);
	const area = useRef(null);
	const took = new Map((lines || []).map((each) => [each.line, each.seconds ?? each.milliseconds / 1000]));
	const all = code.split("\n");
	const scrolled = (e) => {
		numbers.current.scrollTop = colours.current.scrollTop = e.target.scrollTop;
		colours.current.scrollLeft = e.target.scrollLeft;
	};
	const reach = (line) => {
		const from = all.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
		area.current.focus();
		area.current.setSelectionRange(from, from + (all[line - 1] || "").length);
	};
	return html`<label class="editor-label" for="code">Policy (Python)</label><div class="editor"><pre aria-hidden ref=${numbers}>${all.map((_, at) => {
			const seconds = took.get(at + 1);
			return html`<span class=${wrong.has(at + 1) ? "wrong" : ""}>${seconds === undefined ? "" : `${(seconds * 1000).toFixed(2)} ms `}${wrong.has(at + 1) ? "✕ " : ""}${at + 1}${"\n"}</span>`;
		})}</pre>
		<div class="code"><pre aria-hidden ref=${colours}>${coloured(code).map(([kind, text]) => (kind ? html`<span class=${"t-" + kind}>${text}</span>` : text))}${"\n"}</pre>
		<textarea id="code" ref=${area} spellcheck="false" autocapitalize="off" wrap="off" aria-describedby=${wrong.size ? "wrong" : undefined} value=${code} onInput=${(e) => change(e.target.value)} onScroll=${scrolled}></textarea></div></div>
		${wrong.size ? html`<ul id="wrong" class="alert">${[...wrong].map(([line, text]) => html`<li><${Button} onClick=${() => reach(line)}>Line ${line}<//> ${text}</li>`)}</ul>` : null}`;
}

// The lines in which two texts differ, by their longest common subsequence.
import { html } from "./ui.js";

const LINES_MAX = 2000;

/** @param {string} before @param {string} after @returns {[" " | "-" | "+", string][]} */
export function difference(before, after) {
	const a = before.split("\n").slice(0, LINES_MAX);
	const b = after.split("\n").slice(0, LINES_MAX);
	let head = 0;
	while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
	let tail = 0;
	while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
	const one = a.slice(head, a.length - tail);
	const two = b.slice(head, b.length - tail);
	const wide = two.length + 1;
	const best = new Uint16Array((one.length + 1) * wide);
	for (let i = one.length - 1; i >= 0; i--) {
		for (let j = two.length - 1; j >= 0; j--) best[i * wide + j] = one[i] === two[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
	}
	/** @type {[" " | "-" | "+", string][]} */
	const found = a.slice(Math.max(0, head - 3), head).map((line) => [" ", line]);
	let [i, j] = [0, 0];
	while (i < one.length || j < two.length) {
		if (i < one.length && j < two.length && one[i] === two[j]) {
			found.push([" ", one[i++]]);
			j += 1;
		} else if (j >= two.length || (i < one.length && best[(i + 1) * wide + j] >= best[i * wide + j + 1])) found.push(["-", one[i++]]);
		else found.push(["+", two[j++]]);
	}
	for (const line of a.slice(a.length - tail, a.length - tail + 3)) found.push([" ", line]);
	return found;
}

export function Difference({ before, after, names }) {
	if (before === after) return html`<p class="empty">${names[0]} and ${names[1]} have the same code.</p>`;
	return html`<p><code>-</code> ${names[0]}, <code>+</code> ${names[1]}</p>
		<pre class="difference" tabindex="0" role="region" aria-label="Difference">${difference(before, after).map(([sign, line], at) => html`<span key=${at} class=${sign === "+" ? "added" : sign === "-" ? "removed" : ""}>${sign} ${line}${"\n"}</span>`)}</pre>`;
}

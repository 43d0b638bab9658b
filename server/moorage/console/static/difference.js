// The lines in which two texts differ, by their longest common subsequence.
import { html } from "./ui.js";

const LINES_MAX = 2000;

export function difference(before, after) {
	const a = before.split("\n").slice(0, LINES_MAX);
	const b = after.split("\n").slice(0, LINES_MAX);
	const wide = b.length + 1;
	const best = new Uint16Array((a.length + 1) * wide);
	for (let i = a.length - 1; i >= 0; i--) {
		for (let j = b.length - 1; j >= 0; j--) best[i * wide + j] = a[i] === b[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
	}
	const found = [];
	let [i, j] = [0, 0];
	while (i < a.length || j < b.length) {
		if (i < a.length && j < b.length && a[i] === b[j]) {
			found.push([" ", a[i++]]);
			j += 1;
		} else if (j >= b.length || (i < a.length && best[(i + 1) * wide + j] >= best[i * wide + j + 1])) found.push(["-", a[i++]]);
		else found.push(["+", b[j++]]);
	}
	// Show only lines near a difference.
	return found.filter((_, at) => found.slice(Math.max(0, at - 3), at + 4).some(([sign]) => sign !== " "));
}

export function Difference({ before, after, names }) {
	if (before === after) return html`<p class="empty">${names[0]} and ${names[1]} have the same code.</p>`;
	return html`<p><code>-</code> ${names[0]}, <code>+</code> ${names[1]}</p>
		<pre class="difference" tabindex="0" role="region" aria-label="Difference">${difference(before, after).map(([sign, line], at) => html`<span class=${sign === "+" ? "added" : sign === "-" ? "removed" : ""}>${sign} ${line}${"\n"}</span>`)}</pre>`;
}

// The picture of a backtest: what is allocated while more and more is demanded.
import { useState } from "preact/hooks";
import { count } from "./format.js";
import { may, missing } from "./session.js";
import { ask } from "./socket.js";
import { Facts, Grid, html } from "./ui.js";

const TRACED_MAX = 5000;

/** Allocation against demand, and the same as a table. */
export function Curve({ points }) {
	const most = Math.max(...points.map(([x]) => x), 1e-9);
	const high = Math.max(...points.map(([, y]) => y), most, 1e-9);
	const percent = (n) => `${(n * (high <= 3 ? 100 : 1)).toFixed(1)} %`;
	const path = points.map(([x, y], at) => `${at ? "L" : "M"}${40 + (x / most) * 350},${170 - (y / high) * 155}`).join("");
	const shown = points.filter((_, at) => at % Math.ceil(points.length / 12) === 0 || at === points.length - 1);
	return html`<svg class="curve" viewBox="0 0 400 200" role="img" aria-label=${`Allocated against demanded capacity, at the end ${percent(points.at(-1)?.[1] || 0)}; the table below has the figures`}>
			<path d="M40,10V170H395" class="axis" /><path d=${`M40,170L390,${170 - (most / high) * 155}`} class="axis dashed" /><path d=${path} class="line" />
			<text x="36" y="18" text-anchor="end">${percent(high)}</text><text x="395" y="186" text-anchor="end">${percent(most)} demanded</text><text x="40" y="186">0</text><text x="46" y="18">allocated; dashed: all that is demanded</text></svg>
		<details><summary>The figures</summary><${Grid} label="Curve" heads=${["demanded", "allocated"]} rows=${shown.map(([x, y]) => [percent(x), percent(y)])} /></details>`;
}

/** What came of a backtest. */
export const Backtested = ({ it }) => html`<${Curve} points=${it.curve} />
	<${Facts} pairs=${[["allocation", it.allocation === undefined ? "" : `${(it.allocation * (it.allocation <= 1 ? 100 : 1)).toFixed(1)} %`], ["granted", it.granted === undefined ? "" : count(it.granted)],
		["refused", it.refused ? Object.entries(it.refused).map(([name, n]) => `${count(n)} ${name}`).join(", ") || "0" : ""]]} />`;

/** A text that may come from a file. */
export const Upload = ({ label, text, change, accept }) => html`<label class="wide">${label}<textarea rows="4" spellcheck="false" value=${text} onInput=${(e) => change(e.target.value)}></textarea></label>
	<label class="file">or a file <input type="file" accept=${accept} onChange=${async (e) => e.target.files[0] && change(await e.target.files[0].text())} /></label>`;

/** What is held now as a trace. */
async function held() {
	let [leases, after] = [[], ""];
	while (after !== null && leases.length < TRACED_MAX) {
		const page = await ask({ op: "leases", limit: 1000, ...(after ? { after } : {}) });
		leases = leases.concat(page.leases);
		after = page.next;
	}
	const rows = leases.flatMap((lease) => lease.placement.map((share, n) => [`${lease.id}-${n}`, share.cpu_milli || 0, share.memory_mib || 0, share.gpus?.length || 0, share.gpus?.length ? share.gpu_milli ?? 1000 : 0].join(",")));
	return ["name,cpu_milli,memory_mib,num_gpu,gpu_milli", ...rows].join("\n") + "\n";
}

/** What a backtest is run on. */
export function Backtest({ busy, run }) {
	const [trace, setTrace] = useState("");
	const lacks = may("policy") ? undefined : missing("policy");
	return html`<details><summary>Backtest on a trace</summary><p class="note">On a fleet from empty; nothing is held.</p>
		<p class="buttons"><button type="button" disabled=${busy} onClick=${async () => setTrace(await held())}>Take what is held now</button></p>
		<${Upload} label="Trace (CSV: cpu_milli, memory_mib, num_gpu, gpu_milli, …)" text=${trace} change=${setTrace} accept=".csv" />
		<p class="buttons"><button type="button" disabled=${busy || lacks || !trace.trim()} title=${lacks} onClick=${() => run(trace)}>Backtest</button></p></details>`;
}

// The chart of a backtest: allocation against growing demand.
import { useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { count, percent } from "./format.js";
import { lacks } from "./session.js";
import { collect } from "./socket.js";
import { Button, Facts, html, typed } from "./ui.js";

const TRACED_MAX = 5000;

/** Allocation against demand, and the same as a table. */
export function Curve({ points }) {
	const [at, allocated] = [0, 1].map((n) => points.map((each) => each[n]));
	return html`<${Chart} title="Allocated against demanded" at=${at} axis=${(n) => `${percent(n)} demanded`} said=${percent} series=${[{ name: "allocated", key: "k0", values: allocated }, { name: "all that is demanded", key: "k6", values: at }]} />`;
}
export const Backtested = ({ it }) => html`<${Curve} points=${it.curve} />
	<${Facts} pairs=${[["allocation", it.allocation === undefined ? "" : percent(it.allocation)], ["granted", it.granted === undefined ? "" : count(it.granted)],
		["refused", it.refused ? Object.entries(it.refused).map(([name, n]) => `${count(n)} ${name}`).join(", ") || "0" : ""]]} />`;

/** A text that may come from a file. */
export const Upload = ({ label, text, change, accept }) => html`<label class="wide">${label}<textarea rows="4" spellcheck="false" value=${text} onInput=${typed(change)}></textarea></label>
	<label class="file">or a file <input type="file" accept=${accept} onChange=${async (e) => e.target.files[0] && change(await e.target.files[0].text())} /></label>`;
async function held() {
	const leases = await collect({ op: "leases" }, "leases", TRACED_MAX);
	const rows = leases.flatMap((lease) => lease.placement.map((share, n) => [`${lease.id}-${n}`, share.cpu_milli || 0, share.memory_mib || 0, share.gpus?.length || 0, share.gpus?.length ? share.gpu_milli ?? 1000 : 0].join(",")));
	return ["name,cpu_milli,memory_mib,num_gpu,gpu_milli", ...rows].join("\n") + "\n";
}
export function Backtest({ busy, run }) {
	const [trace, setTrace] = useState("");
	const off = lacks("policy") || (trace.trim() ? "" : "There is no trace yet.");
	return html`<details><summary>Backtest on a trace</summary><p class="note">Starts with an empty fleet, and grants no lease.</p>
		<p class="buttons"><${Button} disabled=${busy} onClick=${async () => setTrace(await held())}>Use the present leases<//></p>
		<${Upload} label="Trace (CSV: cpu_milli, memory_mib, num_gpu, gpu_milli, …)" text=${trace} change=${setTrace} accept=".csv" />
		<p class="buttons"><${Button} off=${off} disabled=${busy} onClick=${() => run(trace)}>Backtest<//></p></details>`;
}

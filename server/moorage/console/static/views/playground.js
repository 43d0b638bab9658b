// Playground: a policy on the left, what it is tried on and what it did on the right; it runs in the same jail.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, places, shape } from "../format.js";
import { go, to } from "../router.js";
import { Failure, http } from "../session.js";
import { ask } from "../socket.js";
import { Action, Command, Empty, Facts, Grid, Loading, Raw, Refused, Section, Text, html, said } from "../ui.js";

const START = `from typing import Any

import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the first node with room."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        scores = np.where(fleet.feasible(demand), 0, -1)
        return propose(fleet, demand, best_rows(fleet, demand, scores))
`;
const REQUESTS = '[{"inputs": {}, "resources": {"gpus": 1}}]';
const KEPT = "moorage.playground"; // What was typed last, in this tab alone.

export function Playground({ query }) {
	const decision = query.get("decision") || "";
	const policy = query.get("policy") || "";
	const [code, setCode] = useState(() => sessionStorage.getItem(KEPT) || START);
	const [fleet, setFleet] = useState(decision ? "decision" : "live");
	const [documents, setDocuments] = useState("");
	const [requests, setRequests] = useState(REQUESTS);
	const [result, setResult] = useState(null);
	const [error, setError] = useState(null);
	const [busy, setBusy] = useState("");
	const shown = useRef(null);

	useEffect(() => {
		if (policy) http("GET", `/policy/${encodeURIComponent(policy)}`).then((each) => setCode(String(each.code)), setError);
	}, [policy]);
	useEffect(() => {
		setFleet(decision ? "decision" : "live");
		if (!decision) return;
		ask({ op: "decision_fleet", request: decision }).then((found) => {
			const { adhoc, id, policy_rule_uri, ...request } = found.request;
			setRequests(JSON.stringify([request], null, 1));
			if (!policy && policy_rule_uri) http("GET", `/policy/${encodeURIComponent(policy_rule_uri)}`).then((each) => setCode(String(each.code)), () => {});
		}, (failure) => {
			setFleet("live"); // What is known of the fleet then is gone, or not kept.
			setError(failure);
		});
	}, [decision]);
	useEffect(() => {
		sessionStorage.setItem(KEPT, code);
	}, [code]);

	const input = () => ({
		code,
		fleet: fleet === "live" ? "live" : fleet === "decision" ? { decision } : { clusters: parsed(documents, "the clusters") },
	});
	const run = async (what, work) => {
		setBusy(what);
		setError(null);
		try {
			setResult({ what, ...(await work()) });
			said.value = `${what} is done`;
		} catch (failure) {
			setError(failure);
		}
		setBusy("");
		shown.current?.scrollIntoView({ block: "nearest" });
	};
	const trial = () => run("The run", () => http("POST", "/console/playground", { ...input(), requests: parsed(requests, "the requests") }));
	const keys = (event) => {
		if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
			event.preventDefault();
			trial();
		}
	};
	return html`<div class="playground" onKeyDown=${keys}>
		<div>
			<${Editor} code=${code} change=${setCode} lines=${result?.lines} />
			<p class="buttons"><button type="button" class="primary" disabled=${!!busy} onClick=${trial}>Run</button> <span class="note">Ctrl+Enter runs</span>
				<${Save} code=${code} /> <${Command} words=${["moorage", "policy", "test", "policy.py"]} code=${code} /></p>
		</div>
		<div>
			<${Section} title="What it is tried on">
				<fieldset><legend>Fleet</legend>
					<label><input type="radio" name="fleet" checked=${fleet === "live"} onChange=${() => setFleet("live")} /> as it is now</label>
					<label><input type="radio" name="fleet" checked=${fleet === "upload"} onChange=${() => setFleet("upload")} /> uploaded</label>
					<label><input type="radio" name="fleet" disabled=${!decision} checked=${fleet === "decision"} onChange=${() => setFleet("decision")} /> as it was at ${decision ? html`decision <a href=${to("why", decision)}>${decision}</a>` : "a decision (open one from Why)"}</label>
				</fieldset>
				${fleet === "upload" ? html`<${Upload} label="Cluster documents (JSON)" text=${documents} change=${setDocuments} accept=".json" />` : null}
				<${Upload} label="Requests (JSON list)" text=${requests} change=${setRequests} accept=".json" />
			<//>
			<${Backtest} busy=${!!busy} run=${(trace) => run("The backtest", () => http("POST", "/console/playground/backtest", { ...input(), trace }))} />
			<div ref=${shown} aria-live="polite">
				${busy ? html`<${Loading} what=${busy.toLowerCase()} />` : null}
				<${Refused} error=${error} />
				${error?.reply?.error ? html`<${Raw} value=${error.reply} />` : null}
				${result && !busy && !error ? html`<${Results} it=${result} />` : null}
			</div>
		</div>
	</div>`;
}

/** @param {string} text @param {string} what */
function parsed(text, what) {
	try {
		const found = JSON.parse(text);
		return Array.isArray(found) ? found : [found];
	} catch (error) {
		throw new Failure(`Of ${what}: this is no JSON. ${error.message}`, "bad_json");
	}
}

/** A text area with numbers of lines and their times. */
function Editor({ code, change, lines }) {
	const numbers = useRef(null);
	const took = new Map((lines || []).map((each) => [each.line, each.seconds ?? each.milliseconds / 1000]));
	const text = Array.from({ length: code.split("\n").length }, (_, at) => {
		const seconds = took.get(at + 1);
		return (seconds === undefined ? "" : `${(seconds * 1000).toFixed(2)} ms `) + (at + 1);
	}).join("\n");
	return html`<label class="editor-label" for="code">Policy (Python)</label><div class="editor"><pre aria-hidden="true" ref=${numbers}>${text}</pre>
		<textarea id="code" spellcheck="false" autocapitalize="off" wrap="off" value=${code} onInput=${(e) => change(e.target.value)}
			onScroll=${(e) => numbers.current && (numbers.current.scrollTop = e.target.scrollTop)}></textarea></div>`;
}

/** A text that may come from a file. */
function Upload({ label, text, change, accept }) {
	return html`<label class="wide">${label}<textarea rows="4" spellcheck="false" value=${text} onInput=${(e) => change(e.target.value)}></textarea></label>
		<label class="file">or a file <input type="file" accept=${accept} onChange=${async (e) => e.target.files[0] && change(await e.target.files[0].text())} /></label>`;
}

function Backtest({ busy, run }) {
	const [trace, setTrace] = useState("");
	return html`<details><summary>Backtest on a trace</summary>
		<${Upload} label="Trace (CSV: cpu_milli, memory_mib, num_gpu, gpu_milli, …)" text=${trace} change=${setTrace} accept=".csv" />
		<p class="buttons"><button type="button" disabled=${busy || !trace.trim()} onClick=${() => run(trace)}>Backtest</button></p></details>`;
}

function Results({ it }) {
	const results = it.results || [];
	const seconds = (s) => (s === undefined ? "" : `${(s * 1000).toFixed(1)} ms`);
	const used = new Map();
	for (const each of results) {
		for (const share of each.placement || []) {
			const node = `${share.cluster_id}/${share.node_id}`;
			used.set(node, [...(used.get(node) || []), ...(share.gpus?.length ? share.gpus : ["–"])]);
		}
	}
	return html`<${Section} title="What it did">
		${it.fleet?.nodes !== undefined ? html`<p>On ${count(it.fleet.nodes)} nodes with ${count(it.fleet.gpus)} GPUs, in ${seconds(it.seconds)}.</p>` : null}
		${results.length ? html`<${Grid} label="Results" heads=${["request", "outcome", "time"]} rows=${results.map((each, n) => [n + 1,
				html`${each.ok ? html`<span class="state granted">✓ placed</span> ${places(each.placement)}` : html`<span class="state refused">✕ refused</span> <code>${each.code}</code> ${each.reason}${each.line ? ` (line ${each.line})` : ""}`}
					${each.data !== undefined && !each.ok ? html`<${Raw} value=${each.data} label="What it returned" />` : null}`, seconds(each.seconds)])} />` : null}
		${used.size ? html`<${Section} title="Where"><ul class="small-map">${[...used].slice(0, 60).map(([node, gpus]) => html`<li>${node} ${gpus.map((gpu, n) => html`<span class="swatch s-h wide">${gpu}</span>`)}</li>`)}</ul><//>` : null}
		${it.prints?.length ? html`<${Section} title="Prints"><${Text} label="What it printed" text=${it.prints.join("\n")} /><//>` : results.length ? html`<${Empty}>It printed nothing.<//>` : null}
		${it.curve ? html`<${Section} title="Backtest"><${Curve} points=${it.curve} />
			<${Facts} pairs=${[["allocation", it.allocation === undefined ? "" : `${(it.allocation * (it.allocation <= 1 ? 100 : 1)).toFixed(1)} %`], ["granted", it.granted === undefined ? "" : count(it.granted)],
				["refused", it.refused ? Object.entries(it.refused).map(([name, n]) => `${n} ${name}`).join(", ") || "0" : ""]]} /><//>` : null}
		<${Raw} value=${it} />
	<//>`;
}

/** Allocation against demand, and the same as a table. */
function Curve({ points }) {
	const most = Math.max(...points.map(([x]) => x), 1e-9);
	const high = Math.max(...points.map(([, y]) => y), most, 1e-9);
	const percent = (n) => `${(n * (high <= 3 ? 100 : 1)).toFixed(1)} %`;
	const path = points.map(([x, y], at) => `${at ? "L" : "M"}${40 + (x / most) * 350},${170 - (y / high) * 155}`).join("");
	const some = points.filter((_, at) => at % Math.ceil(points.length / 12) === 0 || at === points.length - 1);
	return html`<svg class="curve" viewBox="0 0 400 200" role="img" aria-label=${`Allocated against demanded capacity, at the end ${percent(points.at(-1)?.[1] || 0)}; the table below has the figures`}>
			<path d="M40,10V170H395" class="axis" /><path d=${path} class="line" />
			<text x="36" y="18" text-anchor="end">${percent(high)}</text><text x="395" y="186" text-anchor="end">${percent(most)} demanded</text><text x="40" y="186">0</text></svg>
		<details><summary>The figures</summary><${Grid} label="Curve" heads=${["demanded", "allocated"]} rows=${some.map(([x, y]) => [percent(x), percent(y)])} /></details>`;
}

function Save({ code }) {
	const [uri, setUri] = useState("");
	const [open, setOpen] = useState(false);
	if (!open) return html`<button type="button" onClick=${() => setOpen(true)}>Save as a version…</button>`;
	const sound = /^[\w.]+:[\w.]+-\w+$/.test(uri);
	return html`<span class="save"><label>Version <input value=${uri} placeholder="name:1.0-stable" onInput=${(e) => setUri(e.target.value.trim())} /></label>
		<${Action} label="Save" title=${`Save as ${uri}`} disabled=${!sound} words=${["moorage", "policy", "push", "policy.py", "--uri", uri]} code=${code}
			dry=${async () => {
				const there = await http("GET", `/policy/${encodeURIComponent(uri)}`).catch(() => null);
				return there ? `${uri} exists already. A version never changes: the server takes only the same code under this name.` : `${uri} is checked in the jail, tried on its examples and registered. No alias means it until you activate it.`;
			}}
			act=${() => http("POST", "/policy", { policy_rule_uri: uri, code })} done=${() => go(to("policies", uri))} /></span>`;
}

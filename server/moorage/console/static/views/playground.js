// Playground: a policy, its test input, and its results.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, duration, places } from "../format.js";
import { Backtest, Backtested, Upload } from "../curve.js";
import { Editor } from "../editor.js";
import { EXAMPLES } from "../examples.js";
import { go, to } from "../router.js";
import { Failure, codeOf, http, lacks } from "../session.js";
import { ask } from "../socket.js";
import { Action, Button, Command, Empty, Grid, Loaded, Raw, Section, Text, html, said, typed, useAnswer, useGet } from "../ui.js";

const REQUESTS = '[{"inputs": {}, "resources": {"gpus": 1}}]';
const KEPT = "moorage.playground"; // The last typed code, in this tab only.

export function Playground({ query }) {
	const decision = query.get("decision") || "";
	const policy = query.get("policy") || "";
	const [code, setCode] = useState(() => sessionStorage.getItem(KEPT) || EXAMPLES[0][1]);
	const [fleet, setFleet] = useState(decision ? "decision" : "live");
	const [documents, setDocuments] = useState("");
	const [requests, setRequests] = useState(REQUESTS);
	const [answer, start] = useAnswer();
	const [what, setWhat] = useState("its code");
	const shown = useRef(null);

	useEffect(() => {
		if (policy) start(() => codeOf(policy).then((code) => setCode(code) || null));
	}, [policy]);
	useEffect(() => {
		setFleet(decision ? "decision" : "live");
		if (!decision) return;
		ask({ op: "decision_fleet", request: decision }).then((found) => {
			const { adhoc, id, policy_rule_uri, ...request } = found.request;
			setRequests(JSON.stringify([request], null, 1));
			if (!policy && policy_rule_uri) codeOf(policy_rule_uri).then(setCode, () => {});
		}, (failure) => {
			setFleet("live"); // The facts about that fleet were pruned.
			start(() => Promise.reject(failure));
		});
	}, [decision]);
	useEffect(() => {
		sessionStorage.setItem(KEPT, code);
	}, [code]);

	const input = () => ({
		code,
		fleet: fleet === "live" ? "live" : fleet === "decision" ? { decision } : { clusters: parsed(documents, "clusters") },
	});
	const run = async (what, work) => {
		setWhat(what.toLowerCase());
		await start(async () => {
			const result = await work();
			said.value = `${what} is done`;
			return result;
		});
		shown.current?.scrollIntoView({ block: "nearest" });
	};
	const trial = () => run("The run", () => http("POST", "/console/playground", { ...input(), requests: parsed(requests, "requests") }));
	const keys = (event) => {
		if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
			event.preventDefault();
			trial();
		}
	};
	return html`<div class="playground" onKeyDown=${keys}>
		<div>
			<${Examples} take=${setCode} />
			<${Editor} code=${code} change=${setCode} lines=${answer.value?.lines} wrong=${wrong(answer)} />
			<p class="buttons"><${Button} class="primary" off=${lacks("policy")} disabled=${answer.busy} onClick=${trial}>Run<//> <span class="note">Ctrl+Enter runs</span>
				<${Save} code=${code} /> <${Command} words=${["policy", "test", "policy.py"]} code=${code} /></p>
		</div>
		<div>
			<${Section} title="Test input">
				<fieldset><legend>Fleet</legend>
					<label><input type="radio" name="fleet" checked=${fleet === "live"} onChange=${() => setFleet("live")} /> as it is now</label>
					<label><input type="radio" name="fleet" checked=${fleet === "upload"} onChange=${() => setFleet("upload")} /> uploaded</label>
					<label><input type="radio" name="fleet" disabled=${!decision} checked=${fleet === "decision"} onChange=${() => setFleet("decision")} /> as it was at ${decision ? html`decision <a href=${to("why", decision)}>${decision}</a>` : "a decision (open one from Why)"}</label>
				</fieldset>
				${fleet === "upload" && html`<${Upload} label="Cluster documents (JSON)" text=${documents} change=${setDocuments} accept=".json" />`}
				<${Upload} label="Requests (JSON list)" text=${requests} change=${setRequests} accept=".json" />
			<//>
			<${Backtest} busy=${answer.busy} run=${(trace) => run("The backtest", () => http("POST", "/console/playground/backtest", { ...input(), trace }))} />
			<div ref=${shown} aria-live="polite">
				<${Loaded} found=${answer} what=${what}>${(it) => it && html`<${Results} it=${it} />`}<//>
				${answer.error?.reply?.error && html`<${Raw} value=${answer.error.reply} />`}
			</div>
		</div>
	</div>`;
}
function wrong({ error, value }) {
	const found = new Map();
	const [, line] = /\bline (\d+)/.exec(error?.message || "") || [];
	if (line) found.set(Number(line), error.message);
	for (const each of value?.results || []) if (!each.ok && each.line && !found.has(each.line)) found.set(each.line, each.reason);
	return found;
}

/** Code to start from: examples, and registered versions. */
function Examples({ take }) {
	const versions = useGet("/policy");
	const choose = async (event) => {
		const value = event.target.value;
		event.target.value = "";
		if (/^\d+$/.test(value)) take(EXAMPLES[Number(value)][1]);
		else if (value) take(await codeOf(value));
	};
	return html`<p class="tools"><label>Start from <select onChange=${choose}><option value="">choose…</option>
		<optgroup label="Examples">${EXAMPLES.map(([name], n) => html`<option value=${n}>${name}</option>`)}</optgroup>
		<optgroup label="Registered here">${(versions.value || []).slice(0, 100).map((each) => html`<option value=${each.policy_rule_uri}>${each.policy_rule_uri}</option>`)}</optgroup></select></label></p>`;
}

function parsed(text, what) {
	try {
		const found = JSON.parse(text);
		return Array.isArray(found) ? found : [found];
	} catch (error) {
		throw new Failure(`The ${what} are not valid JSON. ${error.message}`, "bad_json");
	}
}

function Results({ it }) {
	const results = it.results || [];
	return html`<${Section} title="What it did">
		${it.fleet?.nodes !== undefined && html`<p>On ${count(it.fleet.nodes)} nodes with ${count(it.fleet.gpus)} GPUs, in ${duration(it.seconds)}.</p>`}
		${results.length ? html`<${Grid} label="Results" heads=${["request", "outcome", "time"]} rows=${results.map((each, n) => [n + 1,
				html`${each.ok ? html`<span class="state granted">✓ placed</span> ${places(each.placement)}` : html`<span class="state refused">✕ refused</span> <code>${each.code}</code> ${each.reason}${each.line ? ` (line ${each.line})` : ""}`}
					${each.data !== undefined && !each.ok ? html`<${Raw} value=${each.data} label="What it returned" />` : null}`, each.seconds === undefined ? "" : duration(each.seconds)])} />` : null}
		${it.prints?.length ? html`<${Section} title="Output"><${Text} label="What it printed" text=${it.prints.join("\n")} /><//>` : results.length ? html`<${Empty}>It printed nothing.<//>` : null}
		${it.curve && html`<${Section} title="Backtest"><${Backtested} it=${it} /><//>`}
		<${Raw} value=${it} />
	<//>`;
}

function Save({ code }) {
	const [uri, setUri] = useState("");
	const [open, setOpen] = useState(false);
	if (!open) return html`<${Button} onClick=${() => setOpen(true)}>Save as a version…<//>`;
	const sound = /^[\w.]+:[\w.]+-\w+$/.test(uri);
	return html`<span class="save"><label>Version <input value=${uri} placeholder="name:1.0-stable" onInput=${typed((text) => setUri(text.trim()))} /></label>
		<${Action} label="Save" right="policy" title=${`Save as ${uri}`} idle=${sound ? "" : "Name it like name:1.0-stable."} words=${["policy", "push", "policy.py", "--uri", uri]} code=${code}
			dry=${async () => {
				const there = await codeOf(uri).catch(() => null);
				return there !== null ? `${uri} exists already. A version never changes: the server takes only the same code under this name.` : `${uri} is checked in the jail, tried on its examples and registered. No alias means it until you activate it.`;
			}}
			act=${() => http("POST", "/policy", { policy_rule_uri: uri, code })} done=${() => go(to("policies", uri))} /></span>`;
}

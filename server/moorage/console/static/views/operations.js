// Operations: readiness, the last hour in charts, what happens now in sentences, and all metrics.
import { useEffect, useState } from "preact/hooks";
import { Chart, quantiles } from "../charts.js";
import { brief, count, duration, placesBrief, some, tenths, time, when } from "../format.js";
import { gaps } from "../map/model.js";
import { alarms, samples, total } from "../metrics.js";
import { to } from "../router.js";
import { http, may, missing, session } from "../session.js";
import { useSignal } from "../signal.js";
import { ask, connection, heardAt, link, listen, revision } from "../socket.js";
import { Choice, Command, Empty, Facts, Grid, Loaded, Loading, Policy, Raw, Refused, Scroll, Section, html, typed, useEvery, useLoaded } from "../ui.js";

const EVENTS_MAX = 200;
const EVERY_MS = 5000;
const CHARTS_MS = 30000;
const TOPICS = ["leases", "fleet", "policies"];

const lease = (data) => html`<a href=${to("leases", data.id)}>${brief(data.id)}</a>`;
const place = (data) => html`<a href=${data.node_id ? to("fleet", data.cluster_id, data.node_id) : to("fleet", data.cluster_id)}>${data.cluster_id}${data.node_id ? `/${data.node_id}` : ""}</a>`;

/** What an event says of a lease, of its workload, or by itself: the rest of its sentence. */
const OF_LEASES = {
	granted: (d) => `was granted to ${d.tenant} on ${placesBrief(d.placement)}.`,
	renewed: (d) => `was renewed until ${when(d.expires_at)}.`,
	requeued: (d) => `went back to the queue: ${d.reason}`,
	paused: (d) => `pauses until ${when(d.retry_at)}.`,
	resumed: () => "waits in the queue again.",
	preempted: (d) => `has to give way by ${when(d.until)}: ${d.reason}`,
	spared: () => "may stay after all.",
	moved: (d) => `is now on ${placesBrief(d.placement)}.`,
	ending: (d) => `ends: ${d.reason}`,
	ended: (d) => `ended: ${d.reason}`,
};
const OF_WORKLOADS = {
	started: (d) => `runs${d.endpoint ? `, at ${d.endpoint}` : ""}.`,
	finished: (d) => `${d.outcome?.phase || "ended"}, code ${d.outcome?.exit_code ?? "not known"}. ${d.outcome?.detail || ""}`,
	warm: (d) => `stays warm until ${when(d.expires_at)}.`,
	workload: (d) => `is ${d.phase}. ${d.detail || ""}`,
};
const OTHERS = {
	cluster_set: (d) => html`Cluster ${place(d)} was registered or changed: ${some(d.nodes, "node")}.`,
	cluster_removed: (d) => `Cluster ${d.cluster_id} was removed.`,
	cordoned: (d) => html`${place(d)} takes nothing new: ${d.unavailable}`,
	draining: (d) => html`${place(d)} empties: ${d.unavailable}`,
	uncordoned: (d) => html`${place(d)} is in service again.`,
	rests: (d) => html`<${Policy} name=${d.policy_rule_uri} /> is not asked for ${d.seconds} s: it overran its time ${d.overruns} times.`,
	examples_failed: (d) => html`<${Policy} name=${d.policy_rule_uri} /> fails its examples: ${d.reason}`,
};

/** What is not in the table, by its name and what it is about. */
function sentence(name, data) {
	if (OF_LEASES[name]) return html`Lease ${lease(data)} ${OF_LEASES[name](data)}`;
	if (OF_WORKLOADS[name]) return html`The workload of lease ${lease(data)} ${OF_WORKLOADS[name](data)}`;
	if (OTHERS[name]) return OTHERS[name](data);
	const about = data?.alias || data?.policy_rule_uri || data?.version;
	return html`${name.replaceAll("_", " ")}${about ? html`: <${Policy} name=${about} />${data.alias && data.policy_rule_uri ? html` means <${Policy} name=${data.policy_rule_uri} />` : ""}` : ""}`;
}

export function Operations() {
	const ready = useLoaded(() => fetch("/readyz").then((answer) => answer.json()), []);
	const metrics = useLoaded(async () => (may("metrics") ? http("GET", "/metrics") : null), []);
	const hour = useLoaded(() => http("GET", "/history?minutes=60&step=1"), []);
	const took = useLoaded(async () => {
		const before = performance.now();
		await ask({ op: "leases", limit: 1 }); // Its way leads through the commit loop.
		return performance.now() - before;
	}, [ready.value]).value;
	useEvery(() => {
		ready.again();
		metrics.again();
	}, EVERY_MS, []);
	useEvery(hour.again, CHARTS_MS, []);
	const all = typeof metrics.value === "string" ? samples(metrics.value) : null;
	return html`
		<div class="columns three"><${Readiness} ready=${ready} all=${all} hour=${hour.value} />
			<${Section} title="Now"><${Facts} pairs=${[["leases", number(total(all, "leases"))], ["waiting", number(total(all, "waiting"))], ["open WebSockets", number(total(all, "sessions"))],
				["not yet decided", number(total(all, "undecided"))], ["events and facts under way", number(total(all, "backlog"))], ["drift from backends", number(total(all, "drift"))],
				["an answer takes", took === undefined ? "" : duration(took / 1000)]]} />${all ? null : metrics.value === null ? html`<p class="note">${missing("metrics")}</p>` : html`<${Loading} what="the metrics" />`}<//>
			<${Page} /></div>
		<${Hour} found=${hour} />
		<${Events} />
		<${Metrics} all=${all} error=${metrics.error} />`;
}

const number = (value) => (value === undefined ? "" : count(value));

/** Each part that requests need, and whether it works. */
function Readiness({ ready, all, hour }) {
	return html`<${Section} title="Readiness"><${Loaded} found=${ready} what="the readiness">${(it) => {
		const { ledger_seq: seq, disk, backlog, sandbox, ...rest } = it.details || {};
		const wrong = hour ? alarms(all, hour) : [];
		return html`<p class=${it.ready ? "ok" : "alert"}>${it.ready ? "✓ Requests are served." : "✕ Requests are not served."}</p>
			<${Facts} pairs=${[["ledger", seq === undefined ? "" : `${count(seq)} facts stored`], ["disk", disk === "ok" ? "✓ has room" : disk === "full" ? "✕ full: nothing is granted" : disk],
				["commit loop", backlog === undefined ? "" : backlog ? `${some(backlog, "event")} under way` : "✓ idle"], ["policies", sandbox === "down" ? "✕ cannot run" : sandbox === "jail" ? "✓ run in the jail" : sandbox && `run ${sandbox}, without the jail`],
				...Object.entries(rest).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value)])]} />
			${wrong.map((each) => html`<p class="alert"><b>${each.what}</b> ${each.text}</p>`)}<${Raw} value=${it} />`;
	}}<//><//>`;
}

function Page() {
	const heard = useSignal(heardAt);
	const now = useSignal(revision);
	return html`<${Section} title="This page"><${Facts} pairs=${[["server", `${location.host}, version ${session.value?.version}`], ["connection", useSignal(link)], ["connected", some(useSignal(connection), "time")],
		["last heard", heard ? time(heard / 1000) : "never"], ["map as of revision", now === null ? "" : String(now)], ["gaps in the map", String(useSignal(gaps))]]} /><//>`;
}

function Hour({ found }) {
	return html`<${Section} title="The last hour"><${Loaded} found=${found} what="the last hour">${(it) => (!it.at.length ? html`<${Empty}>The server has just begun.<//>` : html`<p class="note">One point a minute, since ${when(it.at[0])}.</p><div class="charts">
		<${Chart} title="Event loop late by" at=${it.at} said=${duration} series=${[{ name: "at most", key: "k0", values: it.loop_seconds }]} />
		<${Chart} title="Commit time" at=${it.at} said=${duration} series=${quantiles(it.commit)} />
		<${Chart} title="Evaluation time of policies" at=${it.at} said=${duration} series=${quantiles(it.evaluation)} />
		<${Chart} title="Memory of the server" at=${it.at} said=${(mib) => `${count(Math.round(mib))} MiB`} series=${[{ name: "resident", key: "k0", values: it.memory_mib }]} />
		<${Chart} title="Open WebSockets" at=${it.at} said=${tenths} series=${[{ name: "open", key: "k0", values: it.sessions }]} />
	</div>`)}<//><//>`;
}

function Events() {
	const [events, setEvents] = useState([]);
	const [topic, setTopic] = useState("");
	useEffect(() => {
		const note = (of) => (name, data) => setEvents((old) => [{ at: Date.now() / 1000, topic: of, name, data }, ...old].slice(0, EVENTS_MAX));
		const stops = TOPICS.map((each) => listen(each, note(each)));
		return () => stops.forEach((stop) => stop());
	}, []);
	const names = [...new Set(events.map((each) => each.name))].sort();
	const shown = events.filter((each) => !topic || each.topic === topic || each.name === topic);
	return html`<${Section} title="Recent events">
		<p class="tools"><${Choice} label="Kind" value=${topic} set=${setTopic} options=${[["", "all"], ...TOPICS, ...names.map((each) => [each, each.replaceAll("_", " ")])]} />
			<span class="note">Of the leases of ${session.value?.tenant}, the fleet and policies, since this view was opened.</span></p>
		${!shown.length ? html`<${Empty}>Nothing ${topic ? "of this kind " : ""}has happened since this view was opened.<//>`
			: html`<ol class="history">${shown.map(({ at, name, data }) => html`<li><time>${time(at)}</time> ${sentence(name, data)}</li>`)}</ol>`}<//>`;
}

function Metrics({ all, error }) {
	const [part, setPart] = useState("");
	const shown = (all || []).filter((each) => !each.name.endsWith("_created") && `${each.name}${each.labels}`.includes(part));
	return html`<${Section} title="Metrics"><${Refused} error=${error} />
		<p class="tools"><label>Name contains <input value=${part} onInput=${typed(setPart)} /></label></p>
		<${Scroll} label="Metrics"><${Grid} label="Metrics" heads=${["metric", "of", "value"]} rows=${shown.slice(0, 300).map((each) => [each.name, each.labels, each.value])} /><//>
		<p class="buttons"><${Command} words=${["curl", "-f", `${location.origin}/metrics`]} /></p><//>`;
}

// Operations: readiness, the last hour and events.
import { useEffect, useState } from "preact/hooks";
import { Chart, Line, quantiles } from "../charts.js";
import { sentence } from "../events.js";
import { count, duration, some, tenths, when } from "../format.js";
import { gaps } from "../map/model.js";
import { readMetrics, total } from "../metrics.js";
import { lacks, session } from "../session.js";
import { useSignal } from "../signal.js";
import { ask, listen, revision } from "../socket.js";
import { Choice, Command, Empty, Facts, Grid, History, Loading, Policy, Raw, Section, html, useGet, useLoaded } from "../ui.js";

const EVENTS_MAX = 200;
const EVERY_MS = 5000;
const CHARTS_MS = 30000;
const TOPICS = ["leases", "fleet", "policies"];

export function Operations() {
	const ready = useLoaded(() => fetch("/readyz").then((answer) => answer.json()), [], EVERY_MS);
	const metrics = useLoaded(readMetrics, [], EVERY_MS);
	const hour = useGet("/history?minutes=60&step=1", CHARTS_MS);
	const took = useLoaded(async () => {
		const before = performance.now();
		await ask({ op: "leases", limit: 1 }); // It passes through the commit loop.
		return performance.now() - before;
	}, [ready.value]).value;
	const all = metrics.value;
	return html`
		<div class="columns three"><${Readiness} ready=${ready} all=${all} />
			<${Section} title="Now"><${Facts} pairs=${[["not yet decided", number(total(all, "undecided"))], ["events and facts under way", number(total(all, "backlog"))], ["differences from backends", number(total(all, "drift"))],
				["an answer takes", took === undefined ? "" : duration(took / 1000)], ["map as of revision", useSignal(revision)], ["gaps in the map", String(useSignal(gaps))]]} />${all ? html`<p class="buttons"><a class="button" href="/metrics">All metrics</a> <${Command} words=${["curl", "-f", `${location.origin}/metrics`]} /></p>` : metrics.value === null ? html`<p class="note">${lacks("metrics")}</p>` : html`<${Loading} what="the metrics" />`}<//>
			<${Cells} all=${all} /></div>
		<${Hour} found=${hour} />
		<${Events} past=${hour.value?.events || []} />`;
}

const number = (value) => (value === undefined ? "" : count(value));

const mark = (good, yes, no = "") => (good === undefined ? "" : good ? `✓ ${yes}` : no && `✕ ${no}`);

/** The state of each part that requests need. */
function Readiness({ ready, all }) {
	return html`<${Section} title="Readiness" found=${ready} what="the readiness">${(it) => {
		const { ledger_seq: seq, disk, backlog, sandbox, ...rest } = it.details || {};
		const of = (name, one, what) => {
			const n = total(all, name);
			return n === undefined ? "" : n ? `✕ ${some(n, one, one.endsWith("y") ? `${one.slice(0, -1)}ies` : `${one}s`)} ${what}` : `✓ none ${what}`;
		};
		return html`<p class=${it.ready ? "ok" : "alert"}>${it.ready ? "✓ Requests are served." : "✕ Requests are not served."}</p>
			<${Facts} pairs=${[["ledger", seq === undefined ? "" : `✓ ${count(seq)} facts stored`], ["disk", disk === "full" ? "✕ full: nothing is granted" : mark(disk === "ok", "has room")],
				["commit loop", backlog === undefined ? "" : `✓ ${backlog ? `${some(backlog, "event")} under way` : "idle"}`], ["policies", sandbox === "down" ? "✕ cannot run" : sandbox && (sandbox === "jail" ? "✓ run in the jail" : `! run ${sandbox}, without the jail`)],
				["circuit breaker", of("policies_circuit_open", "policy", "paused")], ["audit log", of("audit_lost_total", "entry", "lost")], ["log", of("log_lines_dropped_total", "line", "lost")],
				["Prometheus", mark(total(all, "prometheus_up"), "answers", "does not answer")],
				...Object.entries(rest).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value)])]} /><${Raw} value=${it} />`;
	}}<//>`;
}

function Hour({ found }) {
	return html`<${Section} title="The last hour" found=${found} what="the last hour">${(it) => (!it.at.length ? html`<${Empty}>The server has just started.<//>` : html`<p class="note">One point a minute, since ${when(it.at[0])}.</p><div class="charts">
		<${Line} title="Event loop late by" at=${it.at} said=${duration} name="at most" values=${it.loop_seconds} />
		<${Chart} title="Commit time" at=${it.at} said=${duration} series=${quantiles(it.commit)} />
		<${Chart} title="Evaluation time of policies" at=${it.at} said=${duration} series=${quantiles(it.evaluation)} />
		<${Line} title="Memory of the server" at=${it.at} said=${(mib) => `${count(Math.round(mib))} MiB`} name="resident" values=${it.memory_mib} />
		<${Line} title="Open WebSockets" at=${it.at} said=${tenths} name="open" values=${it.sessions} />
	</div>`)}<//>`;
}

/** The living cells of policies, and counts of their actions. */
function Cells({ all }) {
	const of = (name) => (all || []).filter((each) => each.name === `moorage_${name}`).map(({ labels, value }) => [/="(.*)"$/.exec(labels)?.[1] || "", value]);
	const did = new Map(of("sandbox"));
	return html`<${Section} title="Cells of policies">${!all ? html`<p class="note">${lacks("metrics")}</p>` : html`<${Grid} label="Cells of policies" heads=${["policy", "jailed processes that run it"]} rows=${of("cells").map(([name, n]) => [html`<${Policy} name=${name} />`, count(n)])} />
		<p class="note">Since the start: ${["evaluations", "failures", "timeouts", "crashes", "kills", "busy", "respawns"].map((name) => `${count(did.get(name) || 0)} ${name}`).join(", ")}.</p>`}<//>`;
}

function Events({ past }) {
	const [events, setEvents] = useState([]);
	const [begun] = useState(Date.now() / 1000);
	const [topic, setTopic] = useState("");
	useEffect(() => {
		const note = (of) => (name, data) => setEvents((old) => [{ at: Date.now() / 1000, topic: of, name, data }, ...old].slice(0, EVENTS_MAX));
		const stops = TOPICS.map((each) => listen(each, note(each)));
		return () => stops.forEach((stop) => stop());
	}, []);
	const all = [...events, ...past.filter((each) => each.at < begun).map(({ event: name, ...each }) => ({ name, ...each }))];
	const names = [...new Set(all.map((each) => each.name))].sort();
	const shown = all.filter((each) => !topic || each.topic === topic || each.name === topic);
	return html`<${Section} title="Recent events">
		<p class="tools"><${Choice} label="Kind" value=${topic} set=${setTopic} options=${[["", "all"], ...TOPICS, ...names.map((each) => [each, each.replaceAll("_", " ")])]} />
			<span class="note">Recent events of the fleet, of policies and of failed workloads; events of leases of ${session.value?.operator ? "all tenants" : session.value?.tenant} only since this view was opened.</span></p>
		${!shown.length ? html`<${Empty}>No events${topic ? " of this kind" : ""} yet.<//>`
			: html`<${History} most=${50} of=${shown.map(({ at, name, data }) => ({ at, more: sentence(name, data) }))} />`}<//>`;
}

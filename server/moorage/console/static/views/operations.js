// Operations: readiness, cells, commit latency, sockets, backends, drift, and what happens now.
import { useEffect, useState } from "preact/hooks";
import { time } from "../format.js";
import { gaps } from "../map/model.js";
import { http, session } from "../session.js";
import { useSignal } from "../signal.js";
import { ask, connection, heardAt, link, listen } from "../socket.js";
import { Command, Empty, Facts, Grid, History, Loaded, Loading, Raw, Refused, Section, html, typed, useEvery, useLoaded } from "../ui.js";

const EVENTS_MAX = 100;

/** The samples of a page of metrics. @param {string} text @returns {{name: string, labels: string, value: number}[]} */
export function samples(text) {
	return text.split("\n").filter((line) => line && !line.startsWith("#")).map((line) => {
		const found = /^([\w:]+)(\{.*\})? (\S+)/.exec(line);
		return found ? { name: found[1], labels: (found[2] || "").slice(1, -1), value: Number(found[3]) } : { name: line, labels: "", value: NaN };
	});
}

export function Operations() {
	const ready = useLoaded(() => fetch("/readyz").then((answer) => answer.json()), []);
	const metrics = useLoaded(() => http("GET", "/metrics"), []);
	const [events, setEvents] = useState([]);
	const [part, setPart] = useState("");
	const took = useLoaded(async () => {
		const before = performance.now();
		await ask({ op: "queue", limit: 1 }); // Its way leads through the commit loop.
		return performance.now() - before;
	}, [ready.value]).value;
	useEvery(() => {
		ready.again();
		metrics.again();
	}, 5000, []);
	useEffect(() => {
		const note = (topic) => (name, data) =>
			setEvents((old) => [{ at: Date.now() / 1000, topic, name, data }, ...old].slice(0, EVENTS_MAX));
		const stops = ["leases", "fleet", "policies"].map((topic) => listen(topic, note(topic)));
		return () => stops.forEach((stop) => stop());
	}, []);
	const heard = useSignal(heardAt);
	const all = typeof metrics.value === "string" ? samples(metrics.value) : null;
	const shown = (all || []).filter((each) => !each.name.endsWith("_created") && `${each.name}${each.labels}`.includes(part));
	const sum = (name) => all?.filter((each) => each.name === `moorage_${name}`).reduce((total, each) => total + each.value, 0);
	return html`
		<${Section} title="Readiness"><${Loaded} found=${ready} what="the readiness">${(it) => html`<p class=${it.ready ? "ok" : "alert"}>${it.ready ? "✓ Requests are served." : "✕ Requests are not served."}</p>
			<${Facts} pairs=${Object.entries(it.details || {}).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)])} /><${Raw} value=${it} />`}<//><//>
		<${Section} title="This page"><${Facts} pairs=${[["connection", useSignal(link)], ["connected", `${useSignal(connection)} times`], ["last heard", heard ? time(heard / 1000) : "never"], ["gaps in the map", String(useSignal(gaps))], ["server", session.value?.version]]} /><//>
		<${Section} title="Now">${all ? html`<${Facts} pairs=${[["leases", sum("leases")], ["waiting", sum("waiting")], ["sessions", sum("sessions")], ["undecided", sum("undecided")], ["backlog", sum("backlog")],
			["drift", sum("drift")], ["an answer takes", took === undefined ? "" : `${took.toFixed(1)} ms`]]} />` : html`<${Loading} what="the metrics" />`}<//>
		<${Section} title="Recent events">${!events.length ? html`<${Empty}>Nothing has happened since this view was opened.<//>`
			: html`<${History} of=${events.map(({ at, topic, name, data }) => ({ at, what: `${topic}: ${name}`, more: html`<code>${JSON.stringify(data).slice(0, 200)}</code>` }))} />`}<//>
		<${Section} title="Metrics"><${Refused} error=${metrics.error} />
			<p class="tools"><label>Name contains <input value=${part} onInput=${typed(setPart)} /></label></p>
			<div class="scroll" tabindex="0" role="region" aria-label="Metrics, scrollable"><${Grid} label="Metrics" heads=${["metric", "of", "value"]} rows=${shown.slice(0, 300).map((each) => [each.name, each.labels, each.value])} /></div>
			<p class="buttons"><${Command} words=${["curl", "-f", `${location.origin}/metrics`]} /></p><//>`;
}

// Overview: the state now, and the last day; each number links to its view.
import { Chart, Line, Share, quantiles } from "../charts.js";
import { sentence } from "../events.js";
import { count, duration, gpus, percent, placesBrief, shape, some, span, tenths, until, when } from "../format.js";
import { keyed } from "../palette.js";
import { to } from "../router.js";
import { session } from "../session.js";
import { alarms, readMetrics } from "../metrics.js";
import { Empty, Grid, History, Id, Loaded, Place, Raw, Section, html, useAsk, useGet, useLoaded } from "../ui.js";
import { useWhys, waitingWords } from "./reasons.js";
import { Unserved } from "./why.js";

const EVERY_MS = 30000;
const HOUR = 3600;
const SHOWN = 5;

const sum = (values) => values.reduce((all, each) => all + each, 0);

/** The sum over all models of `total`, `used` or `unavailable`. */
const whole = ({ models }, name) => sum(Object.values(models).map((each) => each[name]));

export function Overview() {
	const found = useGet("/history?step=5", EVERY_MS);
	const metrics = useLoaded(readMetrics, [], EVERY_MS);
	return html`<${Loaded} found=${found} what="the overview">${(it) => html`
		<${Alerts} it=${it} metrics=${metrics.value} />
		<${Numbers} it=${it} />
		<${Day} it=${it} />
		<div class="columns">
			<div><${Models} it=${it.now} /><${Waiting} now=${it.now} /><${Unserved} title="Refused last" most=${3} /></div>
			<div><${Tenants} it=${it.now} /><${Ending} every=${EVERY_MS} soon=${it.now.ending} />
				<${Changed} it=${it} /><${Agents} now=${it.now} /></div>
		</div>
		<${Answers} it=${it} />
		<${Raw} value=${it} />`}<//>`;
}

/** The alerts for an operator, or a line that there are none. */
function Alerts({ it, metrics }) {
	const all = alarms(metrics, it);
	return html`<${Section} title="Alerts">${all.length ? html`<ul class="alarms">${all.map((each) => html`<li class="alert"><b>${each.what}</b> ${each.text} <a href=${each.href}>${each.link}</a></li>`)}</ul>`
		: html`<p class="ok">✓ Nothing calls for attention.</p>`}<//>`;
}

/** The last hour: its first point, the number of grants, and the refusals by code. */
function hourly(it) {
	const from = Math.max(0, it.at.findIndex((each) => each > it.now.at - HOUR));
	const refused = Object.entries(it.refusals).map(([code, all]) => [code, sum(all.slice(from))]).filter(([, n]) => n);
	return { from, refused, all: sum(refused.map(([, n]) => n)), granted: sum(it.grants.slice(from)) };
}

function Numbers({ it }) {
	const { now } = it;
	const [total, used, out] = ["total", "used", "unavailable"].map((name) => whole(now, name));
	const { from, all: refused, granted } = hourly(it);
	const minutes = Math.max(1, sum(it.minutes.slice(from)));
	const tiles = [
		["fleet", "GPUs in use", percent(total ? used / total : 0), `${gpus(used)} of ${gpus(total)}`],
		["fleet", "GPUs free", gpus(total - used - out), `in whole or part${out ? `; ${gpus(out)} out of service` : ""}`],
		["queue", "Waiting", count(now.waiting), now.waiting ? `longest ${span(now.longest_wait_seconds)}` : "no request"],
		["leases", "Leases", count(now.leases), `${count(Math.round(granted / minutes))} granted a minute`],
		["why?state=refused", "Refused", count(refused), `requests in ${it.at[0] < now.at - HOUR ? "the last hour" : `${minutes} min`}`],
		["leases?state=failing", "Failing workloads", count(now.failing), "now"],
		...(machines(now.agents) ? [["#agents", "Agents lost", count(now.agents.lost), `of ${count(machines(now.agents))}, ${count(now.agents.connected)} connected`]] : []),
		["fleet", "Out of service", count(now.nodes_unavailable), `of ${count(now.nodes)} nodes`],
	];
	return html`<ul class="tiles" aria-label="Numbers">${tiles.map(([view, name, value, text]) => html`<li><a class="tile" href=${view[0] === "#" ? view : to("") + view}><span>${name}</span><b>${value}</b><small>${text}</small></a></li>`)}</ul>`;
}

function Models({ it }) {
	const rows = Object.entries(it.models);
	return html`<${Section} title="GPUs by model"><${Grid} label="GPUs by model" empty=${html`There are no GPUs. Register a cluster: <code>moorage fleet import</code>.`} heads=${["model", "in use", "used", "free", "all", "free on one node", "empty nodes"]} rows=${rows.map(([name, each]) => [name,
			html`<${Share} part=${each.used / each.total} words=${percent(each.used / each.total)} />`, gpus(each.used), gpus(each.total - each.used - each.unavailable), gpus(each.total), each.largest ? `up to ${each.largest}` : "no whole GPU", count(each.nodes_empty)])} />
		${it.waiting > 0 && html`<p class="note">Free nodes may be reserved for waiting requests: <a href=${to("whatif")}>What-if</a> shows whether one more fits.</p>`}<//>`;
}

function Tenants({ it }) {
	const rows = Object.entries(it.tenants).sort(([, a], [, b]) => b - a);
	const total = whole(it, "total") || 1;
	const hues = keyed(Object.keys(it.tenants));
	return html`<${Section} title="GPUs by tenant"><${Grid} label="GPUs by tenant" empty="No tenant holds a GPU." most=${8} heads=${["tenant", "of the fleet", "GPUs"]} rows=${rows.map(([name, milli]) => [name,
			html`<${Share} part=${milli / total} words=${percent(milli / total)} hue=${hues.get(name)} />`, gpus(milli)])} /><//>`;
}
function Waiting({ now: { oldest, waiting } }) {
	const found = useWhys(oldest);
	return html`<${Section} title="Longest waits" found=${found} what="the waiting requests">${(whys) => html`
		${waiting > 0 && html`<p><a href=${to("queue")}><b>${count(oldest.length)}</b> of ${some(waiting, "waiting request")}</a>${session.value?.operator ? "" : " of all tenants: you only see your own"}.</p>`}
		<${Grid} wordy label="Longest waits" empty="No request waits." heads=${["request", "tenant", "waits", "wants, and why it waits"]} rows=${oldest.map((each) => [html`<${Id} of=${each.request} view="queue" />`, each.tenant,
			html`<span class="nowrap">${until(each.since)}</span>`, html`<b>${shape(each.resources)}</b>: ${whys[each.request] ? waitingWords(whys[each.request], each.resources) : "…"}`])} />`}<//>`;
}
function Ending({ every, soon }) {
	const found = useAsk({ op: "leases", sort: "expires_at", limit: SHOWN }, every * 3);
	return html`<${Section} title="Ends next" found=${found} what="the leases">${({ leases, total }) => (!leases.length ? html`<${Empty}>There is no lease${session.value?.operator ? "" : " that you may see"}.<//>` : html`
			<p><a href=${to("leases") + "?sort=expires_at"}><b>${count(soon.leases)}</b> of ${count(total)} leases end within the hour</a>, with <b>${gpus(soon.gpu_milli)}</b> GPUs, unless they are renewed.</p>
			<${Grid} wordy label="Ends next" heads=${["lease", "tenant", "ends", "where"]} rows=${leases.map((each) => [html`<${Id} of=${each.id} />`, each.tenant,
				`in ${until(each.expires_at)}, ${when(each.expires_at)}`, placesBrief(each.placement)])} />`)}<//>`;
}
function Changed({ it }) {
	const { from, refused, all, granted } = hourly(it);
	const events = it.events.filter((each) => each.at > it.now.at - HOUR);
	const held = sum(Object.values(it.models).map((each) => each.used[from] || 0));
	return html`<${Section} title="Changed within the hour">
		<p><b>${count(granted)}</b> granted, <b>${count(all)}</b> refused${refused.length ? ` (${refused.map(([code, n]) => `${count(n)} ${code.replaceAll("_", " ")}`).join(", ")})` : ""}; GPUs in use went from ${gpus(held)} to ${gpus(whole(it.now, "used"))}, waiting requests from ${count(it.waiting[from] || 0)} to ${count(it.now.waiting)}.</p>
		${events.length ? html`<${History} most=${6} of=${events.map((each) => ({ at: each.at, more: sentence(each.event, each.data) }))} />`
			: html`<${Empty}>No change of the fleet or of a policy.<//>`}<//>`;
}

const machines = (agents) => (agents ? agents.connected + agents.absent : 0);

/** Machines without contact, and clusters out of service. */
function Agents({ now: { agents, clusters_out: out } }) {
	if (!machines(agents) && !out.length) return null;
	return html`<${Section} title="Agents and clusters" id="agents"><${Grid} wordy label="No contact" most=${SHOWN} empty="All are connected." heads=${["where", "state", "since, or why"]} rows=${[
			...(agents?.first || []).map((each) => [html`<${Place} ...${each} />`, each.lost ? html`<span class="state failing">✕ lost</span>` : "not connected", `${when(each.since)}, ${until(each.since)} ago`]),
			...out.map((each) => [html`<${Place} cluster_id=${each.cluster_id} />`, `all ${some(each.nodes, "node")} out of service`, each.reason])]} /><//>`;
}
function Day({ it }) {
	const { at } = it;
	if (!at.length) return null;
	const models = Object.entries(it.models);
	const hues = keyed(models.map(([name]) => name));
	const total = at.map((_, n) => sum(models.map(([, each]) => each.total[n])));
	const used = at.map((_, n) => sum(models.map(([, each]) => each.used[n])));
	const tenants = Object.entries(it.tenants).slice(0, 8);
	const owners = keyed(Object.keys(it.now.tenants));
	return html`<${Section} title=${at.at(-1) - at[0] < 23 * HOUR ? `Since ${when(at[0])}` : "The last 24 hours"}><div class="charts">
		<${Chart} title="Fleet in use" at=${at} href=${to("fleet")} most=${1} said=${percent} series=${[{ name: "all", key: "ink", values: used.map((each, n) => (total[n] ? each / total[n] : 0)) },
			...models.slice(0, 6).map(([name, each]) => ({ name, key: hues.get(name), values: each.used.map((milli, n) => (each.total[n] ? milli / each.total[n] : 0)) }))]} />
		<${Chart} title="GPUs held by tenant" at=${at} href=${to("leases")} said=${gpus} series=${tenants.map(([name, values]) => ({ name, key: owners.get(name) || "k7", values }))} />
		<${Line} title="Waiting requests" at=${at} href=${to("queue")} said=${tenths} name="waiting" values=${it.waiting} />
		<${Line} title="Longest wait" at=${at} href=${to("queue")} said=${duration} name="longest" values=${it.longest_wait_seconds} />
	</div><//>`;
}

/** The kinds of answers, and their times. */
function Answers({ it }) {
	const { at } = it;
	if (!at.length) return null;
	const rate = (values) => values.map((each, n) => each / it.minutes[n]);
	const codes = Object.entries(it.refusals).slice(0, 6);
	return html`<${Section} title="Answers"><div class="charts">
		<${Line} title="Grants a minute" at=${at} href=${to("leases")} said=${tenths} name="grants" values=${rate(it.grants)} />
		<${Chart} title="Time from request to grant" at=${at} href=${to("why")} said=${duration} series=${quantiles(it.grant)} />
		<${Chart} title="Refusals a minute" at=${at} href=${to("why") + "?state=refused"} said=${tenths} series=${codes.length ? codes.map(([name, values], n) => ({ name: name.replaceAll("_", " "), key: `k${n}`, values: rate(values) })) : [{ name: "refusals", key: "k0", values: at.map(() => 0) }]} />
		<${Line} title="Failing workloads" at=${at} href=${to("leases") + "?state=failing"} said=${tenths} name="failing" values=${it.failing} />
	</div><//>`;
}

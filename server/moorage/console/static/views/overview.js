// Overview: how full it is, who waits, what is refused and fails, over the last day; each number leads on.
import { useRef } from "preact/hooks";
import { Chart, Share, quantiles } from "../charts.js";
import { brief, count, duration, gpus, heldMilli, moment, percent, placesBrief, shape, span, tenths, time } from "../format.js";
import { keyed } from "../palette.js";
import { to } from "../router.js";
import { http, session } from "../session.js";
import { ask } from "../socket.js";
import { alarms, readMetrics } from "../metrics.js";
import { Empty, Grid, Loaded, Raw, Section, html, useEvery, useLoaded } from "../ui.js";
import { waitingWords } from "./reasons.js";

const EVERY_MS = 20000;
const REASONS_MS = 60000;
const HOUR = 3600;
const ENDING_MAX = 200;
const SHOWN = 5;

const sum = (values) => values.reduce((all, each) => all + each, 0);

export function Overview() {
	const found = useLoaded(() => http("GET", "/history?step=5"), []);
	const metrics = useLoaded(readMetrics, []);
	const again = useRef(() => {});
	again.current = () => {
		found.again();
		metrics.again();
	};
	useEvery(() => again.current(), EVERY_MS, []);
	return html`<${Loaded} found=${found} what="the overview">${(it) => html`
		<${Alerts} it=${it} metrics=${metrics.value} />
		<${Numbers} it=${it} />
		<div class="columns">
			<${Models} it=${it.now} /><${Tenants} it=${it.now} />
			<${Waiting} rows=${it.now.oldest} /><${Ending} every=${EVERY_MS} />
		</div>
		<${Charts} it=${it} />
		<${Raw} value=${it} />`}<//>`;
}

/** What an operator should look at, or that there is nothing. */
function Alerts({ it, metrics }) {
	const all = alarms(metrics, it);
	return html`<${Section} title="Alerts">${all.length ? html`<ul class="alarms">${all.map((each) => html`<li class="alert"><b>${each.what}</b> ${each.text} <a href=${each.href}>${each.link}</a></li>`)}</ul>`
		: html`<p class="ok">✓ Nothing calls for attention.</p>`}<//>`;
}

/** One number that leads to its view. */
const Tile = ({ href, name, value, text }) => html`<li><a class="tile" href=${href}><span>${name}</span><b>${value}</b><small>${text}</small></a></li>`;

function Numbers({ it }) {
	const { now } = it;
	const models = Object.values(now.models);
	const [total, used] = [sum(models.map((each) => each.total)), sum(models.map((each) => each.used))];
	const out = sum(models.map((each) => each.unavailable));
	const hour = it.minutes.findLastIndex((_, n) => sum(it.minutes.slice(n)) >= 60);
	const from = Math.max(0, hour);
	const refused = sum(Object.values(it.refusals).map((each) => sum(each.slice(from))));
	const granted = sum(it.grants.slice(from));
	const minutes = Math.max(1, sum(it.minutes.slice(from)));
	return html`<ul class="tiles" aria-label="Numbers">
		<${Tile} href=${to("fleet")} name="GPUs in use" value=${percent(total ? used / total : 0)} text=${`${gpus(used)} of ${gpus(total)}`} />
		<${Tile} href=${to("fleet")} name="GPUs free" value=${gpus(total - used - out)} text=${out ? `${gpus(out)} out of service` : "all in service"} />
		<${Tile} href=${to("queue")} name="Waiting" value=${count(now.waiting)} text=${now.waiting ? `longest ${span(now.longest_wait_seconds)}` : "no one"} />
		<${Tile} href=${to("leases")} name="Leases" value=${count(now.leases)} text=${`${count(Math.round(granted / minutes))} granted a minute`} />
		<${Tile} href=${to("why") + "?state=refused"} name="Refused" value=${count(refused)} text=${minutes >= 60 ? "in the last hour" : `in ${minutes} min`} />
		<${Tile} href=${to("leases") + "?state=failing"} name="Failing workloads" value=${count(now.failing)} text="now" />
		<${Tile} href=${to("fleet")} name="Out of service" value=${count(now.nodes_unavailable)} text=${`of ${count(now.nodes)} nodes`} />
	</ul>`;
}

function Models({ it }) {
	const rows = Object.entries(it.models);
	return html`<${Section} title="GPUs by model">${!rows.length ? html`<${Empty}>There is no GPU. Register a cluster: <code>moorage fleet import</code>.<//>`
		: html`<${Grid} label="GPUs by model" heads=${["model", "in use", "used", "free", "all"]} rows=${rows.map(([name, each]) => [name,
			html`<${Share} part=${each.used / each.total} words=${percent(each.used / each.total)} />`, gpus(each.used), gpus(each.total - each.used - each.unavailable), gpus(each.total)])} />`}<//>`;
}

function Tenants({ it }) {
	const rows = Object.entries(it.tenants).sort(([, a], [, b]) => b - a);
	const total = sum(Object.values(it.models).map((each) => each.total)) || 1;
	const hues = keyed(Object.keys(it.tenants));
	return html`<${Section} title="GPUs by tenant">${!rows.length ? html`<${Empty}>No one holds a GPU.<//>`
		: html`<${Grid} label="GPUs by tenant" heads=${["tenant", "of the fleet", "GPUs"]} rows=${rows.slice(0, 8).map(([name, milli]) => [name,
			html`<${Share} part=${milli / total} words=${percent(milli / total)} hue=${hues.get(name)} />`, gpus(milli)])} />`}<//>`;
}

/** Who waits longest, and why. */
function Waiting({ rows: oldest }) {
	const found = useLoaded(async () => {
		const reasons = await Promise.all(oldest.map((each) => ask({ op: "why", request: each.request }).catch(() => ({}))));
		return oldest.map((each, n) => ({ ...each, reason: waitingWords(reasons[n], each.resources) }));
	}, [oldest.map((each) => each.request).join()]);
	useEvery(found.again, REASONS_MS, []);
	return html`<${Section} title="Waits longest"><${Loaded} found=${found} what="who waits">${(rows) => (!rows.length ? html`<${Empty}>No request waits.<//>`
		: html`<${Grid} label="Waits longest" heads=${["request", "tenant", "waits", "wants, and why it waits"]} rows=${rows.map((each) => [html`<a href=${to("queue", each.request)}>${brief(each.request)}</a>`, each.tenant,
			span(Date.now() / 1000 - each.since), html`<b>${shape(each.resources)}</b>: ${each.reason}`])} />`)}<//><//>`;
}

/** What ends next. */
function Ending({ every }) {
	const found = useLoaded(() => ask({ op: "leases", sort: "expires_at", limit: ENDING_MAX }), []);
	useEvery(found.again, every * 3, []);
	return html`<${Section} title="Ends next"><${Loaded} found=${found} what="what ends">${({ leases, total }) => {
		const now = Date.now() / 1000;
		const soon = leases.filter((each) => each.expires_at < now + HOUR);
		const more = soon.length === ENDING_MAX && total > ENDING_MAX;
		return !leases.length ? html`<${Empty}>There is no lease${session.value?.operator ? "" : " that you may see"}.<//>` : html`
			<p><a href=${to("leases") + "?sort=expires_at"}><b>${more ? "More than " : ""}${count(soon.length)}</b> of ${count(total)} leases end within the hour</a>, with ${more ? "at least " : ""}${gpus(sum(soon.map((each) => heldMilli(each.placement))))} GPUs, unless they are renewed.</p>
			<${Grid} label="Ends next" heads=${["lease", "tenant", "ends", "where"]} rows=${leases.slice(0, SHOWN).map((each) => [html`<a href=${to("leases", each.id)}>${brief(each.id)}</a>`, each.tenant,
				`in ${span(each.expires_at - now)}, ${time(each.expires_at)}`, placesBrief(each.placement)])} />`;
	}}<//><//>`;
}

function Charts({ it }) {
	const { at } = it;
	if (!at.length) return null;
	const models = Object.entries(it.models);
	const hues = keyed(models.map(([name]) => name));
	const total = at.map((_, n) => sum(models.map(([, each]) => each.total[n])));
	const used = at.map((_, n) => sum(models.map(([, each]) => each.used[n])));
	const tenants = Object.entries(it.tenants).slice(0, 8);
	const owners = keyed(Object.keys(it.now.tenants));
	const rate = (values) => values.map((each, n) => each / it.minutes[n]);
	const codes = Object.entries(it.refusals).slice(0, 6);
	const begun = at.at(-1) - at[0] < 23 * HOUR ? `since ${moment(at[0])}` : "the last 24 hours";
	return html`<${Section} title="The last day"><p class="note">One point each 5 minutes, ${begun}. The server keeps a day, since its start.</p><div class="charts">
		<${Chart} title="Fleet in use" at=${at} href=${to("fleet")} most=${1} said=${percent} series=${[{ name: "all", key: "ink", values: used.map((each, n) => (total[n] ? each / total[n] : 0)) },
			...models.slice(0, 6).map(([name, each]) => ({ name, key: hues.get(name), values: each.used.map((milli, n) => (each.total[n] ? milli / each.total[n] : 0)) }))]} />
		<${Chart} title="GPUs held by tenant" at=${at} href=${to("leases")} said=${gpus} series=${tenants.map(([name, values]) => ({ name, key: owners.get(name) || "k7", values }))} />
		<${Chart} title="Waiting requests" at=${at} href=${to("queue")} said=${tenths} series=${[{ name: "waiting", key: "k0", values: it.waiting }]} />
		<${Chart} title="Longest wait" at=${at} href=${to("queue")} said=${duration} series=${[{ name: "longest", key: "k0", values: it.longest_wait_seconds }]} />
		<${Chart} title="Grants a minute" at=${at} href=${to("leases")} said=${tenths} series=${[{ name: "grants", key: "k0", values: rate(it.grants) }]} />
		<${Chart} title="From a request to its grant" at=${at} href=${to("why")} said=${duration} series=${quantiles(it.grant)} />
		<${Chart} title="Refusals a minute" at=${at} href=${to("why") + "?state=refused"} said=${tenths} series=${codes.length ? codes.map(([name, values], n) => ({ name, key: `k${n}`, values: rate(values) })) : [{ name: "refusals", key: "k0", values: at.map(() => 0) }]} />
		<${Chart} title="Failing workloads" at=${at} href=${to("leases") + "?state=failing"} said=${tenths} series=${[{ name: "failing", key: "k5", values: it.failing }]} />
	</div><//>`;
}

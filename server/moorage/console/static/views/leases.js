// Leases: their holders, places and deadlines; one lease with its output.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { brief, count, gpus, heldMilli, places, placesBrief, some, span, until, when } from "../format.js";
import { ListingTable, useListing } from "../listing.js";
import { fleet, follow, nodeName, tick } from "../map/model.js";
import { go, to } from "../router.js";
import { lacks, session } from "../session.js";
import { useSignal } from "../signal.js";
import { ask, listen, pages } from "../socket.js";
import { LINES_MAX, Timeline, lined } from "../timeline.js";
import { Action, Button, Choice, Command, Empty, Facts, Id, Loaded, Loading, Panel, Policy, Raw, Refused, Section, State, Text, filters, handle, html, useAnswer, useAsk, useLoaded } from "../ui.js";

const STATES = [["", "all current"], "granted", "starting", "active", "failing", "queued", "warm", "ending", "ended"];
const NAMED = ["state", "cluster", "node_id", "tenant", "policy_rule_uri"];
const ORDER = "expires_at";
const PAGES = { node: 500, tenant: 1000 };
const DRAWN_MAX = 20000;
const DRAWN_MS = 60000;
const NEWS_MS = 5000;
const PICKED_MAX = 100;
const TAIL_BYTES = 8192;
const COLUMNS = [
	"lease", ["state", "state"], ["where", "place"], ["GPUs", "-gpus", "gpus"], "model", ["ends in", "expires_at", "-expires_at"], ["tenant", "tenant"],
	["age", "-granted_at", "granted_at"], ["project", "project"], ["policy", "policy_rule_uri"],
];

/** Why a lease cannot be released from here, or "". */
function unreleasable(row) {
	if (["ended", "ending", "warm"].includes(row.state)) return `It is ${row.state}.`;
	if (row.tenant !== session.value?.tenant) return `It belongs to ${row.tenant}: only that tenant, or the holder of its token, may release it.`;
	return lacks("lease");
}

/** The model of each node's GPUs, as the map has them. */
const models = (it) => new Map(it ? it.ids.map((_, n) => [nodeName(it, n), it.first[n + 1] > it.first[n] ? it.models[it.model[it.first[n]]] || "no model" : ""]) : []);

/** Names of the timeline's orders on the server. */
const ORDERS = { ends: "node_ends", load: "node_gpus", name: "node" };

/** The leases of the timeline: all of its first nodes; by tenant, up to a limit. */
async function drawable(filters, by, order) {
	const leases = [];
	let cut = false;
	for await (const page of pages({ op: "leases", filters, sort: by === "node" ? ORDERS[order] : "expires_at", limit: PAGES[by] })) {
		leases.push(...page.leases);
		cut = page.next !== null;
		if (by === "node" ? lined(leases, by, order, cut).length > LINES_MAX : leases.length >= DRAWN_MAX) break;
	}
	return { leases, by, order, cut };
}

const model = (row, kinds) => (heldMilli(row.placement) && kinds.get(`${row.placement[0].cluster_id}/${row.placement[0].node_id}`)) || "–";

export function Leases({ rest, query }) {
	const given = Object.fromEntries(NAMED.map((name) => [name, query.get(name) || ""]).filter(([, value]) => value));
	const sort = query.get("sort") || ORDER;
	const listing = useListing({ op: "leases", filters: given, sort }, "leases", (row) => row.id, 10000);
	const [lines, setLines] = useState({ by: "node", order: "ends" });
	const drawn = useLoaded(() => drawable(given, lines.by, lines.order), [JSON.stringify(given), lines.by, lines.order], DRAWN_MS);
	const [brush, setBrush] = useState(null);
	const [picked, setPicked] = useState(new Set());
	useEffect(follow, []);
	const map = useSignal(fleet);
	const kinds = useMemo(() => models(map), [map]);
	const latest = useRef(null);
	latest.current = listing.refresh;
	const again = () => {
		latest.current();
		drawn.again();
	};
	useEffect(() => {
		let wait = 0; // One request covers several changes.
		const news = () => (wait ||= setTimeout(() => {
			wait = 0;
			latest.current();
		}, NEWS_MS));
		tick.followers.add(news);
		return () => {
			tick.followers.delete(news);
			clearTimeout(wait);
		};
	}, []);
	const columns = rest[0] ? COLUMNS.length - 3 : COLUMNS.length; // Beside one lease there is less room.
	const shown = listing.rows && brush ? { ...listing, rows: listing.rows.filter((row) => row.granted_at <= brush[1] && row.expires_at >= brush[0]) } : listing;
	const pick = (keys, on) => setPicked((old) => new Set(on ? [...old, ...keys].slice(0, PICKED_MAX) : [...old].filter((each) => !keys.includes(each))));
	const chosen = (listing.rows || []).filter((row) => picked.has(row.id) && !row.gone);
	const order = (by) => go(`${to("leases", ...rest)}?${new URLSearchParams({ ...given, sort: by })}`, true);
	const field = (name, label) => html`<label>${label} <input name=${name} defaultValue=${given[name]} size="12" /></label>`;
	return html`
		<form class="tools" onSubmit=${filters("leases")} key=${query.toString()}>
			<${Choice} label="State" name="state" value=${given.state || ""} options=${STATES} />
			${field("cluster", "Cluster")}${field("node_id", "Node")}${field("tenant", "Tenant")}${field("policy_rule_uri", "Policy")}
			${query.get("sort") && html`<input type="hidden" name="sort" value=${sort} />`}
			<button type="submit">Filter</button>
			<${Action} label="Flush warm leases" title="Flush all warm leases" right="lease" destroys message=${{ op: "flush" }} say=${flushWords} words=${["flush"]} done=${listing.refresh} />
			<${Command} words=${["leases", ...(given.state ? ["--state", given.state] : []), ...(given.cluster ? ["--cluster", given.cluster] : [])]} />
		</form>
		<${Loaded} found=${drawn} what="the timeline">${(it) => (it.leases.length ? html`<${Timeline} drawn=${it} models=${kinds} chosen=${lines} choose=${setLines} open=${(id) => go(to("leases", id))} brushed=${setBrush} />` : null)}<//>
		<div class="split">
			<div>${chosen.length ? html`<p class="tools picked"><b>${count(chosen.length)} selected</b> <${Release} leases=${chosen} done=${() => {
				setPicked(new Set());
				again();
			}} /> <${Button} onClick=${() => setPicked(new Set())}>Select none<//></p>` : null}
			<${ListingTable} label="Leases" things="leases" listing=${shown} keyed=${(row) => row.id} current=${rest[0]} sort=${sort} order=${order} picking=${{ picked, pick, why: unreleasable, note: lacks("lease") || "Disabled boxes: leases of other tenants, or leases that end." }}
				heads=${COLUMNS.slice(0, columns)}
				cells=${(row) => [row.id, html`<${State} state=${row.gone && !row.moved ? "ended" : row.state} />`, placesBrief(row.placement), gpus(heldMilli(row.placement)), model(row, kinds),
					row.gone && !row.moved ? "–" : until(row.expires_at), row.tenant || "kept warm", until(row.granted_at), row.project || "–", html`<${Policy} name=${row.policy_rule_uri} />`].slice(0, columns)}
				address=${(row) => to("leases", row.id) + (query.toString() ? `?${query}` : "")} empty="There is no such lease." /></div>
			${rest[0] && html`<${Lease} key=${rest[0]} id=${rest[0]} changed=${again} />`}
		</div>`;
}
export const flushWords = ({ flushed }) => (flushed.length ? `Ends ${some(flushed.length, "warm lease")} and stops their workloads. The next similar request starts cold.` : "There are no warm leases, so none ends.");
export const holding = (leases) => `${gpus(leases.reduce((sum, each) => sum + heldMilli(each.placement), 0))} GPUs`;

/** The waiting requests that then fit; `more`: their number of other tenants. */
export function Served({ ids, more = 0 }) {
	const all = ids.length + more;
	return all ? html`<b>${some(all, "waiting request")} then ${all === 1 ? "fits" : "fit"}</b>${ids.length ? html`: ${ids.slice(0, 5).map((id, n) => html`${n ? ", " : ""}<${Id} of=${id} view="queue" />`)}${all > 5 ? " and others" : ""}` : ", of other tenants"}.` : "No waiting request then fits.";
}

/** Release one or several leases behind one dialog. */
function Release({ leases, done }) {
	const [first, ...others] = leases;
	const many = others.length > 0;
	const release = async () => {
		for (const lease of leases) await ask({ op: "release", lease: lease.id });
	};
	const dry = async () => (await ask({ op: "release", lease: first.id, dry_run: true, beside: others.map(({ id }) => id) }, true)).reasons || {};
	const say = ({ warm: kept = [], then_fit: fit = [], then_fit_others: more, stop_seconds: stop }) => {
		const warm = kept.length;
		const works = leases.filter(({ workload }) => workload);
		const bound = stop === null || stop === undefined ? "" : stop ? ` within ${span(stop)}` : " at once";
		const what = many ? `Ends ${some(leases.length, "lease")}, which hold ${holding(leases)}:` : `Ends lease ${brief(first.id)} of ${first.tenant} on ${placesBrief(first.placement)}, ${until(first.expires_at)} before its end.`;
		const then = !works.length ? "No workload runs under it." : warm === leases.length ? `${many ? "Their workloads stay" : "Its workload stays"} warm for the next similar request.` : `${many ? `${some(works.length - warm, "workload")} stop` : `Its workload on ${first.workload.backend} is stopped`}${bound}${warm ? `, ${warm} stay warm` : ""}.`;
		return html`<p>${what}</p>${many ? html`<ul>${leases.slice(0, 12).map((lease) => html`<li>${brief(lease.id)} on ${placesBrief(lease.placement)}</li>`)}${leases.length > 12 ? html`<li>and ${leases.length - 12} more</li>` : null}</ul>` : null}<p>${then} <${Served} ids=${fit} more=${more} /></p><p>This cannot be undone.</p>`;
	};
	return html`<${Action} label=${many ? `Release ${leases.length}` : "Release"} title=${many ? `Release ${leases.length} leases` : `Release lease ${first.id}`} right="lease" destroys
		dry=${dry} say=${say} act=${release} words=${many ? undefined : ["release", first.id]} done=${done} />`;
}

function Lease({ id, changed }) {
	const found = useAsk({ op: "why", lease: id }, 5000);
	useEffect(() => listen("leases", (_, data) => data?.id === id && found.again()), [id]);
	return html`<${Panel} title=${`Lease ${id}`} found=${found}>${({ lease, reason }) => (lease ? html`<${Held} lease=${lease} reason=${reason} changed=${() => {
		found.again();
		changed();
	}} />` : html`<${Empty}>There is no lease ${id}, or it ended long ago. <a href=${to("why", id)}>See what is known about it</a>.<//>`)}<//>`;
}

function Held({ lease, reason, changed }) {
	const { id, workload: work } = lease;
	const now = Date.now() / 1000;
	const own = lease.tenant === session.value?.tenant;
	return html`<p><${State} state=${lease.state} /> ${reason || lease.reason || ""}</p>
		<${Facts} pairs=${[["where", places(lease.placement)], ["granted", when(lease.granted_at)], ["ends", `${when(lease.expires_at)}, ${until(lease.expires_at)} ${lease.expires_at > now ? "from now" : "ago"}`],
			["fencing number", `${lease.fencing}: it grows with each grant, so that storage can refuse an earlier holder`], ["tenant", lease.tenant], ["project", lease.project], ["policy", html`<${Policy} name=${lease.policy_rule_uri} />`],
			["next try", lease.retry_at ? when(lease.retry_at) : ""]]} />
		<p class="buttons">${["ended", "ending"].includes(lease.state) || !own ? null : html`<${Release} leases=${[lease]} done=${changed} />`}
			<a class="button" href=${to("why", id)}>Why here</a> <${Command} words=${["status", id]} /></p>
		${work ? html`<${Section} title="Workload">
			<${Facts} pairs=${[["backend", work.backend], ["phase", work.phase], ["attempt", `${work.attempt} of ${work.attempts_max}`], ["endpoint", work.endpoint], ["detail", work.detail],
				["warm start", work.warm ? "yes" : ""], ["last outcome", work.outcome ? `${work.outcome.phase}, code ${work.outcome.exit_code ?? "–"}: ${work.outcome.detail}` : ""]]} />
			${own && html`<${Output} id=${id} tail=${work.outcome?.log_tail} />${lacks("exec") ? html`<p class="note">${lacks("exec")}</p>` : html`<${Exec} id=${id} />`}`}<//>` : null}
		<${Raw} value=${lease} />`;
}

/** The end of a workload's output. */
function Output({ id, tail }) {
	const logs = useAsk({ op: "logs", lease: id, offset: -TAIL_BYTES }, 3000);
	const text = logs.value?.text ?? (logs.error && tail ? tail.join("\n") : undefined);
	return html`<h3>Output</h3>
		${text ? html`<${Text} label="Output of the workload" text=${text} />` : text === "" ? html`<${Empty}>It has no output yet.<//>`
			: logs.error ? html`<${Refused} error=${logs.error} />` : html`<${Loading} what="its output" />`}
		<p class="buttons"><${Command} words=${["logs", id]} /></p>`;
}

function Exec({ id }) {
	const [found, run] = useAnswer();
	const start = handle((form) => run(() => ask({ op: "exec", lease: id, command: ["sh", "-c", form.command.value], timeout_seconds: 20 })));
	return html`<form class="tools" onSubmit=${start}><label>Run inside <input name="command" required placeholder="nvidia-smi" /></label><button type="submit">Run</button></form>
		<${Loaded} found=${found} what="the command">${(it) => html`<p>It ended with exit code ${it.exit_code}.</p><${Text} label="Output of the command" text=${it.output} />`}<//>`;
}

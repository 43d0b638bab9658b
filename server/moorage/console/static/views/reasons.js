// A decision on one screen: the nodes left after each step, the reasons, and the remedies.
import { count, places, shape, some, until, when } from "../format.js";
import { to } from "../router.js";
import { ask } from "../socket.js";
import { Empty, Facts, Grid, History, Id, Place, Policy, Section, State, html, useLoaded } from "../ui.js";

/** Why a node cannot take a demand, in order of precedence: name, text, whether for ever, remedy. */
const MISFITS = [
	["labels", "have other labels than requested", true, "Request other labels"],
	["gpu_model", "have too few GPUs of the accepted models", true, "Accept another GPU model"],
	["gpu_memory", "have too few GPUs with that much memory", true, "Request less memory per GPU"],
	["gpu_count", "have too few GPUs that can be shared or taken whole as requested", true, "Request fewer GPUs on one node, or more nodes"],
	["topology", "have too few GPUs in one link group or NUMA domain", true, "Request no topology"],
	["cpu", "have too little CPU even when empty", true, "Request fewer cores"],
	["memory", "have too little memory even when empty", true, "Request less memory"],
	["unavailable", "cannot be used now", false, "Put nodes into service again"],
	["gpus_busy", "have too few free GPUs", false, "Wait, request fewer GPUs, or end a lease"],
	["topology_busy", "have no group with enough free GPUs", false, "Request no topology, or wait"],
	["cpu_busy", "have too little free CPU", false, "Request fewer cores, or wait"],
	["memory_busy", "have too little free memory", false, "Request less memory, or wait"],
];
const WORDS = new Map(MISFITS.map(([name, words]) => [name, words]));

/** The first remedy for each binding constraint. */
const EASED = Object.fromEntries([...MISFITS.map(([name, , , eased]) => [name, eased]), ["nodes", "Register nodes, or name other clusters"]]);

/** Names of fields for people, as in the server's sentences. */
const NAMES = {
	cpu_milli: "CPU (milli)", gpu_memory_mib: "GPU memory (MiB)", gpu_milli: "GPU share (milli)", gpus: "GPUs", memory_mib: "memory (MiB)", models: "GPU models",
	where: "`where`",
};

/** A change with which a request would have fitted, as a sentence. */
export function changeWords({ field, asked, fits }) {
	const [last, either] = [field.split(".").at(-1), (value) => [value].flat().join(" or ")];
	if (field === "clusters") return "It would fit in other clusters.";
	return fits === "" ? `It would fit without ${NAMES[last] || last}.` : `It would fit with ${NAMES[last] || last}: ${either(fits)} instead of ${either(asked)}.`;
}

/** The part of an answer that counts nodes. */
const counted = (why) => [why, why.reasons, why.error, why.why].find((each) => each?.misfits) || {};

/** The nodes that are left after each step. */
function funnel(why) {
	const { nodes, misfits } = counted(why);
	if (nodes === undefined) return [];
	const lost = (of) => MISFITS.reduce((sum, [name, , never]) => sum + (of(name, never) ? misfits[name] || 0 : 0), 0);
	const capable = nodes - lost((_, never) => never);
	const serving = capable - (misfits.unavailable || 0);
	const fitting = serving - lost((name, never) => !never && name !== "unavailable");
	const steps = [["candidates", nodes], ["could take it when empty", capable], ["in service", serving], ["fit", fitting]];
	const chosen = (why.lease?.placement || why.placement || []).length;
	return chosen ? [...steps, ["chosen", chosen]] : steps;
}
export const useWhys = (rows) => useLoaded(async () => Object.fromEntries(await Promise.all(rows.map(async ({ request }) => [request, await ask({ op: "why", request }).catch(() => null)]))), [rows.map((each) => each.request).join()], 60000);

/** A short text of why a request waits. */
export function waitingWords(why, resources) {
	const steps = funnel(why);
	const verdict = why.verdict === "not_you" ? "a quota blocks it" : "";
	if (verdict || steps.length < 4) return verdict || why.reason || "no reason is known";
	const [capable, fitting] = [steps[1][1], steps[3][1]];
	const needs = resources?.nodes || 1;
	if (!capable) return "no node could ever take it";
	if (fitting >= needs && !counted(why).reserved_for_waiting) return why.reason; // Such as nodes in different racks.
	// The number of reserved free nodes is unknown; with too few free nodes, it does not matter.
	return `${fitting < needs ? `${count(fitting)} of ${some(needs, "node")} free` : `enough is free (${some(fitting, "node")}), but reserved for an earlier request`}; ${count(capable)} could take it when empty`;
}

/** When a request has its turn: a time, a range, or why neither is known.
 * `row`: A row of the queue. */
export function turn(row, why) {
	const now = Date.now() / 1000;
	if (row.expected_at) return `in ${until(row.expected_at)}, about ${when(row.expected_at)}`;
	const [room, steps] = [why?.room_at, why ? funnel(why) : []];
	if (room && room < row.deadline) {
		const first = why.waits_for[0].expires_at;
		return `${first === room ? "" : `${when(first)} to `}${when(room)}, in ${until(room)} ${row.position > 1 ? "or later: other requests come first" : "unless leases are renewed"}`;
	}
	if (room) return `no estimate: enough leases end only about ${when(room)}, after its deadline`;
	if (steps.length > 3 && steps[3][1] >= (row.resources?.nodes || 1)) return "no estimate: enough is free, but reserved for an earlier request";
	if (!row.resources) return "no estimate: only its policy knows what it needs";
	if (row.lease?.retry_at > now) return `no estimate: it pauses until ${when(row.lease.retry_at)} after a failure`;
	return why ? `no estimate: the leases that end before its deadline, ${when(row.deadline)}, may not be enough` : "…";
}

const AWAITED_SHOWN = 6;
export function Awaited({ why }) {
	const all = why.waits_for || [];
	if (!all.length) return null;
	return html`<${Section} title="Waits for"><p>These leases hold the resources that it needs. It can start when they have ended:</p>
		<${Grid} label="Waits for" heads=${["node", "lease", "ends"]} most=${AWAITED_SHOWN} rows=${all.map((each) => [html`<${Place} ...${each} />`,
			each.lease ? html`<${Id} of=${each.lease} />` : "of another tenant", `in ${until(each.expires_at)}, ${when(each.expires_at)}`])} />
		${all.length > AWAITED_SHOWN && html`<p class="note">Enough leases end by ${when(why.room_at)}.</p>`}<//>`;
}

/** The most frequent reason among nodes that could take it when empty, or else among all. */
function hurdle(why) {
	const { nodes, misfits = {} } = counted(why);
	const capable = funnel(why)[1]?.[1];
	const [most] = MISFITS.filter(([name, , never]) => misfits[name] && !(capable && never)).sort(([a], [b]) => misfits[b] - misfits[a]);
	return most && `Of the ${capable ? `${some(capable, "node")} that could take it when empty` : some(nodes, "node")}, ${count(misfits[most[0]])} ${most[1]}: the most frequent reason.`;
}

export function Reasons({ why }) {
	const steps = funnel(why);
	const most = steps[0]?.[1] || 1;
	const { misfits = {} } = counted(why);
	const { binding, fits_if: changes = [] } = why;
	const policy = why.policy_rule_uri || why.lease?.policy_rule_uri;
	return html`
		<p class="reason">${why.state && html`<${State} state=${why.state} /> `}${why.reason || ""}</p>
		${steps.length ? html`<${Section} title="Nodes left after each step"><ol class="funnel">${steps.map(([name, nodes]) => html`<li>
			<meter min="0" max=${most} value=${nodes} aria-hidden></meter> <b>${count(nodes)}</b> ${name}</li>`)}</ol><//>` : null}
		${Object.keys(misfits).length ? html`<${Section} title="Why not the others"><${Grid} label="Why not the others" heads=${["nodes", "why not"]}
			rows=${Object.entries(misfits).map(([name, nodes]) => [count(nodes), WORDS.get(name) || name])} /><//>` : null}
		${binding || changes.length ? html`<${Section} title="What would have changed it">
			${changes.length ? html`<ul>${changes.map((each) => html`<li>${changeWords(each)}</li>`)}</ul>`
				: html`<p>${EASED[binding] || "Change this requirement"}.</p>`}
			<p>${hurdle(why)}</p><//>` : null}
		<${Facts} pairs=${[
			["at", why.at ? when(why.at) : ""], ["wanted", why.resources ? shape(why.resources) : ""], ["code", why.code], ["field", why.field], ["expected", why.expected],
			["policy", policy && html`<${Policy} name=${policy} />`],
			["placement", why.placement || why.lease ? places(why.placement || why.lease.placement) : ""],
			["existing models", why.models?.join(", ")], ["changed since", why.drift?.join("; ")],
		]} />
		${why.history?.length ? html`<${Section} title="History"><${History} of=${why.history.map(({ at, fact, reason }) => ({ at, what: fact, more: reason }))} /><//>` : null}
		${!steps.length && !why.reason && !why.history && html`<${Empty}>No more details are known.<//>`}`;
}

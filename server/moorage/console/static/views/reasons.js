// A decision on one screen: funnel, verdicts, what binds, what would change it.
import { count, places, shape, some, until, when } from "../format.js";
import { to } from "../router.js";
import { ask } from "../socket.js";
import { Empty, Facts, Grid, History, Id, Place, Policy, Section, State, html, useLoaded } from "../ui.js";

/** Why a node cannot take a demand, first reason first: name, words, never, what would help. */
const MISFITS = [
	["labels", "have other labels than asked for", true, "Ask for other labels"],
	["gpu_model", "have too few GPUs of the accepted models", true, "Accept another GPU model"],
	["gpu_memory", "have too few GPUs with that much memory", true, "Ask for less memory a GPU"],
	["gpu_count", "have too few GPUs that can be given so", true, "Ask for fewer GPUs on one node, or for more nodes"],
	["topology", "have too few GPUs in one link group or NUMA domain", true, "Ask without the topology"],
	["cpu", "have too little CPU even when empty", true, "Ask for fewer cores"],
	["memory", "have too little memory even when empty", true, "Ask for less memory"],
	["unavailable", "cannot be used now", false, "Put nodes into service again"],
	["gpus_busy", "have too few free GPUs", false, "Wait, ask for fewer GPUs, or end a lease"],
	["topology_busy", "have no group with enough free GPUs", false, "Ask without the topology, or wait"],
	["cpu_busy", "have too little free CPU", false, "Ask for fewer cores, or wait"],
	["memory_busy", "have too little free memory", false, "Ask for less memory, or wait"],
];
const WORDS = new Map(MISFITS.map(([name, words]) => [name, words]));

/** What would help first, by what binds. */
const EASED = Object.fromEntries([...MISFITS.map(([name, , , eased]) => [name, eased]), ["nodes", "Register nodes, or name other clusters"]]);

/** What fields are called for people, as the server's sentences call them. */
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

/** In a few words why a request waits. */
export function waitingWords(why, resources) {
	const steps = funnel(why);
	const verdict = why.verdict === "not_you" ? "a quota is in the way" : "";
	if (verdict || steps.length < 4) return verdict || why.reason || "no reason is known";
	const [capable, fitting] = [steps[1][1], steps[3][1]];
	const needs = resources?.nodes || 1;
	if (!capable) return "no node could ever take it";
	if (fitting >= needs && !counted(why).reserved_for_waiting) return why.reason; // Its nodes lie apart, say.
	// How many of the free nodes are kept is not known; where too few are free, those do not matter.
	return `${fitting < needs ? `${count(fitting)} of ${some(needs, "node")} free` : `enough is free (${some(fitting, "node")}), but kept for a request before it`}; ${count(capable)} could take it when empty`;
}

/** When a request has its turn: a time, a range, or why neither is known.
 * `row`: Of the queue. */
export function turn(row, why) {
	const now = Date.now() / 1000;
	if (row.expected_at) return `in ${until(row.expected_at)}, about ${when(row.expected_at)}`;
	const [room, steps] = [why?.room_at, why ? funnel(why) : []];
	if (room && room < row.deadline) {
		const first = why.waits_for[0].expires_at;
		return `${first === room ? "" : `${when(first)} to `}${when(room)}, in ${until(room)} ${row.position > 1 ? "or later: others come first" : "unless leases are renewed"}`;
	}
	if (room) return `no estimate: enough ends only about ${when(room)}, after it gives up`;
	if (steps.length > 3 && steps[3][1] >= (row.resources?.nodes || 1)) return "no estimate: enough is free, but kept for a request before it";
	if (!row.resources) return "no estimate: only its policy knows what it needs";
	if (row.lease?.retry_at > now) return `no estimate: it pauses until ${when(row.lease.retry_at)} after a failure`;
	return why ? `no estimate: what ends before ${when(row.deadline)}, when it gives up, is not known to be enough` : "…";
}

const AWAITED_SHOWN = 6;
export function Awaited({ why }) {
	const all = why.waits_for || [];
	if (!all.length) return null;
	return html`<${Section} title="Waits for"><p>These hold what it needs; it has its turn when they have ended:</p>
		<${Grid} label="Waits for" heads=${["node", "lease", "ends"]} most=${AWAITED_SHOWN} rows=${all.map((each) => [html`<${Place} ...${each} />`,
			each.lease ? html`<${Id} of=${each.lease} />` : "of another tenant", `in ${until(each.expires_at)}, ${when(each.expires_at)}`])} />
		${all.length > AWAITED_SHOWN && html`<p class="note">Enough has ended at ${when(why.room_at)}.</p>`}<//>`;
}

/** What rules out most of the nodes that could take it; if none could, of all. */
function hurdle(why) {
	const { nodes, misfits = {} } = counted(why);
	const capable = funnel(why)[1]?.[1];
	const [most] = MISFITS.filter(([name, , never]) => misfits[name] && !(capable && never)).sort(([a], [b]) => misfits[b] - misfits[a]);
	return most && `Of the ${capable ? `${some(capable, "node")} that could take it when empty` : some(nodes, "node")}, ${count(misfits[most[0]])} ${most[1]}: that rules out most.`;
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
				: html`<p>${EASED[binding] || "Ease it"}.</p>`}
			<p>${hurdle(why)}</p><//>` : null}
		<${Facts} pairs=${[
			["at", why.at ? when(why.at) : ""], ["wanted", why.resources ? shape(why.resources) : ""], ["code", why.code], ["field", why.field], ["expected", why.expected],
			["policy", policy && html`<${Policy} name=${policy} />`],
			["placement", why.placement || why.lease ? places(why.placement || why.lease.placement) : ""],
			["models there are", why.models?.join(", ")], ["no longer true", why.drift?.join("; ")],
		]} />
		${why.history?.length ? html`<${Section} title="History"><${History} of=${why.history.map(({ at, fact, reason }) => ({ at, what: fact, more: reason }))} /><//>` : null}
		${!steps.length && !why.reason && !why.history && html`<${Empty}>Nothing more is known of it.<//>`}`;
}

// A decision on one screen: the funnel of nodes, verdicts by kind of node, what binds, what would change it.
import { count, moment, places, shape } from "../format.js";
import { Empty, Facts, Grid, History, Policy, Section, State, html } from "../ui.js";

/** Why a node cannot take a demand, in the order in which it is looked at: name, words, never.
 */
const MISFITS = [
	["labels", "have other labels than asked for", true],
	["gpu_model", "have too few GPUs of the accepted models", true],
	["gpu_memory", "have too few GPUs with that much memory", true],
	["gpu_count", "have too few GPUs that can be given so", true],
	["topology", "have too few GPUs in one link group or NUMA domain", true],
	["cpu", "have too little CPU even when empty", true],
	["memory", "have too little memory even when empty", true],
	["unavailable", "cannot be used now", false],
	["gpus_busy", "have too few free GPUs", false],
	["topology_busy", "have no group with enough free GPUs", false],
	["cpu_busy", "have too little free CPU", false],
	["memory_busy", "have too little free memory", false],
];
const WORDS = new Map(MISFITS.map(([name, words]) => [name, words]));

/** What would help first, by what binds. */
const EASED = {
	labels: "Ask for other labels", gpu_model: "Accept another GPU model", gpu_memory: "Ask for less memory a GPU", gpu_count: "Ask for fewer GPUs on one node, or for more nodes",
	topology: "Ask without the topology", cpu: "Ask for fewer cores", memory: "Ask for less memory", unavailable: "Put nodes into service again",
	gpus_busy: "Wait, ask for fewer GPUs, or end a lease", topology_busy: "Ask without the topology, or wait", cpu_busy: "Ask for fewer cores, or wait",
	memory_busy: "Ask for less memory, or wait", nodes: "Register nodes, or name other clusters",
};

/** The part of an answer that counts nodes. @param {any} why */
const counted = (why) => [why, why.reasons, why.error, why.why].find((each) => each?.misfits) || {};

/** The nodes that are left after each step. @param {any} why @returns {[string, number][]} */
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

export function Reasons({ why }) {
	const steps = funnel(why);
	const most = steps[0]?.[1] || 1;
	const { misfits = {} } = counted(why);
	const { binding, fits_if: changes = [] } = why;
	const policy = why.policy_rule_uri || why.lease?.policy_rule_uri;
	return html`
		<p class="reason">${why.state ? html`<${State} state=${why.state} /> ` : null}${why.reason || ""}</p>
		${steps.length ? html`<${Section} title="Funnel"><ol class="funnel">${steps.map(([name, nodes]) => html`<li>
			<meter min="0" max=${most} value=${nodes} aria-hidden="true"></meter> <b>${count(nodes)}</b> ${name}</li>`)}</ol><//>` : null}
		${Object.keys(misfits).length ? html`<${Section} title="Verdicts"><${Grid} label="Verdicts" heads=${["nodes", "why not"]}
			rows=${Object.entries(misfits).map(([name, nodes]) => [count(nodes), WORDS.get(name) || name])} /><//>` : null}
		${binding || changes.length ? html`<${Section} title="What would have changed it">
			${changes.length ? html`<ul>${changes.map((each) => html`<li><code>${each.field}</code>: ${String(each.fits) || "none"} instead of ${each.asked ?? "those"}</li>`)}</ul>`
				: html`<p>${EASED[binding] || "Ease it"}: the nodes that come closest ${WORDS.get(binding) || `lack ${binding}`}.</p>`}
			${binding ? html`<p>Binding: <code>${binding}</code></p>` : null}<//>` : null}
		<${Facts} pairs=${[
			["at", why.at ? moment(why.at) : ""], ["wanted", why.resources ? shape(why.resources) : ""], ["code", why.code], ["field", why.field], ["expected", why.expected],
			["policy", policy && html`<${Policy} name=${policy} />`],
			["placement", why.placement || why.lease ? places(why.placement || why.lease.placement) : ""],
			["models there are", why.models?.join(", ")], ["drift", why.drift?.join("; ")],
		]} />
		${why.history?.length ? html`<${Section} title="History"><${History} of=${why.history.map(({ at, fact, reason }) => ({ at, what: fact, more: reason }))} /><//>` : null}
		${!steps.length && !why.reason && !why.history ? html`<${Empty}>Nothing more is known of it.<//>` : null}`;
}

// A decision on one screen: the funnel of nodes, verdicts by kind of node, what binds, what would change it.
import { count, moment, places, shape } from "../format.js";
import { to } from "../router.js";
import { Empty, Facts, Grid, Raw, Section, State, html } from "../ui.js";

/** Why a node cannot take a demand, in the order in which it is looked at: name, words, never.
 * @type {[string, string, boolean][]} */
const MISFITS = [
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

/** What would help first, by what binds. @type {Record<string, string>} */
const EASED = {
	gpu_model: "Accept another GPU model", gpu_memory: "Ask for less memory a GPU", gpu_count: "Ask for fewer GPUs on one node, or for more nodes",
	topology: "Ask without the topology", cpu: "Ask for fewer cores", memory: "Ask for less memory", unavailable: "Put nodes into service again",
	gpus_busy: "Wait, ask for fewer GPUs, or end a lease", topology_busy: "Ask without the topology, or wait", cpu_busy: "Ask for fewer cores, or wait",
	memory_busy: "Ask for less memory, or wait", nodes: "Register nodes, or name other clusters",
};

/** The part of an answer that counts nodes. @param {any} why */
const counted = (why) => [why, why.reasons, why.error, why.why].find((each) => each?.misfits) || {};

/** The nodes that are left after each step. @param {any} why @returns {[string, number][]} */
export function funnel(why) {
	if (why.funnel) return why.funnel.map((each) => (Array.isArray(each) ? each : [each.stage, each.nodes]));
	const { nodes, misfits } = counted(why);
	if (nodes === undefined) return [];
	const lost = (of) => MISFITS.reduce((sum, [name, , never]) => sum + (of(name, never) ? misfits[name] || 0 : 0), 0);
	const capable = nodes - lost((_, never) => never);
	const serving = capable - (misfits.unavailable || 0);
	const fitting = serving - lost((name, never) => !never && name !== "unavailable");
	/** @type {[string, number][]} */
	const steps = [["candidates", nodes], ["could take it when empty", capable], ["in service", serving], ["fit", fitting]];
	const chosen = (why.lease?.placement || why.placement || []).length;
	return chosen ? [...steps, ["chosen", chosen]] : steps;
}

const SHOWN = new Set(["request", "state", "reason", "code", "lease", "history", "misfits", "nodes", "nodes_fitting", "binding", "reasons", "verdicts", "counterfactual", "funnel", "models", "drift", "scores", "at", "seq", "resources", "placement", "policy_rule_uri", "tenant", "field", "expected", "replayable"]);

export function Reasons({ why }) {
	const steps = funnel(why);
	const most = steps[0]?.[1] || 1;
	const { misfits = {}, binding: bound } = counted(why);
	const binding = why.binding || bound;
	/** @type {any[]} */
	const verdicts = why.verdicts || Object.entries(misfits).map(([name, nodes]) => ({ nodes, reason: WORDS.get(name) || name }));
	const counter = why.counterfactual;
	const others = Object.entries(why).filter(([name]) => !SHOWN.has(name));
	return html`
		<p class="reason">${why.state ? html`<${State} state=${why.state} /> ` : null}${why.reason || ""}</p>
		${steps.length ? html`<${Section} title="Funnel"><ol class="funnel">${steps.map(([name, nodes]) => html`<li key=${name}>
			<meter min="0" max=${most} value=${nodes} aria-hidden="true"></meter> <b>${count(nodes)}</b> ${name}</li>`)}</ol><//>` : null}
		${verdicts.length ? html`<${Section} title="Verdicts"><${Grid} label="Verdicts" heads=${["nodes", "why not"]}
			rows=${verdicts.map((each) => [count(each.nodes ?? each.count ?? 0), WORDS.get(each.reason) || each.reason || each.misfit || JSON.stringify(each)])} /><//>` : null}
		${why.scores ? html`<${Section} title="Scores"><${Raw} value=${why.scores} label="The terms" /><//>` : null}
		${binding || counter ? html`<${Section} title="What would have changed it">
			<p>${counter ? (typeof counter === "string" ? counter : counter.text || JSON.stringify(counter)) : `${EASED[binding] || "Ease it"}: the nodes that come closest ${WORDS.get(binding) || `lack ${binding}`}.`}</p>
			${binding ? html`<p>Binding: <code>${binding}</code></p>` : null}<//>` : null}
		<${Facts} pairs=${[
			["at", why.at ? moment(why.at) : ""], ["wanted", why.resources ? shape(why.resources) : ""], ["code", why.code], ["field", why.field], ["expected", why.expected],
			["policy", why.policy_rule_uri || why.lease?.policy_rule_uri ? html`<a href=${to("policies", why.policy_rule_uri || why.lease.policy_rule_uri)}>${why.policy_rule_uri || why.lease.policy_rule_uri}</a>` : ""],
			["placement", why.placement || why.lease ? places(why.placement || why.lease.placement) : ""],
			["models there are", why.models?.join(", ")], ["drift", why.drift?.join("; ")],
			...others.map(([name, value]) => /** @type {[string, any]} */ ([name, typeof value === "object" ? JSON.stringify(value) : String(value)])),
		]} />
		${why.history?.length ? html`<${Section} title="History"><ol class="history">${why.history.map((each, at) => html`<li key=${at}>
			${each.at ? html`<time>${moment(each.at)}</time> ` : null}<b>${each.what || each.fact || each.state || each.event || ""}</b> ${each.reason || each.detail || ""}</li>`)}</ol><//>` : null}
		${!steps.length && !why.reason && !why.history ? html`<${Empty}>Nothing more is known of it.<//>` : null}`;
}

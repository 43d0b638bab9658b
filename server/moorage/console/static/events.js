// Events as sentences, with links to their subjects.
import { placesBrief, some, when } from "./format.js";
import { Id, Place, Policy, html } from "./ui.js";

const lease = (data) => html`<${Id} of=${data.id} />`;
const place = (data) => html`<${Place} ...${data} />`;

/** The rest of an event's sentence. */
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
	unseen: (d) => `${some(d.events, "more event")} of other tenants’ leases came at once.`,
	cluster_set: (d) => html`Cluster ${place(d)} was registered or changed: ${some(d.nodes, "node")}.`,
	cluster_removed: (d) => `Cluster ${d.cluster_id} was removed.`,
	cordoned: (d) => html`${place(d)} gets no new leases: ${d.unavailable}`,
	draining: (d) => html`${place(d)} is being drained: ${d.unavailable}`,
	uncordoned: (d) => html`${place(d)} is in service again.`,
	activated: (d) => html`<${Policy} bare name=${d.alias} /> means <${Policy} bare name=${d.policy_rule_uri} /> from then on.`,
	rests: (d) => html`<${Policy} name=${d.policy_rule_uri} /> is paused for ${d.seconds} s: it exceeded its deadline ${d.overruns} times.`,
	examples_failed: (d) => html`<${Policy} name=${d.policy_rule_uri} /> fails its examples: ${d.reason}`,
};
export function sentence(name, data) {
	if (OF_LEASES[name]) return html`Lease ${lease(data)} ${OF_LEASES[name](data)}`;
	if (OF_WORKLOADS[name]) return html`The workload of lease ${lease(data)} ${OF_WORKLOADS[name](data)}`;
	if (OTHERS[name]) return OTHERS[name](data);
	const about = data?.alias || data?.policy_rule_uri || data?.version;
	return html`${name.replaceAll("_", " ")}${about ? html`: <${Policy} name=${about} />${data.alias && data.policy_rule_uri ? html` means <${Policy} name=${data.policy_rule_uri} />` : ""}` : ""}`;
}

// The server's own metrics, and the alerts for an operator.
import { count, duration } from "./format.js";
import { to } from "./router.js";
import { http, may } from "./session.js";

const LOOP_SECONDS = 1;
const COMMIT_SECONDS = 0.25;
const BACKLOG = 5000;
export function samples(text) {
	return text.split("\n").filter((line) => line && !line.startsWith("#")).map((line) => {
		const found = /^([\w:]+)(\{.*\})? (\S+)/.exec(line);
		return found ? { name: found[1], labels: (found[2] || "").slice(1, -1), value: Number(found[3]) } : { name: line, labels: "", value: NaN };
	});
}

/** All samples; null: this role may not read them. */
export async function readMetrics() {
	if (!may("metrics")) return null;
	const text = await http("GET", "/metrics");
	return typeof text === "string" ? samples(text) : null;
}

/** The sum of a metric; undefined: it is not known. */
export function total(all, name) {
	const found = all?.filter((each) => each.name === `moorage_${name}`);
	return found?.length ? found.reduce((sum, each) => sum + each.value, 0) : undefined;
}
export function alarms(all, history) {
	const { now } = history;
	const of = (name) => total(all, name) || 0;
	const late = Math.max(0, ...history.loop_seconds.slice(-2));
	const commit = history.commit.p99.slice(-2).filter((each) => each !== null);
	const operations = { href: to("operations"), link: "Operations" };
	const found = [
		[of("disk_full"), "The disk is full.", "No lease is granted until there is room.", operations],
		[of("backlog") > BACKLOG, "Answers are late.", `${of("backlog")} events and facts wait to be processed.`, operations],
		[Math.max(0, ...commit) > COMMIT_SECONDS, "Commits are slow.", `One of a hundred took ${duration(Math.max(0, ...commit))}: look at the disk.`, operations],
		[late > LOOP_SECONDS, "The server stalled.", `Its event loop was ${duration(late)} late within the last minutes.`, operations],
		[of("policies_circuit_open"), "Policies are paused.", `${of("policies_circuit_open")} exceeded their deadline again and again.`, { href: to("policies"), link: "Policies" }],
		[now.failing, "Workloads fail.", `${count(now.failing)} of ${count(now.leases)} leases.`, { href: to("leases") + "?state=failing", link: "See them" }],
		[now.agents?.lost, "Agents are lost.", `No contact for too long: ${now.agents?.first.filter((each) => each.lost).slice(0, 3).map((each) => `${each.cluster_id}/${each.node_id}`).join(", ")}${now.agents?.lost > 3 ? " and others" : ""}.`, { href: "#agents", link: "Which" }],
		[now.clusters_out?.length, "Whole clusters are out of service.", now.clusters_out?.map((each) => each.cluster_id).join(", "), { href: "#agents", link: "Why" }],
		[now.nodes_unavailable, "Nodes are out of service.", `${count(now.nodes_unavailable)} of ${count(now.nodes)} are cordoned, drained or without contact.`, { href: to("fleet"), link: "Fleet" }],
		[all && total(all, "prometheus_up") === 0, "Prometheus does not answer.", "Policies see old metrics.", operations],
		[of("audit_lost_total") + of("log_lines_dropped_total"), "Logs have gaps.", `${of("audit_lost_total")} entries of the audit log and ${of("log_lines_dropped_total")} log lines are lost.`, operations],
	];
	return found.filter(([is]) => is).map(([, what, text, where]) => ({ what, text, ...where }));
}

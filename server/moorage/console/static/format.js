// Numbers and times as people read them.

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hour12: false });
const counts = new Intl.NumberFormat();

/** @param {number} n */
export const count = (n) => counts.format(n);
/** @param {number} seconds Since the epoch. */
export const time = (seconds) => clock.format(new Date(seconds * 1000));
/** @param {number} seconds Since the epoch. */
export const moment = (seconds) => day.format(new Date(seconds * 1000));

/** @param {number} seconds */
export function span(seconds) {
	if (!isFinite(seconds)) return "–";
	const s = Math.abs(Math.round(seconds));
	if (s < 60) return `${s} s`;
	if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
	if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
	return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A demand in one phrase: "8 GPUs on one node, A100".
 * @param {any} r `resources` */
export function shape(r) {
	if (!r) return "whatever its policy takes";
	const parts = [];
	if (r.gpus) {
		const milli = r.gpu_milli ?? 1000;
		if (milli < 1000) parts.push(`${r.gpus > 1 ? `${r.gpus} × ` : ""}${milli}/1000 of a GPU`);
		else parts.push(`${r.gpus} GPU${r.gpus > 1 ? "s" : ""}`);
	}
	if (r.nodes > 1) parts.push(`on each of ${r.nodes} nodes`);
	else if (r.gpus > 1) parts.push("on one node");
	if (r.models?.length) parts.push(r.models.join(" or "));
	if (r.gpu_memory_mib) parts.push(`${count(r.gpu_memory_mib)} MiB a GPU`);
	if (r.cpu_milli) parts.push(`${r.cpu_milli / 1000} cores`);
	if (r.memory_mib) parts.push(`${count(r.memory_mib)} MiB`);
	if (r.topology) parts.push(`one ${r.topology}`);
	return parts.join(", ") || "nothing";
}

/** @param {any} share */
export const place = (share) =>
	`${share.cluster_id}/${share.node_id}` + (share.gpus?.length ? ` GPU ${share.gpus.join(", ")}` : "") +
	(share.gpus?.length && share.gpu_milli < 1000 ? ` (${share.gpu_milli}/1000)` : "");

/** @param {any[] | undefined} placement */
export const places = (placement) => (placement || []).map(place).join("; ") || "–";

// Numbers and times as people read them; points in time are seconds since the epoch.

const stamp = new Intl.DateTimeFormat("sv", { dateStyle: "short", timeStyle: "medium" }); // 2026-11-28 18:21:12, in every browser.
const counts = new Intl.NumberFormat();

export const count = (n) => counts.format(n);
/** A date and time, in the only form of the console. */
export const when = (seconds) => stamp.format(new Date(seconds * 1000));

/** A time of day for an axis; a date at midnight. */
export function clockTick(seconds) {
	const [date, time] = when(seconds).split(" ");
	return time.startsWith("00:00") ? date.slice(5) : time.slice(0, 5);
}
/** The name of the time zone. */
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

/** GPUs, from thousandths of a GPU. */
export const gpus = (milli) => tenths(milli / 1000);
/** A number with at most one decimal. */
export const tenths = (n) => counts.format(Math.round(n * 10) / 10);
export const percent = (part) => `${(part * 100).toFixed(part > 0.0995 && part < 1 && Math.round(part * 1000) % 10 ? 1 : 0)} %`;
export const duration = (seconds) => (seconds === 0 ? "0" : seconds < 0.00995 ? `${Number((seconds * 1000).toPrecision(2))} ms` : seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : seconds < 10 ? `${seconds.toFixed(1)} s` : span(seconds));
export const some = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
/** The beginning of an id, which is enough to recognise it. */
export const brief = (id) => (id.length > 13 ? `${id.slice(0, 12)}…` : id);

/** A time in its two largest units. */
export function span(seconds) {
	if (!isFinite(seconds)) return "–";
	const s = Math.abs(Math.round(seconds));
	const [large, name, unit, small] = s < 60 ? [1, "s"] : s < 3600 ? [60, "min", 1, "s"] : s < 86400 ? [3600, "h", 60, "min"] : [86400, "d", 3600, "h"];
	const rest = unit ? Math.floor((s % large) / unit) : 0;
	return `${Math.floor(s / large)} ${name}${rest ? ` ${rest} ${small}` : ""}`;
}

/** A demand in one phrase: "8 GPUs on one node, A100".
 * `r`: `resources` */
export function shape(r) {
	if (!r) return "as its policy decides";
	const parts = [];
	if (r.gpus) {
		const milli = r.gpu_milli ?? 1000;
		if (milli < 1000) parts.push(`${r.gpus > 1 ? `${r.gpus} × ` : ""}${milli / 1000} of a GPU`);
		else parts.push(`${r.gpus} GPU${r.gpus > 1 ? "s" : ""}`);
		if (r.models?.length) parts[0] += ` (${r.models.join(" or ")})`;
		if (r.gpu_memory_mib) parts[0] += ` of ${gib(r.gpu_memory_mib)}`;
	}
	const beside = [r.cpu_milli ? `${r.cpu_milli / 1000} ${r.cpu_milli === 1000 ? "core" : "cores"}` : "", r.memory_mib ? gib(r.memory_mib) : ""].filter(Boolean).join(" and ");
	let text = [parts[0], beside].filter(Boolean).join(" with ");
	if (r.nodes > 1) text += ` on each of ${r.nodes} nodes`;
	else if (r.gpus > 1) text += " on one node";
	return (r.topology ? `${text}, in one ${r.topology}` : text) || "nothing";
}

export const gib = (mib) => (mib < 1024 ? `${mib} MiB` : `${tenths(mib / 1024)} GiB`);

export const place = (share) =>
	`${share.cluster_id}/${share.node_id}` + (share.gpus?.length ? ` GPU ${ranges(share.gpus)}` : "") +
	(share.gpus?.length && share.gpu_milli < 1000 ? ` (${share.gpu_milli / 1000} of it)` : "");

/** Ids, with consecutive numbers as "0–7". */
export function ranges(ids) {
	const found = [];
	for (const id of ids) {
		const last = found.at(-1);
		if (last && /^\d+$/.test(id) && Number(id) === Number(last.at(-1)) + 1) last.push(id);
		else found.push([id]);
	}
	return found.map((run) => (run.length > 2 ? `${run[0]}–${run.at(-1)}` : run.join(", "))).join(", ");
}

export const places = (placement) => (placement || []).map(place).join("; ") || "–";

/** How many GPUs are held, in thousandths. */
export const heldMilli = (placement) => (placement || []).reduce((sum, share) => sum + (share.gpus?.length || 0) * (share.gpu_milli ?? 1000), 0);

/** The same as `places`, in one line also for a gang. */
export const placesBrief = (placement) => ((placement || []).length < 3 ? places(placement) : `${placement.length} nodes, from ${placement[0].cluster_id}/${placement[0].node_id} to ${placement.at(-1).node_id}`);
export const until = (at) => span(at - Date.now() / 1000);

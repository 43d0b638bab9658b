// Numbers and times as people read them; points in time are seconds since the epoch.

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hour12: false });
const tickClock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
const tickDay = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
const counts = new Intl.NumberFormat();

export const count = (n) => counts.format(n);
export const time = (seconds) => clock.format(new Date(seconds * 1000));
export const moment = (seconds) => day.format(new Date(seconds * 1000));

/** A time of day for an axis; a date at midnight. */
export function clockTick(seconds) {
	const at = new Date(seconds * 1000);
	return at.getHours() || at.getMinutes() ? tickClock.format(at) : tickDay.format(at);
}
/** A short date and time, without this year. */
export function when(seconds) {
	const at = new Date(seconds * 1000);
	const near = at.getFullYear() === new Date().getFullYear();
	return near ? `${tickDay.format(at)} ${clock.format(at)}` : day.format(at);
}
/** The name of the zone that times are of. */
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

/** GPUs, of thousandths. */
export const gpus = (milli) => tenths(milli / 1000);
/** With one digit behind the point at most. */
export const tenths = (n) => counts.format(Math.round(n * 10) / 10);
/** A part of a whole. */
export const percent = (part) => `${(part * 100).toFixed(part > 0.0995 && part < 1 && Math.round(part * 1000) % 10 ? 1 : 0)} %`;
/** How long something took. */
export const duration = (seconds) => (seconds === 0 ? "0" : seconds < 0.00995 ? `${Number((seconds * 1000).toPrecision(2))} ms` : seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : seconds < 10 ? `${seconds.toFixed(1)} s` : short(seconds));
/** One or more of something. */
export const some = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
/** The beginning of an id, which is enough to know it again. */
export const brief = (id) => (id.length > 13 ? `${id.slice(0, 12)}…` : id);

/** A time in its largest unit, as it fits on an axis. */
function short(s) {
	if (s < 100) return `${Math.round(s)} s`;
	if (s < 5400) return `${Math.round(s / 6) / 10} min`;
	return s < 129600 ? `${Math.round(s / 360) / 10} h` : `${Math.round(s / 8640) / 10} d`;
}

export function span(seconds) {
	if (!isFinite(seconds)) return "–";
	const s = Math.abs(Math.round(seconds));
	if (s < 60) return `${s} s`;
	if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
	if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
	return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A demand in one phrase: "8 GPUs on one node, A100".
 * `r`: `resources` */
export function shape(r) {
	if (!r) return "whatever its policy takes";
	const parts = [];
	if (r.gpus) {
		const milli = r.gpu_milli ?? 1000;
		if (milli < 1000) parts.push(`${r.gpus > 1 ? `${r.gpus} × ` : ""}${milli}/1000 of a GPU`);
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
	(share.gpus?.length && share.gpu_milli < 1000 ? ` (${share.gpu_milli}/1000)` : "");

/** Ids, with what is counted on from one to the next as "0–7". */
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

/** How far a time is from now. */
export const until = (at) => span(at - Date.now() / 1000);

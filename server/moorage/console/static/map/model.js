// The fleet as columns: a snapshot, then numbered deltas.
import { signal } from "../signal.js";
import { listen, pages, revision, watch } from "../socket.js";

/** States of a slot: name, letter of its colour, mark. */
export const STATES = [
	{ name: "free", sign: "f", mark: "" },
	{ name: "held", sign: "h", mark: "" },
	{ name: "busy", sign: "b", mark: "–" },
	{ name: "warm", sign: "w", mark: "/" },
	{ name: "failing", sign: "x", mark: "x" },
	{ name: "cordoned", sign: "c", mark: "\\" },
	{ name: "lost or unavailable", sign: "u", mark: "?" },
];

const CODE = Object.fromEntries(STATES.map((each, at) => [each.name, at]));
const [FREE, HELD, BUSY, , , CORDONED, STALE] = STATES.keys();
const RESYNC_MS = 5000;

/* A fleet: `first[n]` is the first slot of node n, `owner[s]` the node of slot s, `free[n]` its free slots; `milli` is
 * taken; `out[n]` is the state of a node out of service, or 0. */

/** The fleet, or null. */
export const fleet = signal(null);
/** Why there is no map, or null. */
export const refused = signal(null);
/** Grows at most twice a second while slots change, so that views count again. */
export const tick = signal(0);
export const gaps = signal(0);

const painters = new Set();
let ticking = false;

/** Call `painter` with the changed slots; null: all. */
export function onChange(painter) {
	painters.add(painter);
	return () => {
		painters.delete(painter);
	};
}

function tell(changed) {
	for (const painter of painters) painter(changed);
	if (ticking) return;
	ticking = true;
	setTimeout(() => {
		ticking = false;
		tick.value += 1;
	}, 500);
}

let resyncing = 0;
let reading = false;
/** Deltas that arrived while a snapshot was unpacked. */
let pending = [];

/** Follow the map until the returned function is called. */
export function follow() {
	return listen("map", (name, data) => {
		if (name === "snapshot") take(data);
		else if (name === "delta") delta(data);
		else if (name === "missed") resynchronise();
		else if (name === "refused") refused.value = data;
	});
}

async function take(data) {
	reading = true;
	pending = [];
	const columns = await unpacked(data.packed);
	reading = false;
	resyncing = 0;
	refused.value = null;
	fleet.value = read(columns, data);
	revision.value = data.revision;
	tell(null);
	for (const each of pending.splice(0)) delta(each);
}

function delta(data) {
	if (reading) return void pending.push(data);
	if (!fleet.value || resyncing) return;
	const changed = apply(fleet.value, data);
	if (!changed) return resynchronise();
	revision.value = data.revision;
	tell(changed);
}

function resynchronise() {
	if (resyncing && Date.now() - resyncing < RESYNC_MS) return;
	resyncing = Date.now();
	gaps.value += 1;
	watch(["map"]);
	setTimeout(() => resyncing && resynchronise(), RESYNC_MS + 10); // In case that snapshot is lost, too.
}

/** `text`: Base64 of zlib of JSON. */
export async function unpacked(text) {
	const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
	return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

export function read(columns, about) {
	const counts = columns.devices;
	const nodes = counts.length;
	const first = new Uint32Array(nodes + 1);
	for (let n = 0; n < nodes; n++) first[n + 1] = first[n] + counts[n];
	const slots = first[nodes];
	const cluster = new Uint32Array(nodes);
	let from = 0;
	columns.cluster_nodes.forEach((many, c) => {
		cluster.fill(c, from, from + many);
		from += many;
	});
	const it = {
		clusters: columns.clusters, ids: columns.nodes, cluster, first, slots,
		rack: (columns.rack || []).map((r) => (r < 0 ? "" : columns.racks[r])),
		link: columns.link?.length ? Int32Array.from(columns.link) : null,
		models: columns.models, model: Uint16Array.from(columns.model),
		tenants: [...columns.tenants], tenant: Uint32Array.from(columns.tenant),
		ends: Float64Array.from(columns.ends), milli: Uint16Array.from(columns.milli),
		bare: counts.filter((each) => !each).length, codes: columns.states.map((name) => CODE[name] ?? STALE),
		state: new Uint8Array(slots), owner: new Uint32Array(slots), free: new Uint16Array(nodes), out: new Uint8Array(nodes),
		number: about.number, revision: about.revision, at: about.at,
	};
	for (let n = 0; n < nodes; n++) {
		for (let s = first[n]; s < first[n + 1]; s++) {
			it.owner[s] = n;
			it.state[s] = shown(it, columns.state[s], it.tenant[s]);
			if (it.state[s] === FREE) it.free[n] += 1;
			if (it.state[s] >= CORDONED) it.out[n] = it.state[s];
		}
	}
	return it;
}

/** Find nodes out of service whose slots do not show it: all are held, or there are none. */
export async function findOut(it) {
	for await (const { clusters } of pages({ op: "fleet", limit: 1000 })) for (const { cluster_id: cluster, nodes_unavailable: many } of clusters) {
		const at = it.clusters.indexOf(cluster);
		const known = () => it.out.filter((each, n) => each && it.cluster[n] === at).length;
		if (known() < many) for await (const { nodes } of pages({ op: "fleet", cluster, limit: 1000 })) {
			for (const { node_id: node, unavailable: why } of nodes) if (why) it.out[it.ids.findIndex((id, n) => id === node && it.cluster[n] === at)] ||= /^(cordon|drain)ed by /.test(why) ? CORDONED : STALE;
			if (known() >= many) break;
		}
	}
	return it.out;
}
export const nodeName = (it, n) => `${it.clusters[it.cluster[n]]}/${it.ids[n]}`;

/** The shown state: slots of other tenants are busy. */
function shown(it, code, tenant) {
	const state = it.codes[code] ?? STALE;
	return state === HELD && it.tenants[tenant] === "busy" ? BUSY : state;
}

/** Apply a delta in place; null: an earlier delta is missing. */
export function apply(it, data) {
	if (data.number <= it.number) return []; // Older than the snapshot.
	if (data.number !== it.number + 1) return null;
	it.tenants.push(...(data.tenants || []));
	const changed = data.slots;
	for (let at = 0; at < changed.length; at++) {
		const slot = changed[at];
		if (slot >= it.slots) return null;
		const before = it.state[slot];
		const now = shown(it, data.state[at], data.tenant[at]);
		it.state[slot] = now;
		if (now >= CORDONED) it.out[it.owner[slot]] = now;
		it.milli[slot] = data.milli[at];
		it.tenant[slot] = data.tenant[at];
		it.ends[slot] = data.ends[at];
		if (before !== now) it.free[it.owner[slot]] += now === FREE ? 1 : before === FREE ? -1 : 0;
	}
	it.number = data.number;
	it.revision = data.revision;
	it.at = data.at;
	return changed;
}

/** How many slots a range of nodes has, by state. */
export function tally(it, nodes) {
	const found = new Array(STATES.length).fill(0);
	for (const n of nodes) for (let s = it.first[n]; s < it.first[n + 1]; s++) found[it.state[s]] += 1;
	return found;
}

/** The nodes of each cluster, and of each rack in it. */
export function grouped(it) {
	const groups = it.clusters.map(() => new Map());
	for (let n = 0; n < it.ids.length; n++) {
		const racks = groups[it.cluster[n]];
		const rack = it.rack[n] || "";
		const nodes = racks.get(rack);
		if (nodes) nodes.push(n);
		else racks.set(rack, [n]);
	}
	return groups;
}

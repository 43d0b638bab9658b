// Fleet: the map, the tree beside it, the rail of shapes, and one node.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, gib, gpus, percent, ranges, shape, some, span, until, when } from "../format.js";
import { CELLS, Painter, arrange, fitting } from "../map/draw.js";
import { STATES, findOut, fleet, follow, nodeName, onChange, read, refused, tally, tick, unpacked } from "../map/model.js";
import { Tree } from "../map/tree.js";
import { go, to } from "../router.js";
import { useSignal } from "../signal.js";
import { Served, flushWords, holding } from "./leases.js";
import { ask, collect, listen } from "../socket.js";
import { keyed, painted } from "../palette.js";
import { theme } from "../theme.js";
import { Action, Button, Choice, Copies, Empty, Facts, Grid, Id, Loaded, Loading, Place, Raw, Refused, Scroll, Section, State, handle, html, typed, useAsk, useLoaded } from "../ui.js";

const MATCHES_MAX = 8;
const PAST_MINUTES = 60;
/** Number of map changes (at most two a second) after which the open node is read again. */
const LOOKS = 6;

export function Fleet({ rest }) {
	useEffect(follow, []);
	const now = useSignal(fleet);
	const [ago, setAgo] = useState(0);
	const then = useLoaded(async () => ago && past(Date.now() / 1000 - ago * 60), [ago]);
	const it = ago ? then.value : now;
	const out = useLoaded(async () => now && findOut(now), [now]).value;
	const refusal = useSignal(refused);
	const ticks = useSignal(tick);
	const [lit, setLit] = useState(null);
	if (refusal) return html`<${Refused} error=${refusal} />`;
	if (!now) return html`<${Loading} what="the fleet" />`;
	if (!now.ids.length) return html`<${Empty}>There is no node yet. Register a cluster: <code>moorage fleet import</code>.<//>`;
	const scrubber = html`<p class="tools scrubber"><label><span class="hidden">Time</span><span aria-hidden>an hour ago</span> <input type="range" min=${-PAST_MINUTES} max="0" step="5" value=${-ago} aria-valuetext=${ago ? `${ago} minutes ago` : "now"} onChange=${typed((text) => setAgo(-Number(text)))} /> <span aria-hidden>now</span></label>
		<span role="status">${it?.past ? `As it was: ${when(it.past)}` : ago ? "" : "live"}</span> <${Find} it=${now} /></p>`;
	const chosen = it && rest.length > 1 ? it.ids.findIndex((id, n) => id === rest[1] && it.clusters[it.cluster[n]] === rest[0]) : -1;
	const choose = (n) => go(address(it, n));
	return html`<div class="fleet">
			<div class="picture">${it && html`<${Numbers} it=${it} />`}${scrubber}<${Refused} error=${ago ? then.error : null} />
				${it ? html`<${Canvas} it=${it} chosen=${chosen} choose=${choose} lit=${ago ? null : lit} out=${out} />` : then.error ? null : html`<${Loading} what="the fleet of then" />`}</div>
			<div class="beside">
				${ago ? null : chosen >= 0 ? html`<${Node} key=${rest.join("/")} cluster=${rest[0]} node=${rest[1]} />`
					: rest.length ? html`<${Cluster} key=${rest[0]} cluster=${rest[0]} unknown=${rest[1]} />` : null}
				${it && html`<${Out} it=${it} />`}
				${ago ? null : html`<${Shapes} lit=${lit} light=${setLit} it=${it} />`}
				${it && html`<${Section} title="Tree"><${Tree} it=${it} chosen=${chosen} choose=${choose} ticks=${ticks} /><//>`}
				${ago ? null : html`<${Reservations} />`}
			</div>
		</div>`;
}
const address = (it, n) => to("fleet", it.clusters[it.cluster[n]], it.ids[n]);
async function past(at) {
	const then = await ask({ op: "past_fleet", at });
	return { ...read(await unpacked(then.packed), then), past: at };
}

function Reservations() {
	const found = useAsk({ op: "reservations", limit: 100 }, 10000);
	return html`<${Section} title="Reservations" found=${found} what="the reservations">${(it) => html`<${Grid} label="Reservations" empty="No reservation that you may see." most=${8} heads=${["tenant", "nodes", "from", "until", "used"]} rows=${it.reservations.map((each) => [each.tenant,
			each.nodes.map(({ cluster_id: cluster, node_id: node, gpus }) => html`<a href=${to("fleet", cluster, node)}>${cluster}/${node}${gpus && `[${gpus}]`}</a> `), when(each.starts_at), when(each.ends_at), each.used ? "yes" : "no"])} />
			${it.next && html`<p class="note">Only the first 100 are shown.</p>`}<${Raw} value=${it} />`}<//>`;
}

/** The nodes that get no new leases. */
function Out({ it }) {
	const rows = [...it.ids.keys()].filter((n) => it.out[n]);
	return rows.length ? html`<${Section} title="Out of service"><${Grid} label="Out of service" most=${6} heads=${["node", "state"]}
		rows=${rows.map((n) => [html`<a href=${address(it, n)}>${nodeName(it, n)}</a>`, STATES[it.out[n]].name])} /><//>` : null;
}

/** The used and free capacity, and its fragmentation. */
function Numbers({ it }) {
	const none = { nodes: 0, gpus: 0, milli: 0, open: 0, free: 0, partly: 0, empty: 0 };
	const [all, rows] = [{ ...none }, new Map()];
	for (let n = 0; n < it.ids.length; n++) {
		const many = it.first[n + 1] - it.first[n];
		if (!many) continue;
		const name = it.models[it.model[it.first[n]]] || "no model";
		if (!rows.has(name)) rows.set(name, { ...none });
		const free = it.free[n];
		const milli = it.milli.subarray(it.first[n], it.first[n + 1]).reduce((sum, each) => sum + each, 0);
		const more = { nodes: 1, gpus: many, milli, open: it.out[n] ? 0 : many * 1000 - milli, free, partly: free < many ? free : 0, empty: Number(free === many) };
		for (const row of [all, rows.get(name)]) for (const key in more) row[key] += more[key];
	}
	const used = (row) => percent(row.gpus ? row.milli / 1000 / row.gpus : 0);
	return html`<ul class="facts" aria-label="Numbers">
			<li><b>${used(all)}</b> used: ${gpus(all.milli)} of ${some(all.gpus, "GPU")}</li>
			<li><b>${gpus(all.open)}</b> free in whole or part, <b>${count(all.free)}</b> wholly</li>
			<li><b>${count(all.partly)}</b> of those on nodes that are partly taken (fragmentation ${percent(all.free ? all.partly / all.free : 0)})</li>
			${it.bare ? html`<li><b>${some(it.bare, "node")}</b> without GPUs</li>` : null}</ul>
		<details class="by-model" open=${rows.size < 7}><summary>By model</summary><${Scroll} label="By model"><${Grid} label="By model" heads=${["model", "used", "GPUs", "free", "wholly free", "on partly taken nodes", "empty nodes"]}
			rows=${[...rows].sort().map(([name, row]) => [name, used(row), count(row.gpus), gpus(row.open), count(row.free), count(row.partly), `${count(row.empty)} of ${count(row.nodes)}`])} /><//></details>`;
}
function Find({ it }) {
	const [part, setPart] = useState("");
	const wanted = part.trim().toLowerCase();
	const found = wanted ? [...it.ids.keys()].filter((n) => nodeName(it, n).toLowerCase().includes(wanted)) : [];
	const land = handle(() => {
		const exact = found.find((n) => it.ids[n].toLowerCase() === wanted) ?? found[0];
		if (exact === undefined) return;
		go(address(it, exact));
		setPart("");
	});
	return html`<form class="find" role="search" aria-label="Nodes" onSubmit=${land}><label>Find a node <input type="search" value=${part} autocomplete="off" spellcheck="false" onInput=${typed(setPart)} /></label>
		${wanted ? html`<ul>${found.slice(0, MATCHES_MAX).map((n) => html`<li><a href=${address(it, n)} onClick=${() => setPart("")}>${nodeName(it, n)}</a></li>`)}
			<li class="note">${found.length > MATCHES_MAX ? `${count(found.length - MATCHES_MAX)} more` : found.length ? "" : "No node name contains this."}</li></ul>` : null}</form>`;
}

/** The legend of the colours, with counts; unused colours are left out. */
function Legend({ it }) {
	const found = tally(it, it.ids.keys());
	return html`<ul class="legend" aria-label="What the colours mean">${STATES.map((state, at) => (found[at] ? html`<li>
		<span class=${"swatch s-" + state.sign} aria-hidden>${state.mark}</span> ${at ? state.name : "wholly free"} <b>${count(found[at])}</b></li>` : null))}
		${STATES.map((state, at) => {
			const many = it.out.filter((each) => at && each === at).length;
			return many ? html`<li><span class=${"swatch frame s-" + state.sign} aria-hidden></span> ${state.name}: whole node <b>${count(many)}</b></li>` : null;
		})}
		${it.bare ? html`<li><span class="swatch" aria-hidden></span> node without GPUs <b>${count(it.bare)}</b></li>` : null}</ul>`;
}

function Canvas({ it, chosen, choose, lit, out }) {
	const canvas = useRef(null);
	const painter = useRef(null);
	const [cell, setCell] = useState(0); // 0: whatever shows all.
	const [by, setBy] = useState("state");
	const [under, setUnder] = useState("");
	const [size, setSize] = useState([0, 0]);

	useEffect(() => {
		const element = canvas.current;
		const made = new Painter(element);
		painter.current = made;
		element.painter = made; // Where tests read frame times.
		const observer = new ResizeObserver(() => setSize([element.clientWidth, element.clientHeight]));
		observer.observe(element);
		const wheel = (event) => {
			if (event.ctrlKey || !made.layout || made.layout.height <= element.height) return;
			event.preventDefault();
			scroll(made, event.deltaY);
		};
		element.addEventListener("wheel", wheel, { passive: false });
		const stop = onChange((changed) => (changed && made.fleet === fleet.value ? made.some(changed) : null));
		return () => {
			stop();
			observer.disconnect();
			element.removeEventListener("wheel", wheel);
			cancelAnimationFrame(made.frame);
		};
	}, []);
	const scheme = useSignal(theme);
	useEffect(() => {
		const made = painter.current;
		const element = canvas.current;
		const [width, height] = size;
		if (!width || !height) return;
		if (element.width !== width || element.height !== height) {
			element.width = width;
			element.height = height;
		}
		colours(made);
		made.chosen = chosen;
		made.lit = lit?.nodes || null;
		made.colour = by === "state" ? null : coloured(it, by, made);
		made.show(it, cell ? arrange(it, width, cell) : fitting(it, width, height));
		made.reach(chosen);
	}, [it, out, size[0], size[1], cell, by, chosen, lit, scheme]);

	const zoom = (by) => {
		const now = painter.current?.layout?.cell || 1;
		const next = by > 0 ? CELLS.filter((each) => each > now).pop() : CELLS.find((each) => each < now);
		if (next) setCell(next);
	};
	const hover = (event) => {
		const found = painter.current?.at(event.offsetX, event.offsetY);
		setUnder(found ? described(it, found) : "");
	};
	const press = (event) => {
		const made = painter.current;
		const done = { "+": () => zoom(1), "-": () => zoom(-1), 0: () => setCell(0), ArrowDown: () => scroll(made, 80), ArrowUp: () => scroll(made, -80) }[event.key];
		if (!done) return;
		event.preventDefault();
		done();
	};
	const total = `${count(it.slots)} GPUs on ${count(it.ids.length)} nodes of ${count(it.clusters.length)} clusters`;
	return html`
		<p class="tools">
			<span>${total}</span>
			<${Choice} label="Colour by" value=${by} set=${setBy} options=${["state", "model", "tenant", ["end", "end time"]]} />
			<${Button} onClick=${() => zoom(1)}>Zoom in<//><${Button} onClick=${() => zoom(-1)}>Zoom out<//>
			<${Button} onClick=${() => setCell(0)}>All<//>
		</p>
		${by === "state" ? html`<${Legend} it=${it} />` : html`<ul class="legend" aria-label=${"Colours by " + by}>${names(it, by).slice(0, 40).map(([name, key]) => html`<li><span class=${"swatch " + key} aria-hidden></span> ${name}</li>`)}
			${by === "model" ? null : html`<li><span class="swatch s-f" aria-hidden></span> free</li>`}</ul>`}
		<canvas ref=${canvas} role="img" tabindex="0" aria-label=${`Map of the fleet: ${total}. The tree beside it has the same in words. + and - zoom, arrows scroll.`}
			onMouseMove=${hover} onMouseLeave=${() => setUnder("")} onKeyDown=${press}
			onClick=${(e) => {
				const found = painter.current?.at(e.offsetX, e.offsetY);
				if (found) choose(found.node);
			}}></canvas>
		<p class="under">${under || " "}</p>`;
}

const ENDS = [["within 10 minutes", 600], ["within an hour", 3600], ["within a day", 86400], ["later", Infinity]];

/** Names and colours, if not coloured by state. */
function names(it, by) {
	if (by === "end") return ENDS.map(([name], at) => [String(name), `e${at}`]);
	const all = by === "tenant" ? it.tenants.filter(Boolean) : it.models.map((each) => each || "no model");
	return [...keyed(all)];
}
function coloured(it, by, made) {
	const keys = names(it, by);
	const paint = painted(keys.map(([, key]) => key));
	if (by === "end") return (slot) => (it.ends[slot] ? paint.get(`e${ENDS.findIndex(([, most]) => it.ends[slot] - (it.past || Date.now() / 1000) < Number(most))}`) : made.colours[it.state[slot] ? 6 : 0]);
	const of = new Map(keys);
	const hues = (by === "model" ? it.models.map((each) => each || "no model") : it.tenants).map((each) => paint.get(of.get(each)) || made.colours[0]);
	if (by === "model") return (slot) => hues[it.model[slot]];
	return (slot) => hues[it.tenant[slot]] || made.colours[0]; // A new tenant may appear meanwhile.
}

function scroll(made, by) {
	if (!made.layout) return;
	made.top = Math.max(0, Math.min(made.top + Math.round(by), Math.max(0, made.layout.height - made.canvas.height)));
	made.all();
}

function described(it, { node, slot }) {
	const where = `${nodeName(it, node)}${it.out[node] ? ` (${STATES[it.out[node]].name})` : ""}`;
	const slots = it.first[node + 1] - it.first[node];
	if (slot < 0) return slots ? `${where}: ${it.free[node]} of ${slots} free` : `${where}: a node without GPUs`;
	const whose = it.tenants[it.tenant[slot]];
	const end = it.ends[slot] ? `, ends in ${span(it.ends[slot] - (it.past || Date.now() / 1000))}` : "";
	return `${where} GPU ${slot - it.first[node]}: ${STATES[it.state[slot]].name}${whose ? `, ${whose}` : ""}${end}, ${(1000 - it.milli[slot]) / 1000} free, ${it.models[it.model[slot]] || "no model"}`;
}
function colours(made) {
	const paint = painted(STATES.map((state) => `s-${state.sign}`));
	made.colours = STATES.map((state) => paint.get(`s-${state.sign}`));
	({ backgroundColor: made.ground, color: made.text } = getComputedStyle(document.body));
}

/** The most frequent demands: how often each fits now, and would fit. */
function Shapes({ it, lit, light }) {
	const [shapes, setShapes] = useState(null);
	const [error, setError] = useState(null);
	useEffect(() => listen("shapes", (name, data) => {
		if (name === "shapes") setShapes(data.shapes);
		else if (name === "refused") setError(data);
	}), []);
	const press = (each) => {
		if (lit?.key === key(each)) return light(null);
		const wanted = new Set(each.where.map(([cluster, node]) => `${cluster}/${node}`));
		light({ key: key(each), nodes: Uint8Array.from(it.ids, (_, n) => Number(wanted.has(nodeName(it, n)))) });
	};
	return html`<${Section} title="Shapes">
		<${Refused} error=${error} />
		${!shapes ? (error ? null : html`<${Loading} what="the shapes" />`) : !shapes.length ? html`<${Empty}>There was no request yet.<//>`
			: html`<p class="note">The most frequent requests, and how often each fits now. Stranded: free GPUs of its model that it cannot use, since one node has too few of them, or too little CPU or memory.</p><ul class="shapes">${shapes.map((each) => html`<li key=${key(each)}>
				<${Button} aria-pressed=${String(lit?.key === key(each))} onClick=${() => press(each)}>
					<b>${shape(each.resources)}</b>
					<span>fits <b>${count(each.fits)}</b> ${each.fits === 1 ? "time" : "times"}, ${count(each.defragmented)} if defragmented; ${some(each.stranded, "GPU")} stranded</span><//>
				${each.stranded_on?.length ? html`<span class="note">most on ${each.stranded_on.map(([cluster, node, free], at) => html`${at ? ", " : ""}<${Place} cluster_id=${cluster} node_id=${node} /> (${count(free)})`)}</span>` : null}</li>`)}</ul>`}
	<//>`;
}

const key = (each) => JSON.stringify(each.resources);
function Cordons({ cluster, node = "", out, done }) {
	const where = node ? `${cluster}/${node}` : cluster;
	const message = { cluster, ...(node ? { node } : {}) };
	const one = (op, label) => html`<${Action} key=${op} label=${label} title=${`${label} ${where}`} done=${done} right="cordon" destroys=${op === "drain"} say=${() => html`<${Leaving} op=${op} where=${where} at=${message} />`}
		message=${{ op, ...message }} words=${["fleet", op, where]} />`;
	return html`<p class="buttons">${out ? one("uncordon", "Uncordon") : [one("cordon", "Cordon"), one("drain", "Drain")]}
		${node ? null : html`<${Action} label="Flush warm leases" title=${`Flush ${cluster}`} right="lease" destroys say=${flushWords} done=${done} message=${{ op: "flush", cluster }} words=${["flush", "--cluster", cluster]} />`}</p>`;
}

const BECOMES = { stays: "stays until it ends", moves: "moves to another node, where its workload starts again", waits: "waits for another place, its workload stops", ends: "ends at once" };

/** Predict the effects of a change; the server answers one what-if per tenant at a time. */
const foresee = (change) => ask({ op: "whatif", change }).catch((error) => (error.code === "busy" ? new Promise((done) => setTimeout(done, 1000)).then(() => foresee(change)) : Promise.reject(error)));

/** The effects of a cordon, a drain or their end: on which leases, until when, and what then fits. */
function Leaving({ op, where, at }) {
	const held = useLoaded(() => collect({ op: "leases", cluster: at.cluster, filters: at.node ? { node_id: at.node } : {}, sort: "expires_at" }, "leases"), []);
	const then = useLoaded(() => foresee({ [op]: [at] }), []);
	return html`<p>${op === "uncordon" ? `Requests may be placed on ${where} again.` : `${where} gets no new leases${op === "drain" ? ", and its leases leave it" : ""}.`}</p>
		<${Loaded} found=${held} what="its leases">${(leases) => html`<p>${leases.length ? html`<b>${some(leases.length, "lease")}</b> with ${holding(leases)} and ${some(leases.filter((each) => each.workload).length, "workload")}: ${Object.entries(Object.groupBy(leases, (each) => each.tenant || "kept warm")).map(([name, all]) => `${count(all.length)} of ${name}`).join(", ")}. Leases that stay may be renewed; otherwise, the first ends in ${until(leases[0].expires_at)}, the last in ${until(leases.at(-1).expires_at)}, ${when(leases.at(-1).expires_at)}.` : "No lease is there."}</p>`}<//>
		<${Loaded} found=${then} what="the effects on them, and the requests that then fit">${({ drained, granted, others }) => html`<ul>${Object.entries(Object.groupBy(drained, (each) => each.becomes)).map(([name, all]) => html`<li><b>${count(all.length)} ×</b> ${BECOMES[name]}</li>`)}${others.drained && html`<li>${count(others.drained)} more</li>`}</ul>
			<p><${Served} ids=${granted.map((each) => each.request)} /></p>`}<//>
		${op === "drain" && html`<p>Uncordon undoes it, except for leases that have moved or ended by then.</p>`}`;
}

function Node({ cluster, node }) {
	const ticks = Math.floor(useSignal(tick) / LOOKS); // Each read sends requests to the server.
	const about = useAsk({ op: "fleet", cluster, filters: { node_id: node }, limit: 1 }, 0, ticks);
	const leases = useAsk({ op: "leases", cluster, filters: { node_id: node }, sort: "expires_at", limit: 100 }, 0, ticks);
	return html`<${Section} title=${`${cluster}/${node}`}><${Loaded} found=${about} what=${node}>${({ nodes: [row] }) => (row ? html`<${Facts} pairs=${[
			["models", row.models.join(", ")],
			["GPUs", [...new Set(Object.values(row.gpus))].map((free) => `${ranges(Object.keys(row.gpus).filter((id) => row.gpus[id] === free))}: ${free ? `${free / 1000} free` : "taken"}`).join("; ") || "none"],
			["cores free", `${row.cpu_milli_free / 1000} of ${row.cpu_milli_total / 1000}`],
			["memory free", `${gib(row.memory_mib_free)} of ${gib(row.memory_mib_total)}`],
			["out of service", row.unavailable],
			["same machine as", row.duplicate_of],
		]} />
		<${Cordons} cluster=${cluster} node=${node} out=${!!row.unavailable} done=${about.again} />
		<h3>Leases here</h3>
		<${Loaded} found=${leases} what="its leases">${({ leases: all }) => html`<${Grid} label="Leases here" empty="No lease that you may see." most=${8} heads=${["lease", "tenant", "state", "GPUs", "ends in"]} rows=${all.map((each) => [html`<${Id} of=${each.id} />`,
			each.tenant || "kept warm", html`<${State} state=${each.state} />`, ranges(each.placement.find((share) => share.node_id === node)?.gpus || []) || "none", until(each.expires_at)])} />`}<//>
		<${Copies} words=${["fleet", cluster]} value=${row} />` : null)}<//><//>`;
}

function Cluster({ cluster, unknown }) {
	const about = useAsk({ op: "fleet", filters: { cluster_id: cluster }, limit: 1 });
	return html`<${Loaded} found=${about} what=${cluster}>${({ clusters: [row] }) => (!row || unknown ? html`<${Empty}>There is no ${unknown ? `node ${unknown} in ` : "cluster "}${cluster}. <a href=${to("fleet")}>The whole fleet</a>.<//>` : html`<${Section} title=${cluster}>
		<${Facts} pairs=${[["owner", row.owner], ["nodes", count(row.nodes)], ["out of service", count(row.nodes_unavailable)], ["GPUs", count(row.gpus)],
			["free", `${count(row.gpu_milli_free / 1000)} GPUs, ${count(row.cpu_milli_free / 1000)} cores, ${gib(row.memory_mib_free)}`]]} />
		<${Cordons} cluster=${cluster} out=${row.nodes > 0 && row.nodes === row.nodes_unavailable} done=${about.again} />
		<${Copies} words=${["fleet", cluster]} value=${row} /><//>`)}<//>`;
}

// Fleet: the map, the tree beside it, the rail of shapes, and one node.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, moment, places, shape, span } from "../format.js";
import { CELLS, Painter, arrange, fitting } from "../map/draw.js";
import { STATES, fleet, follow, onChange, read, refused, tally, tick, unpacked } from "../map/model.js";
import { Tree } from "../map/tree.js";
import { go, to } from "../router.js";
import { session } from "../session.js";
import { useSignal } from "../signal.js";
import { ask, listen } from "../socket.js";
import { Action, Copies, Empty, Facts, Grid, Loaded, Loading, Raw, Refused, Section, State, html, typed, useEvery, useLoaded } from "../ui.js";

const MODEL_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

export function Fleet({ rest }) {
	useEffect(follow, []);
	const now = useSignal(fleet);
	const [ago, setAgo] = useState(0);
	const then = useLoaded(async () => ago && past(Date.now() / 1000 - ago * 60), [ago]);
	const it = ago ? then.value : now;
	const refusal = useSignal(refused);
	const ticks = useSignal(tick);
	const [lit, setLit] = useState(null);
	if (refusal) return html`<${Refused} error=${refusal} />`;
	if (!now) return html`<${Loading} what="the fleet" />`;
	if (!now.ids.length) return html`<${Empty}>There is no node yet. Register a cluster: <code>moorage fleet import</code>.<//>`;
	const scrubber = html`<p class="tools"><label>Minutes ago <input type="range" min="0" max="60" step="5" value=${ago} onChange=${typed((text) => setAgo(Number(text)))} /></label>
		<span role="status">${it?.past ? `As it was: ${moment(it.past)}` : ago ? "" : "now"}</span></p>`;
	if (!it) return html`${scrubber}${then.error ? html`<${Refused} error=${then.error} />` : html`<${Loading} what="the fleet of then" />`}`;
	const chosen = rest.length > 1 ? it.ids.findIndex((id, n) => id === rest[1] && it.clusters[it.cluster[n]] === rest[0]) : -1;
	const choose = (n) => go(to("fleet", it.clusters[it.cluster[n]], it.ids[n]));
	return html`${scrubber}${ago ? html`<${Refused} error=${then.error} />` : null}
		<div class="fleet">
			<div class="picture"><${Legend} it=${it} /><${Canvas} it=${it} chosen=${chosen} choose=${choose} lit=${ago ? null : lit} /></div>
			<div class="beside">
				${ago ? null : html`<${Shapes} lit=${lit} light=${setLit} it=${it} />`}
				<${Section} title="Tree"><${Tree} it=${it} chosen=${chosen} choose=${choose} ticks=${ticks} /><//>
				${ago ? null : chosen >= 0 ? html`<${Node} key=${rest.join("/")} cluster=${rest[0]} node=${rest[1]} />`
					: rest.length ? html`<${Place} key=${rest[0]} cluster=${rest[0]} unknown=${rest[1]} />` : null}
				${ago ? null : html`<${Reservations} />`}
			</div>
		</div>`;
}

/** The fleet at a time. @param {number} at */
async function past(at) {
	const then = await ask({ op: "past_fleet", at });
	return { ...read(await unpacked(then.packed), then), past: at };
}

function Reservations() {
	const found = useLoaded(() => ask({ op: "reservations", limit: 100 }), []);
	useEvery(found.again, 10000, []);
	return html`<${Section} title="Reservations"><${Loaded} found=${found} what="the reservations">${(it) => (!it.reservations.length ? html`<${Empty}>None that you may see.<//>`
		: html`<${Grid} label="Reservations" heads=${["tenant", "nodes", "from", "until", "used"]} rows=${it.reservations.map((each) => [each.tenant,
			each.nodes.map(({ cluster_id: cluster, node_id: node, gpus }) => html`<a href=${to("fleet", cluster, node)}>${cluster}/${node}${gpus && `[${gpus}]`}</a> `), moment(each.starts_at), moment(each.ends_at), each.used ? "yes" : "no"])} />
			${it.next ? html`<p class="note">The first 100.</p>` : null}<${Raw} value=${it} />`)}<//><//>`;
}

/** What the colours mean, with counts. The colours of the canvas are read from here. */
function Legend({ it }) {
	const found = tally(it, it.ids.keys());
	return html`<ul class="legend" aria-label="What the colours mean">${STATES.map((state, at) => html`<li class=${found[at] ? "" : "none"}>
		<span class=${"swatch s-" + state.sign} aria-hidden="true">${state.mark}</span> ${state.name} <b>${count(found[at])}</b></li>`)}</ul>`;
}

function Canvas({ it, chosen, choose, lit }) {
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
		const theme = () => {
			colours(made);
			made.all();
		};
		const queries = ["(prefers-color-scheme: dark)", "(forced-colors: active)"].map((each) => matchMedia(each));
		for (const query of queries) query.addEventListener("change", theme);
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
			for (const query of queries) query.removeEventListener("change", theme);
			cancelAnimationFrame(made.frame);
		};
	}, []);
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
		made.show(it, cell ? arrange(it, width, cell, false) : fitting(it, width, height));
	}, [it, size[0], size[1], cell, by, chosen, lit]);

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
		if (event.key === "+") zoom(1);
		else if (event.key === "-") zoom(-1);
		else if (event.key === "0") setCell(0);
		else if (event.key === "ArrowDown") scroll(made, 80);
		else if (event.key === "ArrowUp") scroll(made, -80);
		else return;
		event.preventDefault();
	};
	const total = `${count(it.slots)} GPUs on ${count(it.ids.length)} nodes of ${count(it.clusters.length)} clusters`;
	return html`
		<p class="tools">
			<span>${total}</span>
			<label>Colour by <select value=${by} onChange=${typed(setBy)}><option value="state">state</option><option value="model">model</option><option value="tenant">tenant</option><option value="end">end time</option></select></label>
			<button type="button" onClick=${() => zoom(1)}>Zoom in</button><button type="button" onClick=${() => zoom(-1)}>Zoom out</button>
			<button type="button" onClick=${() => setCell(0)}>All</button>
		</p>
		${by === "state" ? null : html`<ul class="legend" aria-label=${"Colours by " + by}>${names(it, by).map(([name, colour]) => html`<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" fill=${colour} /></svg> ${name}</li>`)}</ul>`}
		<canvas ref=${canvas} role="img" tabindex="0" aria-label=${`Map of the fleet: ${total}. The tree beside it has the same in words. + and - zoom, arrows scroll.`}
			onMouseMove=${hover} onMouseLeave=${() => setUnder("")} onKeyDown=${press}
			onClick=${(e) => {
				const found = painter.current?.at(e.offsetX, e.offsetY);
				if (found) choose(found.node);
			}}></canvas>
		<p class="under">${under || " "}</p>`;
}

const ENDS = [["within 10 minutes", 600], ["within an hour", 3600], ["within a day", 86400], ["later", Infinity]];

/** Names and colours of what is not coloured by state. @param {any} it @param {string} by @returns {[string, string][]} */
function names(it, by) {
	const all = by === "end" ? ENDS.map(([name]) => String(name)) : by === "tenant" ? it.tenants.filter(Boolean) : it.models.map((each) => each || "no model");
	return all.slice(0, 40).map((name, at) => [name, MODEL_COLOURS[at % MODEL_COLOURS.length]]);
}

/** The colour of a slot by model, tenant or end. @param {any} it @param {string} by @param {Painter} made */
function coloured(it, by, made) {
	const rgb = MODEL_COLOURS.map((each) => `rgb(${[1, 3, 5].map((at) => parseInt(each.slice(at, at + 2), 16)).join(", ")})`);
	const colour = (at) => rgb[at % rgb.length];
	if (by === "model") return (slot) => colour(it.model[slot]);
	if (by === "tenant") return (slot) => (it.tenant[slot] ? colour(it.tenant[slot] - 1) : made.colours[0]);
	return (slot) => {
		if (!it.ends[slot]) return made.colours[it.state[slot] ? 6 : 0];
		const left = it.ends[slot] - (it.past || Date.now() / 1000);
		return colour(ENDS.findIndex(([, most]) => left < Number(most)));
	};
}

/** @param {Painter} made @param {number} by */
function scroll(made, by) {
	if (!made.layout) return;
	made.top = Math.max(0, Math.min(made.top + Math.round(by), Math.max(0, made.layout.height - made.canvas.height)));
	made.all();
}

/** @param {any} it @param {{node: number, slot: number}} found */
function described(it, { node, slot }) {
	const where = `${it.clusters[it.cluster[node]]}/${it.ids[node]}`;
	if (slot < 0) return `${where}: ${it.free[node]} of ${it.first[node + 1] - it.first[node]} free`;
	const whose = it.tenants[it.tenant[slot]];
	const end = it.ends[slot] ? `, ends in ${span(it.ends[slot] - (it.past || Date.now() / 1000))}` : "";
	return `${where} GPU ${slot - it.first[node]}: ${STATES[it.state[slot]].name}${whose ? `, ${whose}` : ""}${end}, ${1000 - it.milli[slot]}/1000 free, ${it.models[it.model[slot]] || "no model"}`;
}

/** Take the theme's colours, as the legend has them. @param {Painter} made */
function colours(made) {
	const of = (element, what) => (element ? getComputedStyle(element)[what] : "rgb(128, 128, 128)");
	made.colours = STATES.map((state) => of(document.querySelector(`.swatch.s-${state.sign}`), "backgroundColor"));
	made.ground = of(document.body, "backgroundColor");
	made.text = of(document.body, "color");
}

/** The most asked demands: what fits now, what would. */
function Shapes({ it, lit, light }) {
	const [shapes, setShapes] = useState(null);
	const [error, setError] = useState(null);
	useEffect(() => listen("shapes", (name, data) => {
		if (name === "shapes") setShapes(data.shapes);
		else if (name === "refused") setError(data);
	}), []);
	const press = (each) => {
		if (lit?.key === key(each)) return light(null);
		const wanted = new Set(each.where.map(([cluster, node]) => `${cluster}\n${node}`));
		light({ key: key(each), nodes: Uint8Array.from(it.ids, (id, n) => Number(wanted.has(`${it.clusters[it.cluster[n]]}\n${id}`))) });
	};
	return html`<${Section} title="Shapes">
		<${Refused} error=${error} />
		${!shapes ? (error ? null : html`<${Loading} what="the shapes" />`) : !shapes.length ? html`<${Empty}>There was no request yet.<//>`
			: html`<ul class="shapes">${shapes.map((each) => html`<li key=${key(each)}>
				<button type="button" aria-pressed=${lit?.key === key(each) ? "true" : "false"} onClick=${() => press(each)}>
					<b>${shape(each.resources)}</b>
					<span>fits ${count(each.fits)} times, ${count(each.defragmented)} if defragmented, ${count(each.stranded)} GPUs stranded</span></button></li>`)}</ul>`}
	<//>`;
}

const key = (each) => JSON.stringify(each.resources);

/** What can be done with a node or cluster. */
function Cordons({ cluster, node = "", out, done }) {
	const where = node ? `${cluster}/${node}` : cluster;
	const message = { cluster, ...(node ? { node } : {}) };
	const one = (op, label) => html`<${Action} key=${op} label=${label} title=${`${label} ${where}`} done=${done}
		message=${{ op, ...message }} words=${["moorage", "fleet", op, where]} />`;
	return html`<p class="buttons">${!session.value?.operator ? null : out ? one("uncordon", "Uncordon") : [one("cordon", "Cordon"), one("drain", "Drain")]}
		${node ? null : html`<${Action} label="Flush warm leases" title=${`Flush ${cluster}`} done=${done} message=${{ op: "flush", cluster }} words=${["moorage", "flush", "--cluster", cluster]} />`}</p>`;
}

function Node({ cluster, node }) {
	const ticks = useSignal(tick);
	const about = useLoaded(() => ask({ op: "fleet", cluster, filters: { node_id: node }, limit: 1 }), [cluster, node, ticks]);
	const leases = useLoaded(() => ask({ op: "leases", cluster, filters: { node_id: node }, limit: 100 }), [cluster, node, ticks]);
	return html`<${Section} title=${`${cluster}/${node}`}><${Loaded} found=${about} what=${node}>${({ nodes: [row] }) => (row ? html`<${Facts} pairs=${[
			["models", row.models.join(", ")],
			["GPUs", [...new Set(Object.values(row.gpus))].map((free) => `${Object.keys(row.gpus).filter((id) => row.gpus[id] === free).join(", ")}: ${free ? `${free}/1000 free` : "taken"}`).join("; ") || "none"],
			["cores free", `${row.cpu_milli_free / 1000} of ${row.cpu_milli_total / 1000}`],
			["memory free", `${count(row.memory_mib_free)} of ${count(row.memory_mib_total)} MiB`],
			["out of service", row.unavailable],
			["same machine as", row.duplicate_of],
		]} />
		<${Cordons} cluster=${cluster} node=${node} out=${!!row.unavailable} done=${about.again} />
		<h3>Leases here</h3>
		<${Loaded} found=${leases} what="its leases">${({ leases: all }) => (!all.length ? html`<${Empty}>You hold nothing here.<//>`
			: html`<ul>${all.map((each) => html`<li key=${each.id}><a href=${to("leases", each.id)}>${each.id}</a> <${State} state=${each.state} /> ${places(each.placement)},
				ends in ${span(each.expires_at - Date.now() / 1000)}</li>`)}</ul>`)}<//>
		<${Copies} words=${["moorage", "fleet", cluster]} value=${row} />` : null)}<//><//>`;
}

function Place({ cluster, unknown }) {
	const about = useLoaded(() => ask({ op: "fleet", filters: { cluster_id: cluster }, limit: 1 }), [cluster]);
	return html`<${Loaded} found=${about} what=${cluster}>${({ clusters: [row] }) => (!row || unknown ? html`<${Empty}>There is no ${unknown ? `node ${unknown} in ` : "cluster "}${cluster}. <a href=${to("fleet")}>The whole fleet</a>.<//>` : html`<${Section} title=${cluster}>
		<${Facts} pairs=${[["nodes", count(row.nodes)], ["out of service", count(row.nodes_unavailable)], ["GPUs", count(row.gpus)],
			["free", `${count(row.gpu_milli_free / 1000)} GPUs, ${count(row.cpu_milli_free / 1000)} cores, ${count(row.memory_mib_free)} MiB`]]} />
		<${Cordons} cluster=${cluster} out=${row.nodes > 0 && row.nodes === row.nodes_unavailable} done=${about.again} />
		<${Copies} words=${["moorage", "fleet", cluster]} value=${row} /><//>`)}<//>`;
}

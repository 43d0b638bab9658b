// Draws the fleet on a 2-D canvas: a square for each slot, only what changed; one pixel for each slot
// when zoomed out. No page element stands for a slot.
import { STATES, grouped } from "./model.js";

const LABEL = 16; // Height of a cluster's or rack's name.
const BLOCK = 8; // Approximate number of nodes in a column of a rack.
export const CELLS = [24, 18, 14, 11, 9, 7, 5, 4, 3, 2, 1];
const SQUARES = 4; // Cells of at least this size are squares with gaps; smaller ones are pixels.

/** The position of each node; drawn as squares, the nodes of a rack form a block. */
export function arrange(it, width, cell) {
	const x = new Int32Array(it.ids.length);
	const y = new Int32Array(it.ids.length);
	const gap = cell >= SQUARES ? Math.ceil(cell / 3) : 0;
	const line = cell + gap;
	const named = cell > 1 && it.clusters.length <= 200;
	const labels = [];
	let cx = 0;
	let cy = 0;
	let tall = 0; // Height of the present row.
	const next = () => {
		cy += tall;
		cx = tall = 0;
	};
	const place = (block, rack) => {
		let wide = 0;
		for (const n of block) wide = Math.max(wide, Math.min(Math.max(1, it.first[n + 1] - it.first[n]) * cell, width));
		wide += gap;
		const columns = Math.min(Math.ceil(block.length / BLOCK), Math.floor(width / wide) || 1);
		const rows = Math.ceil(block.length / columns);
		const all = Math.max(columns * wide, rack ? LABEL * 2 : 0);
		if (cx && cx + all - gap > width) next();
		const top = rack && cell > 5 ? LABEL : 0;
		const letters = Math.floor(all / 7);
		if (top) labels.push({ text: rack.length > letters ? `…${rack.slice(1 - letters)}` : rack, x: cx, y: cy });
		block.forEach((n, at) => {
			x[n] = cx + Math.floor(at / rows) * wide;
			y[n] = cy + top + (at % rows) * line;
		});
		cx += all + (rack ? gap : 0);
		tall = Math.max(tall, top + rows * line + (rack ? gap : 0));
	};
	const enter = (cluster) => {
		next();
		if (!named) return;
		if (cluster) cy += gap;
		labels.push({ text: it.clusters[cluster], x: 0, y: cy });
		cy += LABEL;
	};
	if (gap) grouped(it).forEach((racks, cluster) => {
		if (racks.size) enter(cluster);
		for (const [rack, nodes] of racks) if (rack) place(nodes, rack);
		else for (const n of nodes) place([n], "");
	});
	else for (let n = 0; n < x.length; n++) {
		if (!n || it.cluster[n] !== it.cluster[n - 1]) enter(it.cluster[n]);
		place([n], "");
	}
	return { cell, x, y, height: cy + (tall || line), labels };
}

/** The layout with the largest cells that fits. */
export function fitting(it, width, height) {
	const area = width * height;
	for (const cell of CELLS) {
		if (it.slots * cell * cell > area) continue;
		const layout = arrange(it, width, cell);
		if (layout.height <= height) return layout;
	}
	return arrange(it, width, 1);
}

/** A colour like "rgb(1, 2, 3)" as ImageData has it. */
function packed(css) {
	const [r, g, b] = (css.match(/[\d.]+/g) || ["0", "0", "0"]).map(Number);
	return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** A mix of a quarter of one colour and three quarters of another. */
const mixed = (one, other) => (((one >>> 2) & 0x3f3f3f3f) + (other & 0xfcfcfcfc) - ((other >>> 2) & 0x3f3f3f3f)) | 0xff000000;

export class Painter {
	fleet = null;
	layout = null;
	top = 0;
	colours = STATES.map(() => "rgb(128, 128, 128)");
	ground = "rgb(255, 255, 255)";
	text = "rgb(0, 0, 0)";
	/** Returns the colour of a slot; null: colour by state. */
	colour = null;
	/** Highlighted nodes; null: all. */
	lit = null;
	chosen = -1;
	dirty = null;
	frame = 0;
	times = [];
	image = null;

	constructor(canvas) {
		this.canvas = canvas;
		this.context = canvas.getContext("2d", { alpha: false });
	}

	/** Show another fleet, or another layout. */
	show(fleet, layout) {
		this.fleet = fleet;
		this.layout = layout;
		this.top = Math.max(0, Math.min(this.top, layout.height - this.canvas.height));
		this.all();
	}

	all() {
		this.dirty = null;
		this.later();
	}

	some(slots) {
		if (this.frame && this.dirty === null) return; // Everything is drawn anyway.
		this.dirty ||= new Set();
		for (const slot of slots) this.dirty.add(slot);
		this.later();
	}

	later() {
		if (this.frame) return;
		this.frame = requestAnimationFrame(() => {
			this.frame = 0;
			const before = performance.now();
			this.draw();
			this.times.push(performance.now() - before);
			if (this.times.length === 1) performance.mark("fleet drawn");
			if (this.times.length > 600) this.times.shift();
		});
	}

	draw() {
		const { fleet, layout, dirty } = this;
		if (!fleet || !layout) return;
		this.dirty = new Set();
		if (layout.cell < SQUARES) this.pixels(dirty);
		else if (dirty === null) this.squares();
		else for (const slot of dirty) this.square(slot);
	}

	squares() {
		const { fleet, layout, context, canvas } = this;
		context.fillStyle = this.ground;
		context.fillRect(0, 0, canvas.width, canvas.height);
		this.names();
		for (let n = 0; n < fleet.ids.length; n++) {
			const y = layout.y[n] - this.top;
			if (y < -layout.cell || y > canvas.height) continue;
			for (let s = fleet.first[n]; s < fleet.first[n + 1]; s++) this.square(s);
			if (fleet.first[n] === fleet.first[n + 1]) this.bare(n);
			if (fleet.out[n] && !this.colour) this.enclose(n);
			if (n === this.chosen) this.outline(n);
		}
	}

	/** `high`: Only names between these lines. */
	names(low = -LABEL, high = this.canvas.height) {
		const { context } = this;
		context.fillStyle = this.text;
		context.font = "12px system-ui, sans-serif";
		for (const { text, x, y } of this.layout.labels) {
			const top = y - this.top;
			if (top + LABEL > low && top < high) context.fillText(text, x, top + 12);
		}
	}
	bare(n) {
		const { context, layout } = this;
		context.globalAlpha = this.lit && !this.lit[n] ? 0.25 : 1;
		context.strokeStyle = this.colours[2];
		context.lineWidth = 1;
		context.strokeRect(layout.x[n] + 0.5, layout.y[n] - this.top + 0.5, layout.cell - 2, layout.cell - 2);
		context.globalAlpha = 1;
	}
	reach(n) {
		const { layout, canvas } = this;
		if (n < 0 || !layout || (layout.y[n] >= this.top && layout.y[n] + layout.cell <= this.top + canvas.height)) return;
		this.top = Math.max(0, Math.min(layout.y[n] - canvas.height / 2, layout.height - canvas.height)) | 0;
		this.all();
	}
	wide(n) {
		const { fleet, layout } = this;
		return Math.max(1, fleet.first[n + 1] - fleet.first[n]) * layout.cell;
	}

	/** Draw the frame of a node out of service; dashed if no operator ordered it. */
	enclose(n) {
		const { fleet, layout, context } = this;
		const state = fleet.out[n];
		context.strokeStyle = this.colours[state];
		context.lineWidth = 2;
		if (STATES[state].mark === "?") context.setLineDash([3, 2]);
		context.strokeRect(layout.x[n] - 1, layout.y[n] - this.top - 1, this.wide(n) + 1, layout.cell + 1);
		context.setLineDash([]);
	}

	outline(n) {
		const { layout, context } = this;
		context.strokeStyle = this.text;
		context.lineWidth = 2;
		const wide = this.wide(n);
		const out = layout.cell < 5 ? 4 : 0; // A larger frame around tiny nodes.
		context.strokeRect(layout.x[n] - out, layout.y[n] - this.top + 1 - out, wide - 1 + 2 * out, layout.cell - 1 + 2 * out);
	}

	square(slot) {
		const { fleet, layout, context } = this;
		const n = fleet.owner[slot];
		const { cell } = layout;
		const size = cell - 1;
		const x = layout.x[n] + (slot - fleet.first[n]) * cell;
		const y = layout.y[n] - this.top;
		if (y < -cell || y > this.canvas.height) return;
		const state = fleet.state[slot];
		context.globalAlpha = this.lit && !this.lit[n] ? 0.25 : 1;
		const part = state > 0 && state < 5 && fleet.milli[slot] > 0 ? 1 - fleet.milli[slot] / 1000 : 0;
		context.fillStyle = this.ground;
		context.fillRect(x, y, size, size);
		context.fillStyle = this.colour ? this.colour(slot, n) : this.colours[state];
		context.fillRect(x, y, size, size);
		if (part) {
			context.fillStyle = this.colours[0]; // The free part, from above.
			context.fillRect(x, y, size, Math.round(size * part));
		}
		if (size >= 6 && STATES[state].mark) this.mark(x, y, size, STATES[state].mark);
		context.globalAlpha = 1;
	}

	mark(x, y, size, mark) {
		const { context } = this;
		context.strokeStyle = this.ground;
		context.lineWidth = Math.max(1, size / 8);
		context.beginPath();
		if (mark === "/" || mark === "x") {
			context.moveTo(x + 1, y + size - 1);
			context.lineTo(x + size - 1, y + 1);
		}
		if (mark === "\\" || mark === "x") {
			context.moveTo(x + 1, y + 1);
			context.lineTo(x + size - 1, y + size - 1);
		}
		if (mark === "–" || mark === "?") {
			context.moveTo(x + 1, y + size / 2);
			context.lineTo(x + size - 1, y + size / 2);
		}
		context.stroke();
	}

	pixels(dirty) {
		const { fleet, layout } = this;
		const { width, height } = this.canvas;
		const ground = packed(this.ground);
		const palette = Uint32Array.from(this.colours, packed);
		const dimmed = palette.map((each) => mixed(each, ground));
		if (!this.image || this.image.width !== width || this.image.height !== height) {
			this.image = this.context.createImageData(width, height);
			dirty = null;
		}
		const out = new Uint32Array(this.image.data.buffer);
		if (dirty === null) {
			out.fill(ground);
			const nodes = fleet.ids.length;
			for (let n = 0; n < nodes; n++) this.node(n, out, this.lit && !this.lit[n] ? dimmed : palette);
			this.context.putImageData(this.image, 0, 0);
			this.names();
			if (this.chosen >= 0) this.outline(this.chosen);
			return;
		}
		let low = height;
		let high = 0;
		for (const slot of dirty) {
			const n = fleet.owner[slot];
			this.node(n, out, this.lit && !this.lit[n] ? dimmed : palette);
			const y = layout.y[n] - this.top;
			low = Math.min(low, y);
			high = Math.max(high, y + layout.cell);
		}
		low = Math.max(0, low);
		if (high <= low) return;
		this.context.putImageData(this.image, 0, 0, 0, low, width, Math.min(height, high) - low);
		this.names(low, high);
		if (this.chosen >= 0) this.outline(this.chosen);
	}

	node(n, out, palette) {
		const { fleet, layout } = this;
		const { width, height } = this.canvas;
		const { cell } = layout;
		const top = layout.y[n] - this.top;
		if (top < 0 || top + cell > height) return;
		const from = fleet.first[n];
		const slots = fleet.first[n + 1] - from;
		const fill = (x, colour) => {
			if (cell === 1) out[top * width + x] = colour;
			else for (let y = top; y < top + cell; y++) out.fill(colour, y * width + x, y * width + x + cell);
		};
		if (!slots) fill(layout.x[n], palette[fleet.out[n] || 2]);
		for (let k = 0; k < slots; k++) {
			const x = layout.x[n] + k * cell;
			if (x + cell > width) break;
			fill(x, this.colour ? packed(this.colour(from + k, n)) : palette[fleet.out[n] || fleet.state[from + k]]);
		}
	}

	/** The node and slot at a point of the canvas, or null. */
	at(px, py) {
		const { fleet, layout } = this;
		if (!fleet || !layout) return null;
		const y = py + this.top;
		for (let n = 0; n < fleet.ids.length; n++) {
			if (layout.y[n] > y || layout.y[n] + layout.cell <= y) continue;
			if (px >= layout.x[n] && px < layout.x[n] + this.wide(n)) {
				return { node: n, slot: fleet.first[n] === fleet.first[n + 1] ? -1 : fleet.first[n] + Math.floor((px - layout.x[n]) / layout.cell) };
			}
		}
		return null;
	}
}

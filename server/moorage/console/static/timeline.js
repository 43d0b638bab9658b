// Leases over time on a canvas: one line for each node or tenant; the table beside it has the same.
import { useEffect, useRef, useState } from "preact/hooks";
import { time } from "./format.js";
import { html, typed } from "./ui.js";

const LINE = 18;
const LEFT = 150;
const LINES_MAX = 40;

/** @param {any[]} rows @param {string} by @returns {Map<string, any[]>} */
function lines(rows, by) {
	const found = new Map();
	for (const row of rows) {
		const names = by === "tenant" ? [row.tenant] : row.placement.map((share) => `${share.cluster_id}/${share.node_id}`);
		for (const name of new Set(names)) found.set(name, [...(found.get(name) || []), row]);
	}
	return new Map([...found].sort().slice(0, LINES_MAX));
}

export function Timeline({ rows, open, brushed }) {
	const canvas = useRef(null);
	const [by, setBy] = useState("node");
	const [width, setWidth] = useState(0);
	const [brush, setBrush] = useState(null);
	const pressed = useRef(null);
	const grouped = lines(rows, by);
	const now = Date.now() / 1000;
	const from = Math.min(now - 60, ...rows.map((row) => row.granted_at));
	const until = Math.max(now + 60, ...rows.map((row) => row.expires_at));
	const x = (at) => LEFT + ((at - from) / (until - from)) * (width - LEFT - 4);
	const at = (px) => from + ((px - LEFT) / (width - LEFT - 4)) * (until - from);
	const height = LINE * (grouped.size + 1) + 4;

	useEffect(() => {
		const element = canvas.current;
		const observer = new ResizeObserver(() => setWidth(element.clientWidth));
		observer.observe(element);
		return () => observer.disconnect();
	}, []);
	useEffect(() => {
		const element = canvas.current;
		if (!width) return;
		element.width = width;
		element.height = height;
		const context = element.getContext("2d");
		const style = getComputedStyle(element);
		context.font = "12px system-ui, sans-serif";
		context.fillStyle = style.color;
		context.fillText(time(from), LEFT, 12);
		if (x(now) > LEFT + 70) context.fillText("now", x(now), 12);
		context.textAlign = "right";
		context.fillText(time(until), width - 4, 12);
		context.textAlign = "left";
		[...grouped].forEach(([name, leases], index) => {
			const y = LINE * (index + 1);
			context.fillStyle = style.color;
			context.fillText(name.length > 22 ? `…${name.slice(-21)}` : name, 0, y + 13, LEFT - 6);
			for (const lease of leases) bar(context, lease, x(lease.granted_at), x(lease.expires_at), y + 2, style);
		});
		context.strokeStyle = style.color;
		context.setLineDash([3, 3]);
		context.strokeRect(x(now), LINE, 0, height);
		if (brush) {
			context.globalAlpha = 0.2;
			context.fillStyle = style.color;
			context.fillRect(x(brush[0]), 0, x(brush[1]) - x(brush[0]), height);
		}
	});
	const finish = (event) => {
		if (pressed.current === null) return;
		const [a, b] = [pressed.current, event.offsetX].sort((one, other) => one - other);
		pressed.current = null;
		if (b - a > 4) {
			setBrush([at(a), at(b)]);
			return brushed([at(a), at(b)]);
		}
		setBrush(null);
		brushed(null);
		const line = [...grouped.values()][Math.floor(event.offsetY / LINE) - 1] || [];
		const hit = line.find((each) => each.granted_at <= at(b) && at(b) <= each.expires_at);
		if (hit) open(hit.id);
	};
	return html`<p class="tools"><label>Lines by <select value=${by} onChange=${typed(setBy)}><option value="node">node</option><option value="tenant">tenant</option></select></label>
			${brush ? html`<span>${time(brush[0])} to ${time(brush[1])}</span><button type="button" onClick=${() => {
				setBrush(null);
				brushed(null);
			}}>All times</button>` : html`<span class="note">Draw over a span to see only its leases. Warm ones are hatched, failing ones crossed.</span>`}</p>
		<div class="lines" tabindex="0" role="region" aria-label="Timeline"><canvas ref=${canvas} class="timeline" style=${{ height: `${height}px` }} role="img" aria-label=${`Timeline of ${rows.length} leases by ${by}; the table below has the same`}
			onMouseDown=${(e) => (pressed.current = e.offsetX)} onMouseUp=${finish}></canvas></div>`;
}

/** @param {CanvasRenderingContext2D} context @param {any} lease @param {number} from @param {number} to @param {number} y @param {CSSStyleDeclaration} style */
function bar(context, lease, from, to, y, style) {
	const wide = Math.max(2, to - from);
	const high = LINE - 5;
	context.fillStyle = style.borderTopColor;
	if (lease.state === "warm" || lease.state === "failing") {
		context.strokeStyle = style.borderTopColor;
		context.setLineDash([]);
		context.strokeRect(from, y, wide, high);
		context.beginPath();
		for (let at = 0; at < wide; at += 6) {
			context.moveTo(from + at, y + high);
			context.lineTo(Math.min(from + at + high, from + wide), y);
			if (lease.state !== "failing") continue;
			context.moveTo(from + at, y);
			context.lineTo(Math.min(from + at + high, from + wide), y + high);
		}
		context.stroke();
	} else context.fillRect(from, y, wide, high);
}

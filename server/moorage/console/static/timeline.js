// Leases over time on a canvas: a line for each node or tenant.
import { useEffect, useRef, useState } from "preact/hooks";
import { ticks } from "./charts.js";
import { count, gpus, heldMilli, placesBrief, until as left, when } from "./format.js";
import { keyed, painted } from "./palette.js";
import { useSignal } from "./signal.js";
import { theme } from "./theme.js";
import { Button, Choice, html } from "./ui.js";

const LEFT = innerWidth < 600 ? 90 : 150;
const HEAD = 34;
const LANE = 6;
const LINE_MIN = 16;
const TENANT_LINE = 40;
export const LINES_MAX = innerWidth < 600 ? 12 : 60;
const SEEN_PX = 336;
const HOUR = 3600;
const SPANS = [["1 hour", HOUR], ["6 hours", 6 * HOUR], ["1 day", 24 * HOUR], ["1 week", 168 * HOUR]];
const SPAN_MIN = 60;
const FIRST = { ends: "next end", load: "most GPUs held", name: "name" };
const STATES = { warm: "s-w", failing: "s-x", ending: "s-u", starting: "s-c" };

const COLOURED = {
	tenant: (row) => row.tenant || "kept warm",
	policy: (row) => row.policy_rule_uri,
	model: (row, models) => (heldMilli(row.placement) && models.get(nodeOf(row.placement[0]))) || "no GPU",
	state: (row) => row.state,
};
const nodeOf = (share) => (share ? `${share.cluster_id}/${share.node_id}` : "");

/** The lines, in order. `cut`: There are more leases, so lines after that of the last lease may be incomplete. */
export function lined(rows, by, order, cut = false) {
	const found = new Map();
	const add = (name, row, share) => {
		const line = found.get(name) || { name, rows: [], ends: Infinity, milli: 0, lanes: [], tall: LINE_MIN };
		found.set(name, line);
		line.rows.push({ row, share });
		line.ends = Math.min(line.ends, row.expires_at);
		line.milli += heldMilli([share]);
	};
	for (const row of rows) {
		for (const share of row.placement) add(by === "tenant" ? row.tenant || "kept warm" : nodeOf(share), row, share);
	}
	const compare = { ends: (a, b) => a.ends - b.ends, load: (a, b) => b.milli - a.milli, name: () => 0 }[order];
	const strict = (a, b) => compare(a, b) || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0);
	const reached = cut && rows.findLast((row) => row.placement.length)?.placement.map((share) => found.get(nodeOf(share))).sort(strict)[0];
	const whole = [...found.values()].filter((each) => !reached || strict(each, reached) < 0);
	const all = whole.sort((a, b) => compare(a, b) || a.name.localeCompare(b.name, undefined, { numeric: true }));
	for (const line of all) {
		if (by === "tenant") line.tall = TENANT_LINE;
		else laned(line);
	}
	return all;
}

/** Give each device of a node a lane, and each lease the lanes of its devices. */
function laned(line) {
	const ids = [...new Set(line.rows.flatMap(({ share }) => share.gpus || []))].sort((a, b) => String(a).localeCompare(String(b), undefined, { numeric: true }));
	let bare = ids.length; // Leases without a device are below, one lane each.
	for (const each of line.rows) {
		const lanes = (each.share.gpus || []).map((gpu) => ids.indexOf(gpu));
		each.lanes = lanes.length ? lanes : [bare++];
		each.part = each.share.gpu_milli && lanes.length ? each.share.gpu_milli / 1000 : 1;
	}
	const taken = new Map(); // The part of each lane that earlier leases use, if devices are shared.
	for (const each of line.rows) {
		each.from = each.part < 1 ? taken.get(each.lanes[0]) || 0 : 0;
		if (each.part < 1) taken.set(each.lanes[0], Math.min(1 - each.part, each.from + each.part));
	}
	line.tall = Math.max(LINE_MIN, Math.min(16, bare) * LANE + 4);
	line.lane = (line.tall - 4) / Math.max(1, bare);
}

export function Timeline({ drawn, models, chosen, choose: setLines, open, brushed }) {
	const { leases: rows, by, order, cut } = drawn;
	const canvas = useRef(null);
	const [picked, setColour] = useState("tenant");
	const colour = by === "tenant" ? by : picked;
	const [width, setWidth] = useState(0);
	const [range, setRange] = useState(null);
	const [brush, setBrush] = useState(null);
	const [under, setUnder] = useState("");
	const pressed = useRef(null);
	const painted_in = useSignal(theme);
	const now = Date.now() / 1000;
	const all = lined(rows, by, order, cut);
	const lines = all.slice(0, LINES_MAX);
	const last = Math.max(now + HOUR, ...rows.map((row) => row.expires_at));
	const usual = Math.min(24 * HOUR, last - now);
	const [from, until] = range || [now - usual / 8, now + usual];
	const wide = Math.max(1, width - LEFT - 4);
	const x = (at) => LEFT + ((at - from) / (until - from)) * wide;
	const at = (px) => from + ((px - LEFT) / wide) * (until - from);
	const of = (row) => COLOURED[colour](row, models);
	const names = [...new Set(rows.map(of))].sort();
	const keys = colour === "state" ? new Map(names.map((each) => [each, STATES[each] || "s-h"])) : keyed(names);
	const tops = [];
	let height = HEAD;
	for (const line of lines) {
		tops.push(height);
		height += line.tall + 2;
	}

	useEffect(() => {
		const element = canvas.current;
		const observer = new ResizeObserver(() => setWidth(element.clientWidth));
		observer.observe(element);
		return () => observer.disconnect();
	}, []);
	useEffect(() => {
		const element = canvas.current;
		if (!width) return;
		const sharp = devicePixelRatio || 1;
		element.width = width * sharp;
		element.height = height * sharp;
		const context = element.getContext("2d");
		context.scale(sharp, sharp);
		const style = getComputedStyle(element);
		const paint = painted([...keys.values()]);
		const ink = { text: style.color, line: style.outlineColor, ground: style.backgroundColor };
		scale(context, { x, from, until, width, height, ink, now });
		lines.forEach((line, n) => {
			context.fillStyle = ink.line;
			context.fillRect(0, tops[n] - 1, width, 1);
			context.fillStyle = ink.text;
			context.fillText(line.name.length > 22 ? `…${line.name.slice(-21)}` : line.name, 0, tops[n] + 12, LEFT - 8);
			context.save();
			context.beginPath();
			context.rect(LEFT, tops[n], wide, line.tall);
			context.clip();
			if (by === "tenant") area(context, line, { x, top: tops[n], now, until, hue: paint.get(keys.get(of(line.rows[0].row))), ink });
			else for (const each of line.rows) bar(context, each, x, tops[n] + 2, line.lane, paint.get(keys.get(of(each.row))), ink);
			context.restore();
		});
		edges(context, { x, height, ink, now, brush, from, until });
	}, [rows, width, by, order, colour, from, until, brush, painted_in, models]);

	const move = (a, b) => setRange(b - a < SPAN_MIN ? [(a + b - SPAN_MIN) / 2, (a + b + SPAN_MIN) / 2] : [a, b]);
	const zoom = (times, around = Math.max(from, Math.min(until, now))) => move(around - (around - from) * times, around + (until - around) * times);
	const pan = (part) => move(from + part * (until - from), until + part * (until - from));
	const choose = (found) => {
		setBrush(found);
		brushed(found);
	};
	const hit = (event) => {
		const n = tops.findIndex((top, each) => event.offsetY >= top && event.offsetY < top + lines[each].tall + 2);
		const moment_ = at(event.offsetX);
		if (n < 0 || by === "tenant" || event.offsetX < LEFT) return null;
		const lane = Math.floor((event.offsetY - tops[n] - 2) / lines[n].lane);
		const there = lines[n].rows.filter(({ row }) => row.granted_at <= moment_ && moment_ <= row.expires_at);
		return there.find(({ lanes }) => lanes.includes(lane))?.row || null;
	};
	const finish = (event) => {
		if (pressed.current === null) return;
		const [a, b] = [pressed.current, event.offsetX].sort((one, other) => one - other);
		pressed.current = null;
		if (b - a > 4) return choose([at(Math.max(LEFT, a)), at(b)]);
		const row = hit(event);
		if (row) open(row.id);
		else choose(null);
	};
	const hover = (event) => {
		const row = hit(event);
		setUnder(row ? `${row.id} of ${row.tenant || "no one, kept warm"}, ${row.state}, on ${placesBrief(row.placement)}, until ${when(row.expires_at)} (${row.expires_at > now ? `in ${left(row.expires_at)}` : "over"})` : event.offsetX > LEFT ? when(at(event.offsetX)) : "");
	};
	const press = (event) => {
		const done = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), 0: () => setRange(null) }[event.key];
		if (!done || event.ctrlKey || event.metaKey) return;
		event.preventDefault();
		done();
	};
	const seen = tops.findIndex((top) => top > SEEN_PX); // The box ends at a whole line.
	const shown = by === "node" && all.length > lines.length ? `the first ${lines.length} nodes by ${FIRST[order]}` : cut ? `the ${count(rows.length)} that end next, without later ones` : "all";
	return html`<section aria-label="Timeline"><p class="tools">
			<${Choice} label="Lines by" value=${chosen.by} set=${(each) => setLines({ ...chosen, by: each })} options=${["node", "tenant"]} />
			<${Choice} label="Order" value=${chosen.order} set=${(each) => setLines({ ...chosen, order: each })} options=${Object.entries(FIRST)} />
			<${Choice} label="Colour" value=${colour} set=${setColour} options=${Object.keys(COLOURED)} />
			<span class="group" role="group" aria-label="Times">${SPANS.map(([name, seconds]) => html`<${Button} onClick=${() => move(now - seconds / 8, now + seconds)}>${name}<//>`)}
				<${Button} aria-label="Earlier" onClick=${() => pan(-0.5)}>◀<//><${Button} aria-label="Later" onClick=${() => pan(0.5)}>▶<//>
				<${Button} aria-label="Zoom in" onClick=${() => zoom(0.5)}>+<//><${Button} aria-label="Zoom out" onClick=${() => zoom(2)}>−<//></span></p>
		<p class="tools"><span>Drawn: ${shown}${seen < 0 ? "" : `; ${seen} lines are visible at once; scroll for the others`}.</span>
			${brush ? html`<span>Only ${when(brush[0])} to ${when(brush[1])}</span><${Button} onClick=${() => move(...brush)}>Zoom to it<//><${Button} onClick=${() => choose(null)}>All times<//>` : html`<span class="note">Drag over a time span to list only its leases.</span>`}</p>
		<ul class="keys" aria-label=${`Colours by ${colour}`}>${names.slice(0, 24).map((name) => html`<li><span class=${`swatch ${keys.get(name)}`} aria-hidden></span> ${name}</li>`)}${colour === "state" ? null : html`<li class="note">warm: hatched, failing: crossed</li>`}</ul>
		<div class="lines" style=${{ maxHeight: seen < 0 ? "none" : `${tops[seen]}px` }}><canvas ref=${canvas} class="timeline" tabindex="0" style=${{ height: `${height}px` }} role="img" aria-label=${`Timeline of ${rows.length} leases by ${by}; the table below has the same. + and - zoom, arrows move.`}
			onKeyDown=${press} onMouseMove=${hover} onMouseLeave=${() => setUnder("")} onMouseDown=${(e) => (pressed.current = e.offsetX)} onMouseUp=${finish}></canvas></div>
		<p class="under">${under || " "}</p></section>`;
}

/** Ticks with their times, and the date and zone. */
function scale(context, { x, from, until, width, height, ink, now }) {
	context.font = "12px system-ui, sans-serif";
	context.fillStyle = ink.text;
	let day = "";
	for (const each of ticks(from, until, Math.max(2, Math.floor((width - LEFT) / 90)))) {
		const px = x(each);
		context.fillStyle = ink.line;
		context.fillRect(px, HEAD - 6, 1, height);
		context.fillStyle = ink.text;
		const [date, time] = when(each).split(" ");
		if (date !== day && px < width - 70) context.fillText(date, px, 12);
		day = date;
		if (px < width - 34 && Math.abs(px - x(now)) > 30) context.fillText(time.slice(0, 5), px, 26);
	}
}

/** Drawn above all lines: the present time, and the chosen span. */
function edges(context, { x, height, ink, now, brush, from, until }) {
	if (now >= from && now <= until) {
		context.fillStyle = ink.text;
		context.fillRect(x(now) - 1, 16, 2, height);
		context.font = "bold 12px system-ui, sans-serif";
		context.fillText("now", x(now) + 4, 26);
	}
	if (!brush) return;
	context.globalAlpha = 0.18;
	context.fillStyle = ink.text;
	context.fillRect(Math.max(LEFT, x(brush[0])), HEAD, x(brush[1]) - Math.max(LEFT, x(brush[0])), height);
	context.globalAlpha = 1;
}

function bar(context, { row, lanes, part, from: offset }, x, top, lane, hue, ink) {
	const [left, right] = [x(row.granted_at), x(row.expires_at)];
	const wide = Math.max(2, right - left - 1);
	const runs = [];
	for (const each of [...lanes].sort((a, b) => a - b)) {
		if (runs.length && runs.at(-1).last === each - 1) runs.at(-1).last = each;
		else runs.push({ first: each, last: each });
	}
	for (const { first, last } of runs) {
		const y = top + (first + (part < 1 ? offset : 0)) * lane;
		const high = Math.max(2, (last - first + 1) * lane * (part < 1 ? part : 1) - 1);
		context.fillStyle = hue;
		context.fillRect(left, y, wide, high);
		if (row.state === "warm" || row.state === "failing") hatch(context, left, y, wide, high, row.state === "failing", ink.ground);
	}
}

function hatch(context, left, y, wide, high, crossed, colour) {
	context.save();
	context.beginPath();
	context.rect(left, y, wide, high);
	context.clip();
	context.strokeStyle = colour;
	context.beginPath();
	for (let at = -high; at < wide; at += 6) {
		context.moveTo(left + at, y + high);
		context.lineTo(left + at + high, y);
		if (!crossed) continue;
		context.moveTo(left + at, y);
		context.lineTo(left + at + high, y + high);
	}
	context.stroke();
	context.restore();
}

/** The GPUs that a tenant holds from now on if no lease is renewed. */
function area(context, line, { x, top, now, until, hue, ink }) {
	const ends = line.rows.map(({ row, share }) => [row.expires_at, heldMilli([share])]).sort((a, b) => a[0] - b[0]);
	let left = line.milli;
	const high = (milli) => (milli / Math.max(1, line.milli)) * (TENANT_LINE - 6);
	context.fillStyle = hue;
	context.beginPath();
	context.moveTo(x(now), top + TENANT_LINE);
	context.lineTo(x(now), top + TENANT_LINE - high(left));
	for (const [end, milli] of ends) {
		context.lineTo(x(end), top + TENANT_LINE - high(left));
		left -= milli;
		context.lineTo(x(end), top + TENANT_LINE - high(left));
	}
	context.lineTo(x(until), top + TENANT_LINE);
	context.fill();
	context.fillStyle = ink.text;
	context.fillText(`${gpus(line.milli)} GPUs`, x(now) - 76, top + 22, 70);
}

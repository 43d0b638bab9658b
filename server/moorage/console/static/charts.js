// Small charts over time, as SVG, with a legend and a table.
import { clockTick, duration, when } from "./format.js";
import { Grid, Scroll, html } from "./ui.js";

const WIDE = 380;
const HIGH = 132;
const LEFT = 54;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 20;
const ROWS_MAX = 12;
const GAP = 900;
const ROUND = [120, 600, 1200, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800];
const STEPS = [60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const known = (value) => (value ?? null) !== null;

/** The least round number that is not smaller. */
export function rounded(most) {
	if (!(most > 0)) return 1;
	const power = 10 ** Math.floor(Math.log10(most));
	return [1, 2, 4, 5, 10].map((each) => each * power).find((each) => each >= most * 0.999) || most;
}

/** Times of ticks, at full local hours or minutes. */
export function ticks(from, to, most = 5) {
	const step = STEPS.find((each) => (to - from) / each <= most) || Math.ceil((to - from) / most / 604800) * 604800;
	const shift = new Date(from * 1000).getTimezoneOffset() * 60;
	const found = [];
	for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) found.push(at);
	return found;
}

/** A line with gaps; `apart`: Whether a point is far from the last. */
function path(values, x, y, apart) {
	let drawn = "";
	values.forEach((value, n) => {
		if (!known(value)) return;
		const joined = known(values[n - 1]) && !apart(n);
		drawn += `${joined ? "L" : "M"}${x(n).toFixed(1)},${y(value).toFixed(1)}${joined || (known(values[n + 1]) && !apart(n + 1)) ? "" : "h3"}`;
	});
	return drawn;
}

/** A chart: `said` formats a value, `most` is the top of the axis; `axis` formats x if x is not time. */
export function Chart({ title, at, series, said, most, href, axis }) {
	const all = series.flatMap((each) => each.values).filter(known);
	const largest = Math.max(0, ...all);
	const top = most || (said === duration && largest > 60 && ROUND.find((each) => each >= largest)) || rounded(largest);
	const [from, to] = axis ? [0, Math.max(...at, 1e-9)] : [Math.min(at[0], at.at(-1) - 60), at.at(-1)];
	const x = (n) => LEFT + ((at[n] - from) / (to - from)) * (WIDE - LEFT - RIGHT);
	const y = (value) => HIGH - BOTTOM - (Math.min(value, top) / top) * (HIGH - TOP - BOTTOM);
	const last = (values) => values.findLast(known);
	const text = (value) => (known(value) ? said(value) : "–");
	const step = Math.max(1, Math.ceil(at.length / ROWS_MAX));
	const shown = at.map((_, n) => n).filter((n) => (at.length - 1 - n) % step === 0);
	return html`<figure class="chart" role="group" aria-label=${title}>
		<figcaption>${href ? html`<a href=${href}>${title}</a>` : title}</figcaption>
		<svg viewBox=${`0 0 ${WIDE} ${HIGH}`} role="img" aria-label=${`${title}: ${series.map((each) => `${each.name} ${text(last(each.values))}`).join(", ")} ${axis ? "at the end" : "now"}; the table below has the figures`}>
			${[0, 0.5, 1].map((part) => html`<line class="grid" x1=${LEFT} x2=${WIDE - RIGHT} y1=${y(top * part)} y2=${y(top * part)} />
				<text x=${LEFT - 5} y=${y(top * part) + 4} text-anchor="end">${said(top * part)}</text>`)}
			${(axis ? [] : ticks(from, to)).map((each) => {
				const px = LEFT + ((each - from) / (to - from)) * (WIDE - LEFT - RIGHT);
				return px > WIDE - 52 ? null : html`<text x=${px} y=${HIGH - 5} text-anchor="middle">${clockTick(each)}</text><line class="grid" x1=${px} x2=${px} y1=${HIGH - BOTTOM} y2=${HIGH - BOTTOM + 3} />`;
			})}
			<text x=${WIDE - RIGHT} y=${HIGH - 5} text-anchor="end">${axis ? axis(to) : "now"}</text>
			${series.map((each) => html`<path class=${"line " + each.key} d=${path(each.values, x, y, (n) => !axis && at[n] - at[n - 1] > GAP)} />`)}
		</svg>
		<ul class="keys" aria-label=${`Legend of ${title}`}>${series.map((each) => html`<li><span class=${"dot " + each.key} aria-hidden></span>${each.name} <b>${text(last(each.values))}</b></li>`)}</ul>
		<details><summary>The figures</summary><${Scroll} label=${title}><${Grid} label=${title} heads=${[axis ? "demanded" : "time", ...series.map((each) => each.name)]}
			rows=${shown.map((n) => [axis ? said(at[n]) : when(at[n]), ...series.map((each) => text(each.values[n]))]).reverse()} /><//></details>
	</figure>`;
}
export const quantiles = (of) => [{ name: "half within (p50)", key: "k0", values: of.p50 }, { name: "99 % within (p99)", key: "k1", values: of.p99 }];

/** A part of a whole, as a bar with its words. */
export const Share = ({ part, words, hue = "k0" }) => html`<span class="share"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden>
	<rect class="rest" width="100" height="10" /><rect class=${hue} width=${Math.max(0, Math.min(100, part * 100))} height="10" /></svg> ${words}</span>`;
export const Line = ({ name, values, ...more }) => html`<${Chart} ...${more} series=${[{ name, key: "k0", values }]} />`;

// The fleet as an ARIA treegrid, for the keyboard.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, some, when } from "../format.js";
import { html } from "../ui.js";
import { STATES, grouped, tally } from "./model.js";

const CHILDREN_SHOWN = 100;

/** The visible rows.
 *  `shown`: Number of shown children of each. */
export function visible(it, groups, open, shown) {
	const rows = [];
	const list = (key, level, all, add) => {
		const most = shown.get(key) || CHILDREN_SHOWN;
		all.slice(0, most).forEach((each, at) => add(each, at + 1, all.length));
		if (all.length > most) rows.push({ key: key + "\n+", level, name: `${count(all.length - most)} more`, more: key, children: false, at: most + 1, of: all.length });
	};
	const node = (level) => (n, at, of) => {
		const key = "n" + n;
		const slots = it.first[n + 1] - it.first[n];
		rows.push({ key, level, name: it.ids[n], nodes: [n], node: n, children: slots > 0, at, of });
		if (open.has(key)) list(key, level + 1, [...Array(slots).keys()], (k, place, all) => rows.push({ key: `s${it.first[n] + k}`, level: level + 1, name: `GPU ${k}`, node: n, slot: it.first[n] + k, children: false, at: place, of: all }));
	};
	list("", 1, it.clusters, (name, at, of) => {
		const racks = groups[at - 1];
		const key = "c" + (at - 1);
		rows.push({ key, level: 1, name, nodes: [...racks.values()].flat(), children: racks.size > 0, at, of });
		if (!open.has(key)) return;
		if (racks.size === 1) list(key, 2, [...racks.values()][0], node(2));
		else list(key, 2, [...racks.entries()], ([rack, nodes], place, all) => {
			const id = key + "\n" + rack;
			rows.push({ key: id, level: 2, name: rack || "no rack", nodes, children: true, at: place, of: all });
			if (open.has(id)) list(id, 3, nodes, node(3));
		});
	});
	return rows;
}

/** The texts of a row. */
function cells(it, row) {
	if (row.more) return ["", ""];
	if (row.slot !== undefined) {
		const state = it.state[row.slot];
		const whose = it.tenants[it.tenant[row.slot]];
		const end = it.ends[row.slot] ? `, until ${when(it.ends[row.slot])}` : "";
		return [`${(1000 - it.milli[row.slot]) / 1000}`, `${STATES[state].name}${whose && whose !== STATES[state].name ? `, ${whose}` : ""}${end}, ${it.models[it.model[row.slot]] || "no model"}`];
	}
	const found = tally(it, row.nodes);
	const all = found.reduce((sum, each) => sum + each, 0);
	const out = row.nodes.filter((n) => it.out[n]).length;
	const text = [all ? "" : "no GPU", ...STATES.map((state, at) => (at && found[at] ? `${count(found[at])} ${state.name}` : "")),
		out ? (row.node === undefined ? `${some(out, "node")} out of service` : `node ${STATES[it.out[row.node]].name}`) : ""].filter(Boolean).join(", ");
	return [all ? `${count(found[0])} of ${count(all)}` : "–", text || "nothing used"];
}

export function Tree({ it, chosen, choose, ticks }) {
	void ticks; // Its change renders the counts again.
	const [open, setOpen] = useState(() => new Set(it.clusters.length === 1 ? ["c0"] : []));
	const [shown, setShown] = useState(() => new Map());
	const [active, setActive] = useState("");
	const groups = useRef(null);
	if (groups.current?.it !== it.ids) groups.current = { it: it.ids, groups: grouped(it) };
	const grid = useRef(null);
	const moved = useRef(false);
	const rows = visible(it, groups.current.groups, open, shown);
	const here = rows.some((row) => row.key === active) ? active : rows[0]?.key;

	useEffect(() => {
		if (moved.current) grid.current?.querySelector('[tabindex="0"]')?.focus();
		moved.current = false;
	});
	const move = (row) => {
		if (!row) return;
		moved.current = true;
		setActive(row.key);
	};
	const toggle = (row, wanted) => {
		const next = new Set(open);
		if (wanted) next.add(row.key);
		else next.delete(row.key);
		setOpen(next);
	};
	const enter = (row) => {
		setActive(row.key);
		if (row.more !== undefined) setShown(new Map(shown).set(row.more, (shown.get(row.more) || CHILDREN_SHOWN) + CHILDREN_SHOWN * 5));
		else if (row.node !== undefined) choose(row.node);
		else toggle(row, !open.has(row.key));
	};
	const press = (event) => {
		const at = rows.findIndex((row) => row.key === here);
		const row = rows[at];
		if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
		const is = open.has(row.key);
		const done = {
			ArrowDown: () => move(rows[at + 1]), ArrowUp: () => move(rows[at - 1]), Home: () => move(rows[0]), End: () => move(rows.at(-1)),
			ArrowRight: () => row.children && (is ? move(rows[at + 1]) : toggle(row, true)),
			ArrowLeft: () => (is ? toggle(row, false) : move(rows.slice(0, at).findLast((each) => each.level < row.level))),
			Enter: () => enter(row), " ": () => enter(row),
		}[event.key];
		if (!done) return;
		event.preventDefault();
		done();
	};
	return html`<div class="scroll tree" tabindex="-1">
		<table role="treegrid" aria-label="Fleet as a tree" ref=${grid} onKeyDown=${press}>
			<thead><tr role="row">${["where", "wholly free", "other states"].map((each) => html`<th role="columnheader" scope="col">${each}</th>`)}</tr></thead>
			<tbody>${rows.map((row) => {
				const [free, rest] = cells(it, row);
				const opens = row.children;
				return html`<tr role="row" key=${row.key} class=${"level" + row.level + (row.node === chosen && row.nodes ? " current" : "")}
					aria-level=${row.level} aria-posinset=${row.at} aria-setsize=${row.of} aria-expanded=${opens ? String(open.has(row.key)) : undefined}
					aria-selected=${row.node === chosen && row.nodes ? "true" : undefined}
					tabindex=${row.key === here ? 0 : -1} onFocus=${() => row.key !== here && setActive(row.key)} onClick=${() => enter(row)}>
					<td role="gridcell"><span class="twist" aria-hidden onClick=${(e) => {
						e.stopPropagation();
						toggle(row, !open.has(row.key));
					}}>${opens ? (open.has(row.key) ? "▾" : "▸") : ""}</span> ${row.name}</td>
					<td role="gridcell">${free}</td><td role="gridcell">${rest}</td></tr>`;
			})}</tbody>
		</table></div>`;
}

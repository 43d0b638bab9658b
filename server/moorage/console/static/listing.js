// Pages of a server's list, in rows that keep their place.
import { useEffect, useRef, useState } from "preact/hooks";
import { count } from "./format.js";
import { useSignal } from "./signal.js";
import { connection, pages as paged } from "./socket.js";
import { Button, Empty, Loading, Refused, Scroll, html, useEvery } from "./ui.js";

const PAGE = innerWidth < 600 ? 20 : 100;
const PAGES_MAX = 20;
const NOTHING = { latest: [], more: false, error: null };

/**
 * Pages of a list. Rows that are shown stay where they are, also when they are gone (`gone`); new
 * ones wait until `reveal`.
 * `message`: The request, without paging.
 * `field`: The field of the reply that has the rows. */
export function useListing(message, field, key, refresh_ms) {
	const [state, setState] = useState(NOTHING);
	const pages = useRef(1);
	const latestWanted = useRef("");
	const wanted = JSON.stringify(message);

	const load = async (replace) => {
		const mine = wanted;
		latestWanted.current = mine;
		try {
			const latest = [];
			let [read, more, total] = [0];
			for await (const page of paged({ ...message, limit: PAGE })) {
				latest.push(...page[field]);
				total = page.total;
				more = (page.next ?? null) !== null;
				if (++read === pages.current) break;
			}
			if (latestWanted.current !== mine) return;
			setState((old) => ({ rows: replace || !old.rows ? latest : merged(old.rows, latest, key, more), latest, more, total, error: null }));
		} catch (error) {
			if (error.code !== "lost") setState((old) => ({ ...old, error }));
		}
	};
	useEffect(() => {
		pages.current = 1;
		setState(NOTHING);
	}, [wanted]);
	useEffect(() => {
		load(false);
	}, [wanted, useSignal(connection)]);
	useEvery(() => load(false), refresh_ms, [wanted]);

	const shown = new Set((state.rows || []).map(key));
	const fresh = state.latest.filter((row) => !shown.has(key(row))).length;
	return {
		rows: state.rows,
		fresh,
		total: state.total,
		more: state.more && pages.current < PAGES_MAX,
		error: state.error,
		reveal: () => setState((old) => ({ ...old, rows: old.latest })),
		next: () => {
			pages.current += 1;
			load(true);
		},
		refresh: () => load(false),
	};
}

/** `more`: Whether a missing row may be on a later page (`moved`). */
function merged(rows, latest, key, more) {
	const now = new Map(latest.map((row) => [key(row), row]));
	return rows.map((row) => now.get(key(row)) || { ...row, gone: true, moved: more });
}

/** A head that sorts the rows by its column; pressed again, in reverse if possible. */
function Head({ name, orders, sort, order }) {
	const at = orders.indexOf(sort);
	const sorted = at < 0 ? undefined : sort.startsWith("-") ? "descending" : "ascending";
	return html`<th scope="col" aria-sort=${sorted}><${Button} class="head" onClick=${() => order(orders[(at + 1) % orders.length])}>${name}<span aria-hidden>${sorted ? (sorted === "ascending" ? " ▲" : " ▼") : ""}</span><//></th>`;
}

/**
 * A table of a listing. `j` and `k` go through its rows, Enter opens one. A head with several names lists its
 * sort orders after the first; `picking.why` tells why a row cannot be picked, `picking.note` why many cannot. */
export function ListingTable({ label, listing, heads, cells, address, keyed, current, empty, things = "", sort = "", order, picking }) {
	const { rows, fresh, more, total, error, reveal, next } = listing;
	const can = picking && (rows || []).filter((row) => !row.gone && !picking.why(row)).map(keyed);
	if (error && !rows) return html`<${Refused} error=${error} />`;
	if (!rows) return html`<${Loading} what=${label} />`;
	return html`
		<${Refused} error=${error} />
		<p class="above">
			<span>${total === undefined ? "" : `${count(total)} ${things}, `}${count(rows.length)} shown${total === undefined && more ? ", more on the server" : ""}</span>
			${can && can.length < rows.length ? html`<span>${picking.note}</span>` : null}
			${fresh ? html`<${Button} class="new" onClick=${reveal}>${count(fresh)} new<//>` : null}
		</p>
		${rows.length === 0
			? html`<${Empty}>${empty}<//>`
			: html`<${Scroll} label=${label}><table aria-label=${label} class="rows">
					<thead><tr>${picking && html`<td><input type="checkbox" aria-label="Select all that are shown" disabled=${!can.length} title=${picking.note} checked=${can.length > 0 && can.every((each) => picking.picked.has(each))} onChange=${(e) => picking.pick(can, e.target.checked)} /></td>`}
						${heads.map((each) => (Array.isArray(each) ? html`<${Head} name=${each[0]} orders=${each.slice(1)} sort=${sort} order=${order} />` : html`<th scope="col">${each}</th>`))}</tr></thead>
					<tbody>${rows.map((row) => {
						const [first, ...others] = cells(row);
						const name = keyed(row);
						return html`<tr key=${name} class=${(row.gone && !row.moved ? "gone " : "") + (name === current ? "current" : "")}>
							${picking && html`<td><input type="checkbox" aria-label=${`Select ${name}`} disabled=${row.gone || !!picking.why(row)} title=${picking.why(row)} checked=${picking.picked.has(name)} onChange=${(e) => picking.pick([name], e.target.checked)} /></td>`}
							<th scope="row"><a class="row" href=${address(row)} aria-current=${name === current ? "true" : undefined}>${first}</a>${row.gone && html` <span class="note">${row.moved ? "no longer on these pages" : "gone"}</span>`}</th>
							${others.map((each, at) => html`<td data-head=${[heads[at + 1]].flat()[0]}>${each}</td>`)}
						</tr>`;
					})}</tbody>
				</table><//>`}
		${more && html`<p><${Button} onClick=${next}>Show ${total === undefined ? "more" : `more: ${count(total - rows.length)} are not shown`}<//></p>`}`;
}

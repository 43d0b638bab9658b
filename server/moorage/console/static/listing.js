// Rows that keep their place: pages of a list of the server, refreshed where they stand.
import { useEffect, useRef, useState } from "preact/hooks";
import { count } from "./format.js";
import { useSignal } from "./signal.js";
import { ask, connection } from "./socket.js";
import { Empty, Loading, Refused, html, useEvery } from "./ui.js";

const PAGE = 100;
const PAGES_MAX = 20;

/**
 * @typedef {{rows: any[] | undefined, fresh: number, more: boolean, error: any,
 *   reveal: () => void, next: () => void, refresh: () => void}} Listing
 */

/**
 * Pages of a list. Rows that are shown stay where they are, also when they are gone (`gone`); new
 * ones wait until `reveal`.
 * @param {Record<string, any>} message What to ask, without paging.
 * @param {string} field Of the reply: the rows. @param {(row: any) => string} key
 * @param {number} refresh_ms @returns {Listing}
 */
export function useListing(message, field, key, refresh_ms) {
	const [state, setState] = useState({ rows: undefined, latest: [], more: false, error: null });
	const pages = useRef(1);
	const asked = useRef("");
	const wanted = JSON.stringify(message);

	const load = async (replace) => {
		const mine = wanted;
		asked.current = mine;
		try {
			let latest = [];
			let after = "";
			let more = true;
			for (let page = 0; page < pages.current && more; page++) {
				const data = await ask({ ...message, limit: PAGE, ...(after ? { after } : {}) });
				latest = latest.concat(data[field]);
				after = data.next;
				more = data.next !== null && data.next !== undefined;
			}
			if (asked.current !== mine) return;
			setState((old) => ({ rows: replace || !old.rows ? latest : merged(old.rows, latest, key), latest, more, error: null }));
		} catch (error) {
			if (error.code !== "lost") setState((old) => ({ ...old, error }));
		}
	};
	useEffect(() => {
		pages.current = 1;
		setState({ rows: undefined, latest: [], more: false, error: null });
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

/** @param {any[]} rows @param {any[]} latest @param {(row: any) => string} key */
function merged(rows, latest, key) {
	const now = new Map(latest.map((row) => [key(row), row]));
	return rows.map((row) => now.get(key(row)) || (row.gone ? row : { ...row, gone: true }));
}

/**
 * A table of a listing. `j` and `k` go through its rows, Enter opens one.
 * @param {{label: string, listing: Listing, heads: string[], cells: (row: any) => any[],
 *   address: (row: any) => string, keyed: (row: any) => string, current?: string, empty: any}} props
 */
export function ListingTable({ label, listing, heads, cells, address, keyed, current, empty }) {
	const { rows, fresh, more, error, reveal, next } = listing;
	if (error && !rows) return html`<${Refused} error=${error} />`;
	if (!rows) return html`<${Loading} what=${label} />`;
	return html`
		<${Refused} error=${error} />
		<p class="above">
			<span>${count(rows.length)} shown${more ? ", more on the server" : ""}</span>
			${fresh ? html`<button type="button" class="new" onClick=${reveal}>${count(fresh)} new</button>` : null}
		</p>
		${rows.length === 0
			? html`<${Empty}>${empty}<//>`
			: html`<div class="scroll" tabindex="0" role="region" aria-label=${label + ", scrollable"}><table aria-label=${label}>
					<thead><tr>${heads.map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
					<tbody>${rows.map((row) => {
						const [first, ...others] = cells(row);
						const name = keyed(row);
						return html`<tr key=${name} class=${(row.gone ? "gone " : "") + (name === current ? "current" : "")}>
							<th scope="row"><a class="row" href=${address(row)} aria-current=${name === current ? "true" : undefined}>${first}</a>${row.gone ? html` <span class="note">gone</span>` : null}</th>
							${others.map((each, at) => html`<td>${each}</td>`)}
						</tr>`;
					})}</tbody>
				</table></div>`}
		${more ? html`<p><button type="button" onClick=${next}>Show more</button></p>` : null}`;
}

// Queue: the waiting requests, their order, and why they wait; each can be cancelled.
import { brief, shape, some, until, when } from "../format.js";
import { ListingTable, useListing } from "../listing.js";
import { to } from "../router.js";
import { session } from "../session.js";
import { Action, Command, Copies, Empty, Facts, Id, Loading, Policy, Section, filters, html, useAsk } from "../ui.js";
import { Awaited, Reasons, turn, useWhys, waitingWords } from "./reasons.js";

const EXPLAINED_MAX = 12;

/** The first lease to end of those that a request waits for. */
function holder(why) {
	const [first, ...more] = [...(why?.waits_for || [])].sort((a, b) => a.expires_at - b.expires_at);
	if (why && !first && why.verdict !== "not_you") return html`. <a href=${to("leases") + "?sort=expires_at"}>Leases that end first</a>`;
	return first ? html`. <span class="note">Held by ${first.lease ? html`<${Id} of=${first.lease} />` : "another tenant"} on ${first.node_id} until ${when(first.expires_at)}${more.length ? ` and ${some(more.length, "other")}` : ""}</span>` : "";
}

export function Queue({ rest, query }) {
	const cluster = query.get("cluster") || "";
	const listing = useListing({ op: "queue", ...(cluster ? { cluster } : {}) }, "waiting", (row) => row.request, 10000);
	const whys = useWhys((listing.rows || []).slice(0, EXPLAINED_MAX).filter((row) => !row.gone)).value || {};
	const shown = listing.rows ? { ...listing, rows: [...listing.rows].sort((a, b) => a.position - b.position) } : listing;
	const columns = rest[0] ? 7 : 9;
	return html`
		<form class="tools" onSubmit=${filters("queue")}><label>May use cluster <input name="cluster" defaultValue=${cluster} /></label><button type="submit">Filter</button>
			<${Command} words=${["queue"]} /></form>
		<div class="split">
			<div><${ListingTable} label="Queue" listing=${shown} keyed=${(row) => row.request}
				heads=${["request", "tenant", "position", "waits", "wants", "why it waits", "its turn", "priority", "policy"].slice(0, columns)}
				cells=${(row) => [row.request, row.tenant, row.position, until(row.since), shape(row.resources), whys[row.request] ? html`${waitingWords(whys[row.request], row.resources)}${holder(whys[row.request])}` : "…",
					turn(row, whys[row.request]), row.priority, html`<${Policy} name=${row.policy_rule_uri} />`].slice(0, columns)}
				address=${(row) => to("queue", row.request)} current=${rest[0]} empty="The queue is empty." /></div>
			${rest[0] && html`<${Waiter} key=${rest[0]} id=${rest[0]} done=${listing.refresh} />`}
		</div>`;
}
const cancelWords = ({ request, tenant, since, resources }) => `Cancels request ${brief(request)}${tenant ? ` of ${tenant}` : ""} for ${shape(resources)}${since ? `, which has waited ${until(since)}` : ""}. It loses its place; a new request starts at the end of its priority. Its client gets the answer “cancelled”.`;

function Waiter({ id, done }) {
	const status = useAsk({ op: "status", request: id }, 5000);
	const why = useAsk({ op: "why", request: id }, 5000);
	const it = status.error ? null : status.value;
	return html`<aside aria-label=${`Request ${id}`}><h2>${id}</h2>
		${!it && !status.error && html`<${Loading} what=${id} />`}
		${it?.state === "waiting" ? html`
			<${Facts} pairs=${[["wants", shape(it.resources)], ["since", when(it.since)], ["gives up at", `${when(it.deadline)}, ${until(it.deadline)} from now`],
				["priority", it.priority], ["tenant", it.tenant], ["policy", html`<${Policy} name=${it.policy_rule_uri} />`]]} />
			<p class="buttons">${it.tenant === session.value?.tenant && html`<${Action} label="Cancel" title=${`Cancel request ${id}`} right="lease" destroys say=${cancelWords} words=${["cancel", id]} done=${() => {
				status.again();
				done();
			}} message=${{ op: "cancel", request: id }} />`}
				<a class="button" href=${to("whatif") + `?request=${encodeURIComponent(id)}`}>What if…</a> <a class="button" href=${to("why", id)}>Why</a></p>`
			: it ? html`<${Empty}>It waits no longer: <a href=${to("leases", id)}>see the lease</a>.<//>`
			: status.error ? html`<${Empty}>It waits no longer. <a href=${to("why", id)}>See its outcome</a>.<//>` : null}
		${why.value && it && html`<${Awaited} why=${why.value} />`}
		<${Section} title="Why it waits" found=${why} what="the reasons">${(value) => html`<${Reasons} why=${value} />`}<//>
		<${Copies} words=${["status", id]} value=${it} />
	</aside>`;
}

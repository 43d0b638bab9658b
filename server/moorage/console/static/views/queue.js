// Queue: who waits, for what, behind whom, and why; a waiter can be withdrawn.
import { moment, shape, span } from "../format.js";
import { ListingTable, useListing } from "../listing.js";
import { to } from "../router.js";
import { session } from "../session.js";
import { ask } from "../socket.js";
import { Action, Command, Copies, Empty, Facts, Loaded, Loading, Policy, Section, filters, html, useEvery, useLoaded } from "../ui.js";
import { Reasons } from "./reasons.js";

export function Queue({ rest, query }) {
	const cluster = query.get("cluster") || "";
	const listing = useListing({ op: "queue", ...(cluster ? { cluster } : {}) }, "waiting", (row) => row.request, 3000);
	const now = Date.now() / 1000;
	return html`
		<form class="tools" onSubmit=${filters("queue")}><label>May go to cluster <input name="cluster" defaultValue=${cluster} /></label><button type="submit">Filter</button>
			<${Command} words=${["moorage", "queue"]} /></form>
		<div class="split">
			<div><${ListingTable} label="Queue" listing=${listing} keyed=${(row) => row.request}
				heads=${["request", "position", "waits", "wants", "blocked by", "expected", "priority", "tenant", "policy"]}
				cells=${(row) => [row.request, row.position, span(now - row.since), shape(row.resources), row.blocked_by || row.blocked?.by || "capacity",
					row.expected_at ? `in ${span(row.expected_at - now)}` : "not known", row.priority, row.tenant, row.policy_rule_uri]}
				address=${(row) => to("queue", row.request)} current=${rest[0]} empty="The queue is empty." /></div>
			${rest[0] ? html`<${Waiter} key=${rest[0]} id=${rest[0]} done=${listing.refresh} />` : null}
		</div>`;
}

function Waiter({ id, done }) {
	const status = useLoaded(() => ask({ op: "status", request: id }), [id]);
	const why = useLoaded(() => ask({ op: "why", request: id }), [id]);
	useEvery(() => {
		status.again();
		why.again();
	}, 5000, [id]);
	const it = status.error ? null : status.value;
	const now = Date.now() / 1000;
	return html`<aside aria-label=${`Request ${id}`}><h2>${id}</h2>
		${!it && !status.error ? html`<${Loading} what=${id} />` : null}
		${it?.state === "waiting" ? html`
			<${Facts} pairs=${[["wants", shape(it.resources)], ["since", moment(it.since)], ["waits until", `${moment(it.deadline)}, ${span(it.deadline - now)} from now`],
				["priority", it.priority], ["tenant", it.tenant], ["policy", html`<${Policy} name=${it.policy_rule_uri} />`]]} />
			<p class="buttons">${it.tenant === session.value?.tenant && html`<${Action} label="Cancel" title=${`Cancel request ${id}`} words=${["moorage", "cancel", id]} done=${() => {
				status.again();
				done();
			}} message=${{ op: "cancel", request: id }} />`}
				<a class="button" href=${to("whatif") + `?request=${encodeURIComponent(id)}`}>What if…</a> <a class="button" href=${to("why", id)}>Why</a></p>`
			: it ? html`<${Empty}>It waits no longer: <a href=${to("leases", id)}>see the lease</a>.<//>`
			: status.error ? html`<${Empty}>It waits no longer. <a href=${to("why", id)}>See what became of it</a>.<//>` : null}
		<${Section} title="Why it waits"><${Loaded} found=${why} what="the reasons">${(value) => html`<${Reasons} why=${value} />`}<//><//>
		<${Copies} words=${["moorage", "status", id]} value=${it} />
	</aside>`;
}

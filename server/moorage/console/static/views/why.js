// Why: the last decisions, and one of them on one screen; it opens in the playground with the fleet as it was.
import { useState } from "preact/hooks";
import { brief, places, shape, span, when } from "../format.js";
import { ListingTable, useListing } from "../listing.js";
import { go, to } from "../router.js";
import { http } from "../session.js";
import { ask } from "../socket.js";
import { Command, Empty, Loading, Panel, Raw, Refused, Grid, Scroll, Loaded, Section, State, filters, html, useEvery, useLoaded } from "../ui.js";
import { Reasons } from "./reasons.js";

const UNSERVED_MAX = 25;
const STATES = ["", "granted", "queued", "refused", "requeued", "ended"];

export function Why({ rest, query }) {
	const state = query.get("state") || "";
	const policy = query.get("policy") || "";
	const given = { ...(state ? { state } : {}), ...(policy ? { policy_rule_uri: policy } : {}) };
	const listing = useListing({ op: "decisions", filters: given }, "decisions", (row) => `${row.request} ${row.seq ?? ""}`, 4000);
	const show = (event) => {
		event.preventDefault();
		const id = event.currentTarget.subject.value.trim();
		if (id) go(to("why", id));
	};
	return html`
		<div class="tools">
			<form onSubmit=${show}><label>Id of a request or lease <input name="subject" defaultValue=${rest[0] || ""} /></label><button type="submit">Why?</button></form>
			<form onSubmit=${filters("why")} key=${state + policy}><label>State <select name="state" defaultValue=${state}>${STATES.map((each) => html`<option value=${each} selected=${each === state}>${each || "all"}</option>`)}</select></label>
				<label>Policy <input name="policy" defaultValue=${policy} /></label><button type="submit">Filter</button></form>
		</div>
		<div class="split">
			<div>${state || policy ? null : html`<${Unserved} />`}
			<${ListingTable} label="Decisions" listing=${listing} keyed=${(row) => `${row.request} ${row.seq ?? ""}`} current=${rest[0]}
				heads=${["request", "when", "state", "wanted", "why", "policy"]}
				cells=${(row) => [row.request, html`<span class="nowrap">${when(row.at)}</span>`, html`<${State} state=${row.state} />`, shape(row.resources), row.reason || row.code || "", row.policy_rule_uri]}
				address=${(row) => to("why", row.request)} empty="The ledger has no such decision." /></div>
			${rest[0] ? html`<${Decision} key=${rest[0]} id=${rest[0]} />` : null}
		</div>`;
}

/** Those who did not get what they asked for, newest first: most come to Why because of one of them. */
function Unserved() {
	const found = useLoaded(async () => {
		const [{ decisions }, { waiting }] = await Promise.all([ask({ op: "decisions", filters: { state: "refused" }, limit: UNSERVED_MAX }), ask({ op: "queue", limit: 100 })]);
		const waits = waiting.map((each) => ({ ...each, at: each.since, state: "waiting", reason: `for ${span(Date.now() / 1000 - each.since)}, at position ${each.position}` }));
		return [...decisions, ...waits].sort((a, b) => b.at - a.at).slice(0, UNSERVED_MAX);
	}, []);
	useEvery(found.again, 15000, []);
	return html`<${Section} title="Refused and waiting"><${Loaded} found=${found} what="refusals">${(rows) => (!rows.length ? html`<${Empty}>No request was refused of late, and none waits.<//>`
		: html`<${Scroll} label="Refused and waiting" few><${Grid} label="Refused and waiting" heads=${["request", "when", "state", "wanted", "why"]} rows=${rows.map((row) => [html`<a class="row" href=${to("why", row.request)}>${brief(row.request)}</a>`,
			html`<span class="nowrap">${when(row.at)}</span>`, html`<${State} state=${row.state} />`, shape(row.resources), row.reason || row.code || ""])} /><//>`)}<//><//>
		<h2>All decisions</h2>`;
}

function Decision({ id }) {
	const found = useLoaded(() => ask({ op: "why", request: id }), [id]);
	return html`<${Panel} title=${`Decision ${id}`} found=${found}>
		${(why) => !why.state && !why.reason && !why.history ? html`<${Empty}>Nothing is known of ${id}.<//>`
			: html`<p class="buttons"><a class="button" href=${to("playground") + `?decision=${encodeURIComponent(id)}`}>Open in the playground</a>
					${why.lease ? html`<a class="button" href=${to("leases", id)}>The lease</a>` : null} <${Command} words=${["moorage", "why", id]} /></p>
				<${Reasons} why=${why} /><${Compare} id=${id} /><${Raw} value=${why} />`}
	<//>`;
}

/** What another version says to the same request, on the fleet as it was. */
function Compare({ id }) {
	const [answer, setAnswer] = useState(null);
	const run = async (event) => {
		event.preventDefault();
		const uri = event.currentTarget.version.value.trim();
		setAnswer({ busy: true });
		try {
			const [{ code }, then] = await Promise.all([http("GET", `/policy/${encodeURIComponent(uri)}`), ask({ op: "decision_fleet", request: id })]);
			const { adhoc, id: of, policy_rule_uri, ...request } = then.request;
			const told = await http("POST", "/console/playground", { code, fleet: { decision: id }, requests: [request] });
			setAnswer({ uri, told: told.results[0] });
		} catch (error) {
			setAnswer({ error });
		}
	};
	const told = answer?.told;
	return html`<${Section} title="Another version">
		<form class="tools" onSubmit=${run}><label>Version <input name="version" required placeholder="name:version-tag" /></label><button type="submit" disabled=${answer?.busy}>Compare</button></form>
		${answer?.busy ? html`<${Loading} what="its answer" />` : null}<${Refused} error=${answer?.error} />
		${told ? html`<p>${answer.uri}: <${State} state=${told.ok ? "granted" : "refused"} /> ${told.ok ? places(told.placement) : told.reason}</p>` : null}
	<//>`;
}

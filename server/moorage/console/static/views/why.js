// Why: the last decisions, and one of them on one screen.
import { brief, count, places, shape, some, until, when } from "../format.js";
import { ListingTable, useListing } from "../listing.js";
import { go, to } from "../router.js";
import { codeOf, http, lacks } from "../session.js";
import { ask } from "../socket.js";
import { Button, Choice, Command, Empty, Grid, Loaded, Panel, Policy, Raw, Section, State, Text, filters, handle, html, useAnswer, useAsk, useLoaded } from "../ui.js";
import { Reasons } from "./reasons.js";

/** Refusals that are read: the newest of each kind is a row. */
const LOOKED_AT = 100;
const PRINTING = "\n\nfrom moorage.policy import print_scores\n\nprint_scores()\n";
const SCORED = /^(\S+): score (\S+)(?: \((.*)\))?, (.*) free$/;
const STATES = [["", "all"], "granted", "queued", "refused", "requeued", "ended"];

const reasoned = (row) => html`<b>${shape(row.resources)}</b>: ${(row.reason || row.code).replace(/^(.{300}).+/, "$1…")}`;

export function Why({ rest, query }) {
	const state = query.get("state") || "";
	const policy = query.get("policy") || "";
	const given = { ...(state ? { state } : {}), ...(policy ? { policy_rule_uri: policy } : {}) };
	const listing = useListing({ op: "decisions", filters: given }, "decisions", (row) => `${row.request} ${row.seq ?? ""}`, 4000);
	const columns = rest[0] ? 4 : 5;
	const show = handle((form) => {
		const id = form.subject.value.trim();
		if (id) go(to("why", id));
	});
	return html`
		<div class="tools">
			<form onSubmit=${show}><label>Id of a request or lease <input name="subject" defaultValue=${rest[0] || ""} /></label><button type="submit">Why?</button></form>
			<form onSubmit=${filters("why")} key=${state + policy}><${Choice} label="State" name="state" value=${state} options=${STATES} />
				<label>Policy <input name="policy" defaultValue=${policy} /></label><button type="submit">Filter</button></form>
		</div>
		<div class="split">
			<div>${state || policy ? null : html`<${Unserved} title="Refused and waiting" most=${8} waits /><h2>All decisions</h2>`}
			<${ListingTable} label="Decisions" listing=${listing} keyed=${(row) => `${row.request} ${row.seq ?? ""}`} current=${rest[0]}
				heads=${["request", "when", "state", "wanted, and why", "policy"].slice(0, columns)}
				cells=${(row) => [row.request, html`<span class="nowrap">${when(row.at)}</span>`, html`<${State} state=${row.state} />`, reasoned(row), row.policy_rule_uri && html`<${Policy} name=${row.policy_rule_uri} />`].slice(0, columns)}
				address=${(row) => to("why", row.request)} empty="The ledger has no such decision." /></div>
			${rest[0] && html`<${Decision} key=${rest[0]} id=${rest[0]} />`}
		</div>`;
}

/** Refusals by kind: the newest, with their number. */
function kinds(rows) {
	const found = new Map();
	for (const row of rows) {
		const name = `${shape(row.resources)}\n${row.reason || row.code}\n${row.policy_rule_uri}`;
		const first = found.get(name);
		if (first) first.times += 1;
		else found.set(name, { ...row, times: 1 });
	}
	return [...found.values()];
}

/** Requests that were refused or gave up, newest first. `waits`: also waiting ones. */
export function Unserved({ title, most, waits }) {
	const found = useLoaded(async () => {
		const { decisions } = await ask({ op: "decisions", filters: { state: "refused" }, limit: LOOKED_AT });
		const { waiting } = waits ? await ask({ op: "queue", limit: 100 }) : { waiting: [] };
		const queued = waiting.map((each) => ({ ...each, at: each.since, state: "waiting", reason: `for ${until(each.since)}, at position ${each.position}` }));
		return { refused: decisions, rows: [...kinds(decisions), ...queued].sort((a, b) => b.at - a.at) };
	}, [], 60000);
	return html`<${Section} title=${title} found=${found} what="refusals">${({ refused, rows }) => html`
		${refused.length ? html`<p class="note">Of the last ${some(refused.length, "refused request")}, since ${when(refused.at(-1).at)}, the newest of each kind.</p>` : null}
		<${Grid} wordy label=${title} most=${most} empty=${`No request was refused recently${waits ? ", and none waits" : ""}.`} heads=${["request", "when", "state", "wanted, and why"]} rows=${rows.map((row) => [html`<a class="row" href=${to("why", row.request)}>${brief(row.request)}</a>`,
			html`<span class="nowrap">${when(row.at)}</span>`, html`<${State} state=${row.state} />${row.times > 1 ? html` <span class="note nowrap">${count(row.times)} times</span>` : ""}`, reasoned(row)])} />`}<//>`;
}

function Decision({ id }) {
	const found = useAsk({ op: "why", request: id });
	return html`<${Panel} title=${`Decision ${id}`} found=${found}>
		${(why) => !why.state && !why.reason && !why.history ? html`<${Empty}>Nothing is known of ${id}.<//>`
			: html`<p class="buttons"><a class="button" href=${to("playground") + `?decision=${encodeURIComponent(id)}`}>Open in the playground</a>
					${why.lease && html`<a class="button" href=${to("leases", id)}>The lease</a>`} <${Command} words=${["why", id]} /></p>
				<${Reasons} why=${why} /><${Scores} id=${id} /><${Compare} id=${id} /><${Raw} value=${why} />`}
	<//>`;
}

/** Another version's answer to the same request, on the fleet as it was. */
function Compare({ id }) {
	const [found, run] = useAnswer();
	const compare = handle((form) => {
		const uri = form.version.value.trim();
		run(async () => ({ uri, it: (await replayed(id, uri)).results[0] }));
	});
	return html`<${Section} title="Another version">
		<form class="tools" onSubmit=${compare}><label>Version <input name="version" required placeholder="name:version-tag" /></label><button type="submit" disabled=${found.busy}>Compare</button></form>
		<${Loaded} found=${found} what="its answer">${({ uri, it }) => html`<p>${uri}: <${State} state=${it.ok ? "granted" : "refused"} /> ${it.ok ? places(it.placement) : it.reason}</p>`}<//><//>`;
}

/** Decide a request again on the fleet as it was; `uri`: the version to use. */
async function replayed(id, uri, more = "") {
	const then = await ask({ op: "decision_fleet", request: id });
	const { adhoc, id: of, policy_rule_uri, ...request } = then.request;
	const code = await codeOf(uri || policy_rule_uri);
	return http("POST", "/console/playground", { code: code + more, fleet: { decision: id }, requests: [request] });
}

/** The scores of the best nodes by its policy, and their free capacity. */
function Scores({ id }) {
	const [found, run] = useAnswer();
	return html`<${Section} title="Scores"><p class="buttons"><${Button} off=${lacks("policy")} disabled=${found.busy} onClick=${() => run(() => replayed(id, "", PRINTING))}>Score the nodes as they were<//></p>
		<${Loaded} found=${found} what="the scores">${({ prints }) => (prints.length ? html`<${Scored} prints=${prints} />` : html`<${Empty}>Its policy prints no scores.<//>`)}<//><//>`;
}

/** The output of `print_scores`: a column for each term of the policy. */
function Scored({ prints }) {
	const lines = prints.join("\n").split("\n");
	const rows = lines.map((line) => SCORED.exec(line)).filter(Boolean);
	const terms = (row) => (row[3] || "").split(", ").filter(Boolean);
	const other = lines.filter((line) => line && !SCORED.test(line)).join("\n");
	return html`${rows.length ? html`<${Grid} label="Scores of the best nodes" heads=${["node", "score", ...terms(rows[0]).map((each) => each.replace(/ \S+$/, "")), "free"]}
		rows=${rows.map((row) => [row[1], row[2], ...terms(row).map((each) => each.split(" ").at(-1)), row[4]])} />` : null}${other ? html`<${Text} label="What else it printed" text=${other} />` : null}`;
}

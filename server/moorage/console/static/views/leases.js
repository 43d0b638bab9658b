// Leases: who holds what until when; one of them with its output.
import { useEffect, useRef, useState } from "preact/hooks";
import { moment, places, span } from "../format.js";
import { ListingTable, useListing } from "../listing.js";
import { go, to } from "../router.js";
import { session } from "../session.js";
import { ask, listen } from "../socket.js";
import { Timeline } from "../timeline.js";
import { Action, Command, Empty, Facts, Loading, Panel, Policy, Raw, Refused, Section, State, Text, filters, html, useEvery, useLoaded } from "../ui.js";

const STATES = ["", "granted", "starting", "active", "failing", "queued", "warm", "ending", "ended"];
const NAMED = ["state", "cluster", "node_id", "policy_rule_uri"];
const TAIL_BYTES = 8192;

export function Leases({ rest, query }) {
	const given = Object.fromEntries(NAMED.map((name) => [name, query.get(name) || ""]).filter(([, value]) => value));
	const listing = useListing({ op: "leases", filters: given }, "leases", (row) => row.id, 5000);
	const [brush, setBrush] = useState(null);
	const wait = useRef(0);
	const refresh = useRef(listing.refresh);
	refresh.current = listing.refresh;
	useEffect(() => listen("leases", () => {
		if (wait.current) return; // One question a second answers all.
		wait.current = setTimeout(() => {
			wait.current = 0;
			refresh.current();
		}, 1000);
	}), []);
	const now = Date.now() / 1000;
	const shown = listing.rows && brush ? { ...listing, rows: listing.rows.filter((row) => row.granted_at <= brush[1] && row.expires_at >= brush[0]) } : listing;
	return html`
		<form class="tools" onSubmit=${filters("leases")} key=${query.toString()}>
			<label>State <select name="state">${STATES.map((each) => html`<option value=${each} selected=${each === (given.state || "")}>${each || "all that hold"}</option>`)}</select></label>
			<label>Cluster <input name="cluster" defaultValue=${given.cluster} /></label><label>Node <input name="node_id" defaultValue=${given.node_id} /></label>
			<label>Policy <input name="policy_rule_uri" defaultValue=${given.policy_rule_uri} /></label>
			<button type="submit">Filter</button>
			<${Action} label="Flush warm leases" title="Flush all that is kept warm" message=${{ op: "flush" }} words=${["moorage", "flush"]} done=${listing.refresh} />
			<${Command} words=${["moorage", "leases", ...(given.state ? ["--state", given.state] : []), ...(given.cluster ? ["--cluster", given.cluster] : [])]} />
		</form>
		${listing.rows?.length ? html`<${Timeline} rows=${listing.rows} open=${(id) => go(to("leases", id))} brushed=${setBrush} />` : null}
		<div class="split">
			<div><${ListingTable} label="Leases" listing=${shown} keyed=${(row) => row.id} current=${rest[0]}
				heads=${["lease", "state", "where", "ends in", "tenant", "policy"]}
				cells=${(row) => [row.id, html`<${State} state=${row.gone ? "ended" : row.state} />`, places(row.placement), row.gone ? "–" : span(row.expires_at - now), row.tenant, row.policy_rule_uri]}
				address=${(row) => to("leases", row.id)} empty="There is no such lease." /></div>
			${rest[0] ? html`<${Lease} key=${rest[0]} id=${rest[0]} changed=${listing.refresh} />` : null}
		</div>`;
}

function Lease({ id, changed }) {
	const found = useLoaded(() => ask({ op: "why", lease: id }), [id]);
	useEffect(() => listen("leases", (_, data) => data?.id === id && found.again()), [id]);
	useEvery(found.again, 5000, [id]);
	return html`<${Panel} title=${`Lease ${id}`} found=${found}>${({ lease, reason }) => (lease ? html`<${Held} lease=${lease} reason=${reason} changed=${() => {
		found.again();
		changed();
	}} />` : html`<${Empty}>There is no lease ${id}, or it ended long ago. <a href=${to("why", id)}>See what is known of it</a>.<//>`)}<//>`;
}

function Held({ lease, reason, changed }) {
	const { id, workload: work } = lease;
	const now = Date.now() / 1000;
	const own = lease.tenant === session.value?.tenant;
	return html`<p><${State} state=${lease.state} /> ${reason || lease.reason || ""}</p>
		<${Facts} pairs=${[["where", places(lease.placement)], ["granted", moment(lease.granted_at)], ["expires", `${moment(lease.expires_at)}, ${span(lease.expires_at - now)} ${lease.expires_at > now ? "from now" : "ago"}`],
			["fencing", lease.fencing], ["tenant", lease.tenant], ["policy", html`<${Policy} name=${lease.policy_rule_uri} />`],
			["tried again", lease.retry_at ? moment(lease.retry_at) : ""]]} />
		<p class="buttons">${!own || ["ended", "ending"].includes(lease.state) ? null : html`<${Action} label="Release" title=${`Release lease ${id}`} words=${["moorage", "release", id]} done=${changed} message=${{ op: "release", lease: id }} />`}
			<a class="button" href=${to("why", id)}>Why here</a> <${Command} words=${["moorage", "status", id]} /></p>
		${work ? html`<${Section} title="Workload">
			<${Facts} pairs=${[["backend", work.backend], ["phase", work.phase], ["attempt", `${work.attempt} of ${work.attempts_max}`], ["endpoint", work.endpoint], ["detail", work.detail],
				["taken over warm", work.warm ? "yes" : ""], ["last end", work.outcome ? `${work.outcome.phase}, code ${work.outcome.exit_code ?? "–"}: ${work.outcome.detail}` : ""]]} />
			${own && html`<${Output} id=${id} tail=${work.outcome?.log_tail} /><${Exec} id=${id} />`}<//>` : null}
		<${Raw} value=${lease} />`;
}

/** The end of what a workload wrote. */
function Output({ id, tail }) {
	const logs = useLoaded(() => ask({ op: "logs", lease: id, offset: -TAIL_BYTES }), [id]);
	useEvery(logs.again, 3000, [id]);
	const text = logs.value?.text ?? (logs.error && tail ? tail.join("\n") : undefined);
	return html`<h3>Output</h3>
		${text ? html`<${Text} label="Output of the workload" text=${text} />` : text === "" ? html`<${Empty}>It has written nothing yet.<//>`
			: logs.error ? html`<${Refused} error=${logs.error} />` : html`<${Loading} what="its output" />`}
		<p class="buttons"><${Command} words=${["moorage", "logs", id]} /></p>`;
}

function Exec({ id }) {
	const [answer, setAnswer] = useState(null);
	const run = async (event) => {
		event.preventDefault();
		setAnswer({ busy: true });
		try {
			setAnswer(await ask({ op: "exec", lease: id, command: ["sh", "-c", event.target.command.value], timeout_seconds: 20 }));
		} catch (error) {
			setAnswer({ error });
		}
	};
	return html`<form class="tools" onSubmit=${run}><label>Run inside <input name="command" required placeholder="nvidia-smi" /></label><button type="submit">Run</button></form>
		${answer?.busy ? html`<${Loading} what="the command" />` : answer?.error ? html`<${Refused} error=${answer.error} />`
			: answer ? html`<p>It ended with ${answer.exit_code}.</p><${Text} label="Output of the command" text=${answer.output} />` : null}`;
}

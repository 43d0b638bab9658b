// What-if: the predicted effects of changes and of a request.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, percent, places, some } from "../format.js";
import { fleet, follow, nodeName } from "../map/model.js";
import { useSignal } from "../signal.js";
import { to } from "../router.js";
import { Failure, http } from "../session.js";
import { ask } from "../socket.js";
import { Button, Command, Facts, Grid, Loaded, Means, Raw, Section, State, handle, html, typed, useAnswer, useLoaded } from "../ui.js";

const CLUSTER = { name: "cluster", label: "Cluster", list: "clusters", required: true };
const TENANT = { name: "tenant", label: "Tenant", required: true };
const AMOUNT = { type: "number", min: 0, step: "any" };
const PROJECT = { name: "project", label: "Project" };
const account = ({ tenant, project }) => (project ? { tenant, project } : { tenant });
const named = ({ tenant, project }) => (project ? `${tenant}/${project}` : tenant);

/** The kinds of changes: their list in the message, fields, and command. */
const KINDS = [
	{
		name: "Add nodes", list: "add_nodes",
		fields: [CLUSTER, { name: "like", label: "Copy of node", required: true }, { name: "count", label: "How many", type: "number", min: 1, value: "1", required: true }],
		part: ({ cluster, like, count }) => ({ cluster, like, count: Number(count) }),
		words: ({ cluster, like, count }) => ["--add-nodes", `${cluster}/${like}:${count}`],
	},
	...["Uncordon", "Cordon", "Drain"].map((name) => ({
		name, list: name.toLowerCase(),
		fields: [CLUSTER, { name: "node", label: "Node (empty: all nodes)" }],
		part: ({ cluster, node }) => ({ cluster, ...(node ? { node } : {}) }),
		words: ({ cluster, node }) => [`--${name.toLowerCase()}`, node ? `${cluster}/${node}` : cluster],
	})),
	{
		name: "Set a quota", list: "quotas",
		fields: [TENANT, PROJECT, { name: "gpus", label: "GPUs (empty: no limit)", ...AMOUNT }, { name: "weight", label: "Weight", ...AMOUNT, value: "1", required: true }],
		part: (it) => ({ ...account(it), weight: Number(it.weight), ...(it.gpus ? { nominal: { gpu_milli: Math.round(it.gpus * 1000) } } : {}) }),
		words: (it) => ["--quota", `${named(it)} weight=${it.weight}${it.gpus ? ` gpus=${it.gpus}` : ""}`],
	},
	{
		name: "Remove a quota", list: "quotas", fields: [TENANT, PROJECT],
		part: (it) => ({ ...account(it), remove: true }),
		words: (it) => ["--quota", `${named(it)} remove`],
	},
	{
		name: "Swap a policy", list: "policies",
		fields: [{ name: "before", label: "Instead of", list: "policies", required: true }, { name: "after", label: "use", list: "policies", required: true }],
		part: ({ before, after }) => [before, after],
		words: ({ before, after }) => ["--swap", `${before}=${after}`],
	},
];
const FIRST = { policy: "", gpus: "1", nodes: "1", models: "", wait: "0", priority: "0", more: "" };

function changed(changes) {
	const found = {};
	for (const { kind, values } of changes) (found[kind.list] ||= []).push(kind.part(values));
	return found.policies ? { ...found, policies: Object.fromEntries(found.policies) } : found;
}

/** The request of the form, or undefined without a policy. */
function requested({ policy, gpus, nodes, models, wait, priority, more }) {
	if (!policy) return undefined;
	const resources = { gpus: Number(gpus), ...(nodes === "1" ? {} : { nodes: Number(nodes) }), ...(models ? { models: models.split(",").map((each) => each.trim()) } : {}) };
	const lease = { ...(wait === "0" ? {} : { wait_seconds: Number(wait) }), ...(priority === "0" ? {} : { priority: Number(priority) }) };
	try {
		return { policy_rule_uri: policy, inputs: {}, resources, lease, ...JSON.parse(more || "{}") };
	} catch (error) {
		throw new Failure(`The other fields of the request are not valid JSON. ${error.message}`, "bad_json");
	}
}

/** The equivalent command; null if a field is missing. */
function commanded(request, changes) {
	const { policy, gpus, nodes, models, wait, priority, more } = request;
	const whole = changes.every(({ kind, values }) => kind.fields.every(({ name, required }) => !required || values[name]));
	if (!whole || (!policy && !changes.length)) return null;
	const plain = ["--policy", policy, "--gpus", gpus, "--wait", wait, "--priority", priority];
	try {
		const asked = !policy ? [] : nodes === "1" && !more && !models ? plain : ["--request", JSON.stringify(requested(request))];
		return ["whatif", ...asked, ...changes.flatMap(({ kind, values }) => kind.words(values))];
	} catch {
		return null; // The other fields are not valid JSON yet.
	}
}

export function WhatIf({ query }) {
	const waits = query.get("request");
	const [changes, setChanges] = useState([]);
	const [request, setRequest] = useState(FIRST);
	const [answer, run, forget] = useAnswer();
	const policies = useLoaded(async () => (await Promise.all([http("GET", "/policy"), http("GET", "/policy-alias")])).flat().map((each) => each.alias || each.policy_rule_uri), []);
	const clusters = useLoaded(async () => (await ask({ op: "fleet", limit: 100 })).clusters.map((each) => each.cluster_id), []);
	const set = (at, name) => typed((value) => setChanges((old) => old.map((each, n) => (n === at ? { ...each, values: { ...each.values, [name]: value.trim() } } : each))));
	const add = (kind) => setChanges((old) => [...old, { kind, values: Object.fromEntries(kind.fields.map(({ name, value = "" }) => [name, value])) }]);
	useEffect(follow, []);
	const map = useSignal(fleet);
	const begun = useRef(Boolean(waits));
	useEffect(() => { // The initial example: one more node of the largest size, and a request that fills it.
		if (begun.current || !map?.ids.length || !policies.value) return;
		begun.current = true;
		const sizes = map.ids.map((_, n) => map.first[n + 1] - map.first[n]);
		const n = sizes.indexOf(Math.max(...sizes));
		setRequest({ ...FIRST, policy: policies.value.at(-1) || "", gpus: String(sizes[n]), models: map.models[map.model[map.first[n]]] || "" });
		setChanges([{ kind: KINDS[0], values: { cluster: map.clusters[map.cluster[n]], like: map.ids[n], count: "1" } }]);
		many.current = 1; // The focus stays where it is.
	}, [map, policies.value]);
	const form = useRef(null);
	const many = useRef(0);
	useEffect(() => { // For the keyboard: focus the last change, or the buttons that add one.
		if (many.current !== changes.length) ([...form.current.querySelectorAll(".change")].pop() || form.current).querySelector("input, .kinds button").focus();
		many.current = changes.length;
	}, [changes.length]);
	const begin = handle(() => run(async () => {
		const outcome = await ask({ op: "whatif", request: requested(request), change: changed(changes) });
		return { outcome, spread: map && (await spread(map, changes, outcome)) };
	}));
	const field = (name, label, more) => html`<label>${label} <input value=${request[name]} ...${more} onInput=${typed((value) => setRequest({ ...request, [name]: value.trim() }))} /></label>`;
	const number = (name, label, min) => field(name, label, { type: "number", min, required: true });
	const words = commanded(request, changes);
	return html`
		<p>Predicts the effects of changes to the present fleet, without making them.${waits ? html` Request <a href=${to("queue", waits)}>${waits}</a> waits: would it start?` : ""}</p>
		<div class="playground"><form class="form" ref=${form} onSubmit=${begin}>
			${Object.entries({ policies: policies.value, models: map?.models, clusters: clusters.value }).map(([id, all]) => html`<datalist id=${id}>${(all || []).map((each) => html`<option value=${each} />`)}</datalist>`)}
			${changes.map(({ kind, values }, at) => html`<fieldset class="change"><legend>${at + 1}. ${kind.name}</legend>
				${kind.fields.map(({ name, label, value, ...more }) => html`<label>${label} <input ...${more} value=${values[name]} onInput=${set(at, name)} /></label>`)}
				<${Button} aria-label=${`Leave out change ${at + 1}`} onClick=${() => setChanges((old) => old.filter((_, n) => n !== at))}>Leave out<//></fieldset>`)}
			<p class="buttons kinds">Change: ${KINDS.map((kind) => html`<${Button} onClick=${() => add(kind)}>${kind.name}<//>`)}</p>
			<fieldset><legend>${waits ? "Another request" : "Request"}</legend>${field("policy", "Policy", { list: "policies", placeholder: "empty: no request" })}<${Means} name=${request.policy} />
				${number("gpus", "GPUs on each node", 0)}${number("nodes", "Nodes", 1)}${field("models", "Models", { list: "models", placeholder: "any" })}${number("wait", "Seconds to wait", 0)}${number("priority", "Priority")}
				${field("more", "Other fields (JSON)", { placeholder: '{"inputs": {}}' })}</fieldset>
			<p class="buttons"><${Button} type="submit" class="primary" off=${request.policy || changes.length ? "" : "Add a change, or name a policy for a request."} disabled=${answer.busy}>What if?<//><${Button} onClick=${() => {
				setChanges([]);
				setRequest(FIRST);
				forget();
				begun.current = true;
			}}>Clear the form<//>${words && html`<${Command} words=${words} />`}</p>
		</form>
		<div><${Loaded} found=${answer} what="what would happen">${(it) => html`<${Told} it=${it.outcome} spread=${it.spread} waits=${waits} />`}<//></div></div>`;
}

/** How full and how scattered the fleet is before and after. `it`: The map. */
async function spread(it, changes, outcome) {
	const nodes = new Map(it.ids.map((_, n) => [nodeName(it, n), [it.free[n], it.first[n + 1] - it.first[n]]]));
	const measured = () => [...nodes.values()].reduce((sum, [free, all]) => ({ all: sum.all + all, free: sum.free + free, partly: sum.partly + (free < all ? free : 0) }), { all: 0, free: 0, partly: 0 });
	const before = measured();
	for (const { kind, values } of changes) {
		const [, all] = nodes.get(`${values.cluster}/${values.like}`) || [];
		if (kind.list === "add_nodes" && all) for (let n = 1; n <= Number(values.count); n++) nodes.set(`${values.cluster}/${values.like}+${n}`, [all, all]);
	}
	const gone = [...outcome.preempted, ...outcome.drained].slice(0, 100).map((each) => ask({ op: "status", lease: each.lease }).catch(() => ({})));
	const put = (placement, sign) => (placement || []).forEach((share) => {
		const node = nodes.get(`${share.cluster_id}/${share.node_id}`);
		if (node) node[0] = Math.max(0, Math.min(node[1], node[0] - sign * Math.ceil(((share.gpus?.length || 0) * (share.gpu_milli ?? 1000)) / 1000)));
	});
	for (const lease of await Promise.all(gone)) put(lease.placement, -1);
	for (const { kind, values } of changes) if (/^(cordon|drain)$/.test(kind.list)) for (const [name, node] of nodes) if (values.node ? name === `${values.cluster}/${values.node}` : name.startsWith(`${values.cluster}/`)) node[0] = 0;
	for (const each of [...outcome.granted, ...outcome.drained, outcome.answer || {}]) put(each.placement, 1);
	return [["now", before], ["then", measured()]];
}

function Told({ it, spread: measured, waits }) {
	const { answer, warnings, others, other_tenants: tenants } = it;
	const rows = [
		...it.granted.map((each) => ["starts", each.request, places(each.placement)]),
		...it.preempted.map((each) => ["gives way", each.lease, `to ${each.by || "another tenant"}`]),
		...it.drained.map((each) => ["is drained", each.lease, each.becomes + (each.placement ? ` to ${places(each.placement)}` : each.becomes === "stays" ? " until it ends" : "")]),
	];
	const starts = it.granted.find((each) => each.request === waits);
	return html`<${Section} title="What would happen">
		${warnings.map((each) => html`<p class="note">${each}</p>`)}
		${waits && html`<p><b>${waits} ${starts ? `would start on ${places(starts.placement)}` : "would not start"}.</b></p>`}
		${answer && html`<p><${State} state=${answer.state} /> ${answer.reason || ""}</p><${Facts} pairs=${[["placement", answer.placement && places(answer.placement)], ["place in the queue", answer.position], ["code", answer.code], ["data", answer.data && JSON.stringify(answer.data)]]} />`}
		<${Grid} label="What would differ" empty="Nothing else that you may see would change." heads=${["what", "lease or request", "outcome"]} rows=${rows.map(([what, id, then]) => [what, html`<a href=${to("why", id)}>${id}</a>`, then])} />
		${measured && html`<${Grid} label="Allocation and fragmentation" heads=${["when", "GPUs", "used in whole or part", "wholly free", "of these on partly used nodes"]} rows=${measured.map(([name, { all, free, partly }]) => [name, count(all), percent(all ? 1 - free / all : 0), count(free), `${count(partly)} (fragmentation ${percent(free ? partly / free : 0)})`])} />`}
		${Object.keys(others).length ? html`<p>Not listed: ${Object.entries(others).map(([kind, many]) => `${count(many)} ${kind}`).join(", ")}${tenants ? `, of ${some(tenants, "other tenant")}` : ""}.</p>` : null}
		<${Raw} value=${it} />
	<//>`;
}

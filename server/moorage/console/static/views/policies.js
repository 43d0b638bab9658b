// Policies: versions, aliases, canaries, shadows; activate and roll back
// after a dialog with the difference.
import { useEffect, useState } from "preact/hooks";
import { Difference } from "../difference.js";
import { count, some, when } from "../format.js";
import { Backtest, Backtested } from "../curve.js";
import { to } from "../router.js";
import { codeOf, http } from "../session.js";
import { listen } from "../socket.js";
import { Action, Command, Copies, Facts, Grid, History, Loaded, Means, Panel, Policy, Raw, Section, Text, html, typed, useAnswer, useEvery, useGet } from "../ui.js";

const at = (path, ...rest) => [path, ...rest.map(encodeURIComponent)].join("/");

export function Policies({ rest }) {
	const versions = useGet("/policy");
	const aliases = useGet("/policy-alias");
	const again = () => {
		versions.again();
		aliases.again();
	};
	useEffect(() => listen("policies", again), []);
	useEvery(again, 10000, []);
	const [part, setPart] = useState("");
	const found = (versions.value || []).filter((each) => each.policy_rule_uri.includes(part));
	const [subject] = rest;
	return html`<div class="split"><div>
		<${Section} title="Aliases" found=${aliases} what="the aliases">${(all) => html`<${Grid} wordy="rows" label="Aliases" empty="No alias is set. Activate a version to make one." heads=${["alias", "means", "since", "by", "canary", "shadow"]} current=${all.findIndex((each) => each.alias === subject)}
				rows=${all.map((each) => [html`<${Policy} row bare name=${each.alias} />`, each.policy_rule_uri, each.at ? when(each.at) : "–", each.who || "–",
					each.canary ? `${each.canary.percent} % ${each.canary.version}` : "–", each.shadow || "–"])} />`}<//>
		<${Section} title="Versions">
			<p class="tools"><label>Name contains <input value=${part} onInput=${typed(setPart)} /></label>
				<a class="button" href=${to("playground")}>New policy</a> <${Command} words=${["policy", "list"]} /></p>
			<${Loaded} found=${versions} what="the versions">${() => html`<p class="above">${some(found.length, "version")}</p><${Grid} label="Versions" most=${25} empty=${html`There is no such version. Publish one: <code>moorage policy push</code>.`} heads=${["version", "what it does"]} current=${found.findIndex((each) => each.policy_rule_uri === subject)}
					rows=${found.map((each) => [html`<${Policy} row name=${each.policy_rule_uri} />`, each.description || ""])} />`}<//>
		<//></div>
		${!subject ? null : /:.*-/.test(subject) ? html`<${Version} key=${subject} uri=${subject} aliases=${aliases.value || []} changed=${again} />`
			: html`<${Alias} key=${subject} name=${subject} changed=${again} />`}
	</div>`;
}

/** The dry run of a change of an alias: its text, and the difference of the codes. */
const compared = async (text, from, into) => {
	const [before, after] = await Promise.all([from ? codeOf(from).catch(() => "") : "", codeOf(into)]);
	return html`<p>${text} Requests under way are not affected.</p><${Difference} before=${before} after=${after} names=${[from || "nothing", into]} />`;
};
const turned = (from, into) => compared(`The alias now means ${from || "nothing"}; from then on, it means ${into}.`, from, into);

function Version({ uri, aliases, changed }) {
	const about = useGet(at("/policy", uri));
	const history = useGet(at("/policy", uri, "history"));
	const logs = useGet(at("/policy", uri, "logs"));
	const [alias, setAlias] = useState(`${uri.split(":")[0]}:stable`);
	const [percent, setPercent] = useState("10");
	const now = aliases.find((each) => each.alias === alias)?.policy_rule_uri || "";
	const printed = Object.entries(logs.value?.printed || {}).filter(([, text]) => text);
	const post = (what, more) => () => http("POST", at("/policy-alias", alias, what), { policy_rule_uri: uri, ...more });
	const means = now === uri && `${alias} already means it.`;
	const beside = { idle: means || (!now && `${alias} means no version yet: activate one first.`), done: changed };
	return html`<${Panel} title=${uri} found=${about}>${(it) => html`
		<p>${it.description || ""}<${Means} name=${uri} /></p>
		<${Facts} pairs=${[["digest", it.digest], ["tags", Array.isArray(it.tags) ? it.tags.join(", ") : it.tags],
			["paused", logs.value?.rests && JSON.stringify(logs.value.rests)]]} />
		<p class="buttons"><label>Alias <input value=${alias} onInput=${typed(setAlias)} /></label>
			<${Action} label="Activate" right="policy" title=${`Activate ${uri} as ${alias}`} idle=${means} done=${changed} dry=${() => turned(now, uri)}
				act=${post("activate")} words=${["policy", "activate", uri, "--alias", alias]} />
			<${Action} label="Shadow" right="policy" title=${`Shadow ${alias} with ${uri}`} ...${beside} dry=${() => compared(`${alias} still means ${now}. ${uri} gets the same requests in the jail, and no client sees its answers.`, now, uri)}
				act=${post("shadow")} words=${["policy", "shadow", alias, uri]} />
			<label>Percent <input type="number" min="0" max="100" step="any" value=${percent} onInput=${typed(setPercent)} /></label>
			<${Action} label="Canary" right="policy" title=${`Send ${percent} % of ${alias} to ${uri}`} ...${beside} dry=${() => compared(`${percent} % of the requests for ${alias} go to ${uri}, the others to ${now}.`, now, uri)}
				act=${post("canary", { percent: Number(percent) })} words=${["policy", "canary", alias, uri, "--percent", percent]} />
			<a class="button" href=${to("playground") + `?policy=${encodeURIComponent(uri)}`}>Open in the playground</a></p>
		<${Backtests} uri=${uri} />
		<${Section} title="Code"><${Text} label=${`Code of ${uri}`} text=${it.code} /><//>
		${printed.length ? html`<${Section} title="Recent output">${printed.map(([name, text]) => html`<h3>${name}</h3><${Text} label=${name} text=${text} />`)}<//>` : null}
		<${Section} title="History" found=${history} what="the history">${(all) => html`<${History} of=${all.map(({ at, what, who }) => ({ at, what, more: `by ${who}` }))} />`}<//>
		<${Copies} words=${["policy", "show", uri]} value=${it} />`}<//>`;
}

/** The backtest of a version on an initially empty fleet. */
function Backtests({ uri }) {
	const [found, run] = useAnswer();
	return html`<${Section} title="Backtest"><${Backtest} busy=${found.busy} run=${(trace) => run(() => http("POST", "/console/playground/backtest", { policy_rule_uri: uri, fleet: "live", trace }))} />
		<${Loaded} found=${found} what="the backtest">${(it) => html`<${Backtested} it=${it} />`}<//><//>`;
}

function Alias({ name, changed }) {
	const about = useGet(at("/policy-alias", name));
	const canary = useGet(at("/policy-alias", name, "canary"));
	const shadow = useGet(at("/policy-alias", name, "shadow"));
	const again = () => [about, canary, shadow].forEach((each) => each.again());
	const all = () => {
		again();
		changed();
	};
	useEvery(again, 5000, [name]);
	const stop = (what, text) => html`<${Action} label=${`Stop the ${what}`} right="policy" destroys title=${`Stop the ${what} of ${name}`} done=${all} dry=${async () => text} act=${() => http("DELETE", at("/policy-alias", name, what))} words=${["policy", what, name, "--stop"]} />`;
	return html`<${Panel} title=${name} found=${about}>${(it) => html`
		<${Facts} pairs=${[["means", html`<${Policy} bare name=${it.policy_rule_uri} />`], ["owner", it.owner], ["before", it.former && html`<${Policy} name=${it.former} />`],
			["since", it.at ? `${when(it.at)}, by ${it.who}` : ""]]} />
		<p class="buttons"><${Action} label="Roll back" right="policy" title=${`Roll ${name} back`} idle=${!it.former && "It had no other version before."} done=${all} dry=${() => turned(it.policy_rule_uri, it.former)}
			act=${() => http("POST", at("/policy-alias", name, "rollback"), {})} words=${["policy", "rollback", name]} />
			${it.shadow ? stop("shadow", `${it.shadow} gets no more requests, and its report is deleted.`) : null}
			${it.canary ? stop("canary", `All requests go to ${it.policy_rule_uri} again.`) : null}</p>
		${canary.value?.active && html`<${Section} title="Results of its versions"><${Outcomes} reports=${[canary.value.active, canary.value.candidate].filter(Boolean)} /><//>`}
		${shadow.value && html`<${Section} title="Shadow"><${Shadow} it=${shadow.value} /><//>`}
		<${Section} title="History"><${History} of=${[...(it.history || [])].reverse().map(({ at, what, version, who, reason }) => ({ at, what, more: `${version} by ${who} ${reason || ""}` }))} /><//>
		<${Copies} words=${["policy", "aliases", name]} value=${{ alias: it, canary: canary.value, shadow: shadow.value }} />`}<//>`;
}

const latency = (l) => (l ? Object.entries(l).map(([name, ms]) => `${name} ${ms}`).join(", ") : "–");

const Outcomes = ({ reports }) => html`<${Grid} label="Outcomes" heads=${["version", "requests", "granted", "refused", "faults", "ms"]}
	rows=${reports.map((each) => [each.policy_rule_uri, count(each.asked), count(each.granted), Object.entries(each.refused || {}).map(([name, n]) => `${n} ${name}`).join(", ") || 0, count(each.faults), latency(each.latency_ms)])} />`;

const Shadow = ({ it }) => html`<p>${count(it.same)} of ${count(it.compared)} answers are the same, ${count(it.differ)} differ${it.dropped ? `; ${count(it.dropped)} were left out, since the shadow was busy` : ""}.</p>
	<${Grid} label="Shadow" heads=${["version", "placed", "refused", "GPUs opened", "nodes opened", "ms"]}
		rows=${[it.active, it.candidate].map((each) => [each.policy_rule_uri, count(each.placed), count(each.refused), count(each.gpus_opened || 0), count(each.nodes_opened || 0), latency(each.latency_ms)])} />
	${it.samples?.length ? html`<${Raw} value=${it.samples} label="Where they differ" />` : null}`;

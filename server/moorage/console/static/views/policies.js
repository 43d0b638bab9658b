// Policies: versions, what aliases mean and who said so, canaries, shadows; activate and roll back
// behind a difference.
import { useEffect, useState } from "preact/hooks";
import { Difference } from "../difference.js";
import { count, moment } from "../format.js";
import { to } from "../router.js";
import { http } from "../session.js";
import { listen } from "../socket.js";
import { Action, Command, Copies, Empty, Facts, Grid, Loading, Panel, Raw, Refused, Section, Text, html, nothing, typed, useEvery, useLoaded } from "../ui.js";

const SHOWN_MAX = 200;
const at = (path, ...rest) => [path, ...rest.map(encodeURIComponent)].join("/");
const code = (uri) => http("GET", at("/policy", uri)).then((each) => String(each.code ?? ""));

export function Policies({ rest }) {
	const versions = useLoaded(() => http("GET", "/policy"), []);
	const aliases = useLoaded(() => http("GET", "/policy-alias"), []);
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
		<${Section} title="Aliases">
			<${Refused} error=${aliases.error} />
			${!aliases.value ? html`<${Loading} what="the aliases" />` : !aliases.value.length ? html`<${Empty}>No alias is set. Activate a version to make one.<//>`
				: html`<${Grid} label="Aliases" heads=${["alias", "means", "since", "by", "canary", "shadow"]} current=${aliases.value.findIndex((each) => each.alias === subject)}
					rows=${aliases.value.map((each) => [html`<a class="row" href=${to("policies", each.alias)}>${each.alias}</a>`, each.policy_rule_uri, each.at ? moment(each.at) : "–", each.who || "–",
						each.canary ? `${each.canary.percent} % ${each.canary.version}` : "–", each.shadow || "–"])} />`}
		<//>
		<${Section} title="Versions">
			<p class="tools"><label>Name contains <input value=${part} onInput=${typed(setPart)} /></label>
				<a class="button" href=${to("playground")}>New policy</a> <${Command} words=${["moorage", "policy", "list"]} /></p>
			<${Refused} error=${versions.error} />
			${!versions.value ? html`<${Loading} what="the versions" />` : !found.length ? html`<${Empty}>There is no such version. Publish one: <code>moorage policy push</code>.<//>`
				: html`<p class="above">${count(found.length)} versions${found.length > SHOWN_MAX ? `, the first ${SHOWN_MAX} shown` : ""}</p><${Grid} label="Versions" heads=${["version", "what it does"]} current=${found.findIndex((each) => each.policy_rule_uri === subject)}
					rows=${found.slice(0, SHOWN_MAX).map((each) => [html`<a class="row" href=${to("policies", each.policy_rule_uri)}>${each.policy_rule_uri}</a>`, each.description || ""])} />`}
		<//></div>
		${!subject ? null : /:.*-/.test(subject) ? html`<${Version} key=${subject} uri=${subject} aliases=${aliases.value || []} changed=${again} />`
			: html`<${Alias} key=${subject} name=${subject} changed=${again} />`}
	</div>`;
}

/** The two codes and their difference, which is the dry run. @param {string} from @param {string} into */
const compared = async (from, into) => {
	const [before, after] = await Promise.all([from ? code(from).catch(() => "") : "", code(into)]);
	return html`<p>It means ${from || "nothing"} now, and ${into} from then on. Requests under way are not disturbed.</p>
		<${Difference} before=${before} after=${after} names=${[from || "nothing", into]} />`;
};

function Version({ uri, aliases, changed }) {
	const about = useLoaded(() => http("GET", at("/policy", uri)), [uri]);
	const history = useLoaded(() => http("GET", at("/policy", uri, "history")), [uri]);
	const logs = useLoaded(() => http("GET", at("/policy", uri, "logs")), [uri]);
	const [alias, setAlias] = useState(`${uri.split(":")[0]}:stable`);
	const it = about.value;
	if (!it) return html`<${Panel} title=${uri} found=${about} />`;
	const now = aliases.find((each) => each.alias === alias)?.policy_rule_uri || "";
	const printed = Object.entries(logs.value?.printed || {}).filter(([, text]) => text);
	return html`<${Panel} title=${uri} found=${about}>
		<p>${it.description || ""}</p>
		<${Facts} pairs=${[["digest", it.digest], ["tags", Array.isArray(it.tags) ? it.tags.join(", ") : it.tags], ["active under", aliases.filter((each) => each.policy_rule_uri === uri).map((each) => each.alias).join(", ")],
			["rests for you", logs.value?.rests ? JSON.stringify(logs.value.rests) : ""]]} />
		<p class="buttons"><label>Alias <input value=${alias} onInput=${typed(setAlias)} /></label>
			<${Action} label="Activate" title=${`Activate ${uri} as ${alias}`} disabled=${now === uri} done=${changed} dry=${() => compared(now, uri)}
				act=${() => http("POST", at("/policy-alias", alias, "activate"), { policy_rule_uri: uri })} words=${["moorage", "policy", "activate", uri, "--alias", alias]} />
			<${Action} label="Shadow" title=${`Ask ${uri} what ${alias} is asked`} disabled=${now === uri || !now} done=${changed} dry=${() => compared(now, uri)}
				act=${() => http("POST", at("/policy-alias", alias, "shadow"), { policy_rule_uri: uri })} words=${["moorage", "policy", "shadow", alias, uri]} />
			<a class="button" href=${to("playground") + `?policy=${encodeURIComponent(uri)}`}>Open in the playground</a></p>
		<${Section} title="Code"><${Text} label=${`Code of ${uri}`} text=${it.code} /><//>
		${printed.length ? html`<${Section} title="Printed lately">${printed.map(([name, text]) => html`<h3 key=${name}>${name}</h3><${Text} label=${name} text=${text} />`)}<//>` : null}
		<${Section} title="History">${history.value ? html`<ol class="history">${history.value.map((each, n) => html`<li key=${n}><time>${moment(each.at)}</time> <b>${each.what}</b> by ${each.who}</li>`)}</ol>` : html`<${Loading} what="the history" />`}<//>
		<${Copies} words=${["moorage", "policy", "show", uri]} value=${it} />
	<//>`;
}

function Alias({ name, changed }) {
	const about = useLoaded(() => http("GET", at("/policy-alias", name)), [name]);
	const canary = useLoaded(() => http("GET", at("/policy-alias", name, "canary")), [name]);
	const shadow = useLoaded(() => http("GET", at("/policy-alias", name, "shadow")), [name]);
	const all = () => {
		for (const each of [about, canary, shadow]) each.again();
		changed();
	};
	useEvery(() => [about, canary, shadow].forEach((each) => each.again()), 5000, [name]);
	const it = about.value;
	if (!it) return html`<${Panel} title=${name} found=${about} />`;
	return html`<${Panel} title=${name} found=${about}>
		<${Facts} pairs=${[["means", html`<a href=${to("policies", it.policy_rule_uri)}>${it.policy_rule_uri}</a>`], ["owner", it.owner], ["before", it.former ? html`<a href=${to("policies", it.former)}>${it.former}</a>` : ""],
			["since", it.at ? `${moment(it.at)}, by ${it.who}` : ""]]} />
		<p class="buttons"><${Action} label="Roll back" title=${`Roll ${name} back`} disabled=${!it.former} done=${all} dry=${() => compared(it.policy_rule_uri, it.former)}
			act=${() => http("POST", at("/policy-alias", name, "rollback"), {})} words=${["moorage", "policy", "rollback", name]} />
			${it.shadow ? html`<${Action} label="Stop the shadow" title=${`Stop the shadow of ${name}`} done=${all} dry=${async () => `${it.shadow} is asked no more, and its report is forgotten.`} act=${() => http("DELETE", at("/policy-alias", name, "shadow"))} />` : null}
			${it.canary ? html`<${Action} label="Stop the canary" title=${`Stop the canary of ${name}`} done=${all} dry=${async () => `All requests go to ${it.policy_rule_uri} again.`} act=${() => http("DELETE", at("/policy-alias", name, "canary"))} />` : null}</p>
		${canary.value?.active ? html`<${Section} title="How its versions do"><${Outcomes} reports=${[canary.value.active, canary.value.candidate].filter(Boolean)} /><//>` : null}
		${shadow.value ? html`<${Section} title="Shadow"><${Shadow} it=${shadow.value} /><//>` : null}
		<${Section} title="History"><ol class="history">${[...(it.history || [])].reverse().map((each, n) => html`<li key=${n}><time>${moment(each.at)}</time> <b>${each.what}</b> ${each.version} by ${each.who} ${each.reason || ""}</li>`)}</ol><//>
		<${Copies} words=${["moorage", "policy", "aliases", name]} value=${{ alias: it, canary: canary.value, shadow: shadow.value }} />
	<//>`;
}

const latency = (l) => (l ? Object.entries(l).map(([name, ms]) => `${name} ${ms}`).join(", ") : "–");

const Outcomes = ({ reports }) => html`<${Grid} label="Outcomes" heads=${["version", "asked", "granted", "refused", "faults", "ms"]}
	rows=${reports.map((each) => [each.policy_rule_uri, count(each.asked), count(each.granted), Object.entries(each.refused || {}).map(([name, n]) => `${n} ${name}`).join(", ") || 0, count(each.faults), latency(each.latency_ms)])} />`;

const Shadow = ({ it }) => html`<p>${count(it.same)} of ${count(it.compared)} answers are the same, ${count(it.differ)} differ${it.dropped ? `; ${count(it.dropped)} were not asked, since it was behind` : ""}.</p>
	<${Grid} label="Shadow" heads=${["version", "placed", "refused", "GPUs opened", "nodes opened", "ms"]}
		rows=${[it.active, it.candidate].map((each) => [each.policy_rule_uri, count(each.placed), count(each.refused), count(each.gpus_opened || 0), count(each.nodes_opened || 0), latency(each.latency_ms)])} />
	${it.samples?.length ? html`<${Raw} value=${it.samples} label="Where they differ" />` : null}`;

// What-if: the answer that a request would get if something changed.
import { useState } from "preact/hooks";
import { places } from "../format.js";
import { ask } from "../socket.js";
import { Command, Facts, Raw, Refused, Section, html, nothing } from "../ui.js";

export function WhatIf({ query }) {
	const [answer, setAnswer] = useState(nothing);
	const run = async (event) => {
		event.preventDefault();
		const form = event.target;
		try {
			const request = { policy_rule_uri: form.policy.value.trim(), inputs: JSON.parse(form.inputs.value), resources: JSON.parse(form.resources.value) };
			const changed = JSON.parse(form.change.value);
			// Without a change it is what `dry_run` says today.
			const still = Object.keys(changed).length === 0;
			setAnswer({ value: still ? await ask({ adhoc: true, ...request, lease: {}, dry_run: true, explain: true }) : await ask({ op: "whatif", request: { ...request, lease: {} }, change: changed }) });
		} catch (error) {
			setAnswer({ error: error instanceof SyntaxError ? new Error(`That is no JSON: ${error.message}`) : error });
		}
	};
	const of = query.get("request");
	return html`
		<p>A request is judged on the fleet as it is, with a change that is not made.${of ? ` It began with request ${of}.` : ""}</p>
		<form class="form" onSubmit=${run}>
			<label>Policy <input name="policy" required placeholder="name:version-tag, or an alias" /></label>
			<label>Inputs <textarea name="inputs" rows="2" spellcheck="false" defaultValue="{}"></textarea></label>
			<label>Resources <textarea name="resources" rows="2" spellcheck="false" defaultValue=${'{"gpus": 1}'}></textarea></label>
			<label>Change <textarea name="change" rows="3" spellcheck="false" defaultValue="{}"></textarea></label>
			<p class="buttons"><button type="submit" class="primary">What if?</button><${Command} words=${["moorage", "ask", "POLICY", "--gpus", "1", "--dry-run", "--explain"]} /></p>
		</form>
		${answer?.error ? html`<${Refused} error=${answer.error} />` : answer ? html`<${Section} title="What would happen">
				<${Facts} pairs=${[["placement", answer.value?.answer?.placement ? places(answer.value.answer.placement) : answer.value?.node_id ? places([answer.value]) : ""]]} /><${Raw} value=${answer.value} /><//>` : null}`;
}

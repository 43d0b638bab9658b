// Log in: the token is exchanged for a cookie that scripts cannot read.
import { useState } from "preact/hooks";
import { logIn, signIn } from "../session.js";
import { Refused, handle, html, typed } from "../ui.js";

export function Login() {
	const [token, setToken] = useState("");
	const [error, setError] = useState(null);
	const submit = handle(async () => {
		try {
			await logIn(token);
		} catch (failure) {
			setError(failure);
		}
		setToken("");
	});
	const refused = new URLSearchParams(location.search).has("sign-in");
	return html`<main class="login"><h1>Log in to Moorage</h1>
		${signIn.value && html`<p><a href="/console/sign-in" target="_self">Sign in</a></p>`}
		${refused && html`<p role="alert">Your sign-in was refused. If it happens again, your operator finds the reason in the server's log.</p>`}
		<form onSubmit=${submit}>
			<label for="token">Token</label>
			<input id="token" type="password" autocomplete="current-password" required value=${token} onInput=${typed(setToken)} />
			<button type="submit" class="primary">Log in</button>
		</form>
		<${Refused} error=${error} />
		<p>It is one of the tokens in <code>MOORAGE_TOKENS</code>, the one that <code>MOORAGE_TOKEN</code> gives to the command line.</p>
	</main>`;
}

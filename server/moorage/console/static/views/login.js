// Log in: the token is exchanged for a cookie that scripts cannot read.
import { useState } from "preact/hooks";
import { leave, logIn, signIn } from "../session.js";
import { useSignal } from "../signal.js";
import { Refused, handle, html, typed } from "../ui.js";

/** How a sign-in or a logout at the issuer ended, by the value in the query. */
const ENDED = {
	over: "You are logged out.",
	refused: "Your sign-in was refused. The server's log says why.",
	unavailable: "The issuer does not answer. Try again, or log in with a token.",
};

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
	const offered = useSignal(signIn);
	const ended = ENDED[new URLSearchParams(location.search).get("sign-in")];
	return html`<main class="login"><h1>Log in to Moorage</h1>
		${offered && html`<p><a href="/console/sign-in" target="_self" onClick=${leave}>Sign in</a></p>`}
		${ended && html`<p role="alert">${ended}</p>`}
		<form onSubmit=${submit}>
			<label for="token">Token</label>
			<input id="token" type="password" autocomplete="current-password" required value=${token} onInput=${typed(setToken)} />
			<button type="submit" class="primary">Log in</button>
		</form>
		<${Refused} error=${error} />
		<p>Use a token from the server's <code>MOORAGE_TOKENS</code>, such as the one in <code>MOORAGE_TOKEN</code> for the command line.</p>
	</main>`;
}

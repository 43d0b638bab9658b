// The session, and requests over HTTP: every view uses this module.
import { go } from "./router.js";
import { signal } from "./signal.js";

/** The session; undefined: not known yet; null: a login is needed. */
export const session = signal(undefined);

/** Whether the role of this session has a right, given its name. */
export const may = (right) => Boolean(session.value?.rights.includes(right));

const MEANT = { lease: "release or cancel", exec: "run commands in workloads", policy: "publish policies or change aliases", cordon: "cordon, drain or uncordon", place: "ask for placements", metrics: "read the metrics" };

/** Why a role may not do something, in a sentence; "": it may. */
export const lacks = (right) => (may(right) ? "" : `Your role, ${session.value?.role}, may not ${MEANT[right] || right}.`);

/** Why the server cannot be reached, or "". */
export const unreachable = signal("");

/** Whether people sign in at an issuer. */
export const signIn = signal(false);

/** A refusal of the server: `message` is its sentence, `code` its name. */
export class Failure extends Error {

	constructor(message, code, reply) {
		super(message);
		this.code = code;
		this.reply = reply;
	}
}

const SESSION = "/console/session";

/** Ask over HTTP; returns `data` of the reply, or the bare document. */
export async function http(method, path, body) {
	const headers = { Accept: "application/json" };
	if (body !== undefined) headers["Content-Type"] = "application/json";
	if (method !== "GET" && session.value) headers["X-Console-Token"] = session.value.csrf;
	let answer;
	try {
		answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
	} catch {
		throw new Failure("The server does not answer. Check that moored runs.", "unreachable");
	}
	const text = await answer.text();
	let reply;
	try {
		reply = JSON.parse(text);
	} catch {
		if (answer.ok) return text;
		throw new Failure(`The server answered ${answer.status}.`, "internal");
	}
	if (answer.status === 401 && session.value && path !== SESSION) enter();
	if (!answer.ok || reply?.success === false) {
		throw new Failure(reply?.message || reply?.error?.reason || `status ${answer.status}`, reply?.error?.code || reply?.details?.code || "", reply);
	}
	return reply && "success" in reply && "data" in reply ? reply.data : reply;
}
export const codeOf = (uri) => http("GET", `/policy/${encodeURIComponent(uri)}`).then((each) => String(each.code ?? ""));

let again = 0;
export async function enter() {
	try {
		const found = await http("GET", SESSION);
		if (session.value && session.value.csrf !== found.csrf) location.reload(); // Another person.
		session.value ||= found;
		unreachable.value = "";
	} catch (error) {
		if (error.code === "unauthorized") {
			signIn.value = Boolean(error.reply?.error?.sign_in);
			session.value = null;
		} else {
			unreachable.value = error.message;
			clearTimeout(again); // Of several calls at once, only one retries.
			again = setTimeout(enter, 2000);
		}
	}
}

/** Remember the address, for the way back from the issuer. */
export const leave = () => (sessionStorage.place = location.pathname + location.search);

/** After a sign-in, show what was shown before it. */
export function comeBack() {
	const { place } = sessionStorage;
	delete sessionStorage.place;
	if (session.value && place && location.pathname === "/console") go(place, true);
}

export async function logIn(token) {
	session.value = await http("POST", SESSION, { token });
}

export async function logOut() {
	let left = {};
	try {
		left = await http("DELETE", SESSION);
	} catch (error) {
		if (error.code !== "unauthorized") throw error; // The login has ended already.
	}
	location.assign(left.sign_out || "/console");
}

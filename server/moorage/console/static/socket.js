// The only WebSocket of a page: requests with their answers, and news of topics.
import { Failure, enter, session } from "./session.js";
import { signal } from "./signal.js";

const RETRY_MS_MAX = 5000;
const ANSWER_MS_MAX = 30000;

/** State of the connection: connecting, open or lost. */
export const link = signal("connecting");
/** When the server was last heard, in ms; 0: never. */
export const heardAt = signal(0);
/** Grows with each connection: views ask again when it does. */
export const connection = signal(0);
/** The revision of the shown fleet. */
export const revision = signal(null);

let socket = null;
let number = 0;
let retry_ms = 250;

const open = new Map();

const listeners = new Map();

/** Where the server listens, as this page reaches it. */
export function address() {
	const at = session.value?.websocket || "";
	// A proxy terminates TLS for a server without TLS; the proxy has the WebSocket under its own name.
	const proxied = location.protocol === "https:" && at.startsWith("ws:");
	return proxied ? `wss://${location.host}/ws` : at;
}

/** Connect, and again whenever the connection is lost. */
export function connect() {
	if (!session.value || socket) return;
	const made = new WebSocket(address());
	socket = made;
	made.onopen = () => {
		retry_ms = 250;
		link.value = "open";
		heard();
		connection.value += 1;
		if (listeners.size) watch([...listeners.keys()]);
	};
	made.onmessage = (message) => take(JSON.parse(message.data));
	made.onclose = () => {
		if (socket === made) lost();
	};
}

let last_heard = 0;
function heard() {
	const now = Date.now();
	if (now - last_heard > 500) heardAt.value = last_heard = now;
}

function lost() {
	socket = null;
	link.value = "lost";
	for (const each of open.values()) {
		clearTimeout(each.timer);
		each.failed(new Failure("The connection was lost before the answer came.", "lost"));
	}
	open.clear();
	setTimeout(async () => {
		await enter(); // A restarted server may want a login, or have another port.
		connect();
	}, retry_ms);
	retry_ms = Math.min(retry_ms * 2, RETRY_MS_MAX);
}

function take(message) {
	heard();
	if (message.event !== undefined) {
		for (const each of listeners.get(message.topic) || []) each(message.event, message.data);
		if (message.event === "missed") {
			for (const all of listeners.values()) for (const each of all) each("missed", message.data);
		}
		return;
	}
	const waiting = open.get(message.id);
	if (!waiting) return;
	open.delete(message.id);
	clearTimeout(waiting.timer);
	if (message.success) waiting.done(waiting.whole ? message : message.data);
	else waiting.failed(new Failure(message.message, message.error?.code || "", message));
}

/** Send one request; returns `data` of the reply, or the whole reply. */
export function ask(message, whole = false) {
	return new Promise((done, failed) => {
		if (socket?.readyState !== WebSocket.OPEN) return failed(new Failure("There is no connection to the server now.", "lost"));
		const id = ++number;
		const timer = setTimeout(() => {
			open.delete(id);
			failed(new Failure(`No answer came within ${ANSWER_MS_MAX / 1000} seconds.`, "timeout"));
		}, ANSWER_MS_MAX);
		open.set(id, { done, failed, timer, whole });
		socket.send(JSON.stringify({ ...message, id }));
	});
}

/** A list page by page. */
export async function* pages(message) {
	for (let after = ""; after !== null; ) {
		const page = await ask({ ...message, ...(after ? { after } : {}) });
		yield page;
		after = page.next ?? null;
	}
}

/** The rows of a list; reads no further pages once it has `most` rows. */
export async function collect(message, field, most = Infinity) {
	const rows = [];
	for await (const page of pages({ ...message, limit: 1000 })) if (rows.push(...page[field]) >= most) break;
	return rows;
}

export function watch(topics) {
	return ask({ op: "watch", topics }).catch((error) => {
		for (const topic of topics) for (const each of listeners.get(topic) || []) each("refused", error);
	});
}

/** Hear the news of a topic until the returned function is called. */
export function listen(topic, listener) {
	const all = listeners.get(topic) || new Set();
	listeners.set(topic, all);
	all.add(listener);
	if (link.value === "open") watch([topic]);
	return () => {
		all.delete(listener);
		if (!all.size) listeners.delete(topic);
	};
}

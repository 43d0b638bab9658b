// The address is the state: every object has one, and "back" works.
import { signal } from "./signal.js";

const ROOT = "/console";

/** The view, the further parts of the address, and its query. */
export const route = signal(read());

/** A decoded part of the address; an invalid "%" stays as it is. */
function decoded(part) {
	try {
		return decodeURIComponent(part);
	} catch {
		return part;
	}
}

function read() {
	const [view, ...rest] = location.pathname.slice(ROOT.length).split("/").filter(Boolean).map(decoded);
	return { view: view || "overview", rest, query: new URLSearchParams(location.search) };
}

/** The address of an object. */
export function to(view, ...rest) {
	return [ROOT, view, ...rest.map(encodeURIComponent)].join("/");
}

export function go(address, replace) {
	if (address === location.pathname + location.search) return;
	history[replace ? "replaceState" : "pushState"](null, "", address);
	route.value = read();
}

/** Follow links of the console without loading it again. */
export function start() {
	addEventListener("popstate", () => (route.value = read()));
	document.addEventListener("click", (event) => {
		const target = event.target;
		const anchor = target.closest("a[href]");
		if (!anchor || anchor.target || anchor.hasAttribute("download")) return;
		if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
		const url = new URL(anchor.href);
		if (url.origin !== location.origin || !url.pathname.startsWith(ROOT)) return;
		if (url.pathname.startsWith(ROOT + "/static/") || url.hash) return;
		event.preventDefault();
		go(url.pathname + url.search);
	});
}

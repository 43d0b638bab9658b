// Light, dark, or as the system has it; canvases follow `theme` to paint again.
import { signal } from "./signal.js";

const NAMES = { auto: "light dark", light: "light", dark: "dark" };
const KEPT = "moorage.theme";

/** Changes whenever the colours change. */
export const theme = signal("");
/** The chosen theme: auto, light or dark. */
export const chosen = signal("auto");

const dark = matchMedia("(prefers-color-scheme: dark)");
const forced = matchMedia("(forced-colors: active)");

function changed() {
	theme.value = `${chosen.value} ${dark.matches} ${forced.matches}`;
}

export function choose(name) {
	chosen.value = name in NAMES ? name : "auto";
	document.documentElement.style.colorScheme = NAMES[chosen.value];
	localStorage.setItem(KEPT, chosen.value);
	changed();
}

for (const query of [dark, forced]) query.addEventListener("change", changed);
choose(localStorage.getItem(KEPT) || "auto");

// Colours of names; states have their own (style.css, `s-`).

/** Number of colours; further names reuse them. */
const KEYS = 8;

/** The class of each name's colour. */
export const keyed = (names) => new Map([...new Set(names)].sort().map((name, at) => [name, `k${at % KEYS}`]));

/** The colour of each class in the present theme, for a canvas. */
export function painted(classes) {
	const probe = document.createElement("span");
	document.body.append(probe);
	const found = new Map();
	for (const each of new Set(classes)) {
		probe.className = `swatch ${each}`;
		found.set(each, getComputedStyle(probe).backgroundColor);
	}
	probe.remove();
	return found;
}

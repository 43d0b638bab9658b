// Colours of names; states have their own (style.css, `s-`).

/** How many there are; later ones begin again, with their names beside. */
const KEYS = 8;

/** The class of each name's colour. */
export const keyed = (names) => new Map([...new Set(names)].sort().map((name, at) => [name, `k${at % KEYS}`]));

/** What a class of colour is in the theme of now, as a canvas takes it. */
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

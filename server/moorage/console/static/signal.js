// Values that views follow: `useSignal` renders its component again when the value changes.
import { useLayoutEffect, useState } from "preact/hooks";

export function signal(value) {
	const followers = new Set();
	return {
		followers,
		get value() {
			return value;
		},
		set value(next) {
			if (next === value) return;
			value = next;
			for (const each of [...followers]) each();
		},
	};
}

/** The present value; renders the component again when it changes. */
export function useSignal(followed) {
	const [, draw] = useState(0);
	const seen = followed.value;
	useLayoutEffect(() => {
		const again = () => draw((n) => n + 1);
		followed.followers.add(again);
		if (followed.value !== seen) again(); // It changed before it was followed.
		return () => followed.followers.delete(again);
	}, [followed]);
	return seen;
}

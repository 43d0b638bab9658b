"""Compares the specifications that a server serves with those of the last release.

    python tools/specifications.py check    name the breaking changes; `make lint` does this
    python tools/specifications.py keep     store the current ones, for a release
    python tools/specifications.py types    write the types of the TypeScript client

The specifications come from a real daemon, so they are the ones that clients get.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import httpx
from breaking import asyncapi_breaks, openapi_breaks

from moorage.testing.daemon_process import daemon
from typescript import types

ROOT: Final = Path(__file__).parents[1]
RELEASED: Final = ROOT / "tools" / "released"
TYPES: Final = ROOT / "clients" / "typescript" / "messages.ts"
NAMES: Final = ("openapi.json", "asyncapi.json")


def served_documents() -> dict[str, dict[str, Any]]:
    """Return the documents that a daemon of this tree serves."""
    with daemon() as running:
        return {name: httpx.get(f"{running.http}/{name}", trust_env=False).json() for name in NAMES}


def check(now: dict[str, dict[str, Any]]) -> list[str]:
    """Return the breaking changes, and the files that are out of date."""
    old = {name: json.loads((RELEASED / name).read_text(encoding="utf-8")) for name in NAMES}
    found = [f"openapi.json: {each}" for each in openapi_breaks(old[NAMES[0]], now[NAMES[0]])]
    found += [f"asyncapi.json: {each}" for each in asyncapi_breaks(old[NAMES[1]], now[NAMES[1]])]
    if TYPES.read_text(encoding="utf-8") != types(now["asyncapi.json"]):
        found.append(f"{TYPES.relative_to(ROOT)} is of other messages: make specifications")
    return found


def main() -> None:
    """Run the command in the argument."""
    now = served_documents()
    match sys.argv[1:]:
        case ["check"]:
            found = check(now)
            for each in found:
                sys.stderr.write(f"{each}\n")
            if found:
                sys.exit(
                    "Existing clients would break. Keep what they use, or, for a new major version,"
                    " run: python tools/specifications.py keep"
                )
        case ["keep"]:
            RELEASED.mkdir(exist_ok=True)
            for name in NAMES:
                text = json.dumps(now[name], indent=1, ensure_ascii=False, sort_keys=True)
                (RELEASED / name).write_text(f"{text}\n", encoding="utf-8")
        case ["types"]:
            TYPES.write_text(types(now["asyncapi.json"]), encoding="utf-8")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()

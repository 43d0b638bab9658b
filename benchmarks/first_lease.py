"""`first_lease`: `moored demo` up to its first lease."""

import subprocess
import sys
import time
from typing import Any, Final

import msgspec

STARTS: Final = 3
"""Starts of each kind; the quickest counts, since noise only ever adds."""


def first_lease() -> dict[str, Any]:
    """Measure `moored demo` up to its first lease, against an interpreter with its imports."""
    base, first = [], []
    for _ in range(STARTS):
        started = time.perf_counter()
        imports = "import moorage.daemon.start, moorage_client"
        subprocess.run([sys.executable, "-P", "-c", imports], check=True)  # noqa: S603  # Ours.
        base.append(time.perf_counter() - started)
        command = [sys.executable, "-P", "-m", "moorage", "demo", "--json"]
        output = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603  # Ours.
        first.append(msgspec.json.decode(output)["first_lease_seconds"])
    return {
        "imports_seconds": min(base),
        "first_lease_seconds": min(first),
        "first_lease_to_imports": min(first) / min(base),
    }

"""`startup`: a daemon's start on a ledger with a million facts, compared with an empty ledger."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import ClusterSet, Ended, Fact, Granted
from moorage.core.state.state import State, apply
from moorage.ledger.stored import StoredLedger
from moorage.model import (
    Cluster,
    ClusterId,
    Gpu,
    Lease,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)
from moorage.storage.sqlite.facts import SqliteFacts
from moorage.testing.daemon_process import daemon

HISTORY_FACTS: Final = 1_000_000
CHECKPOINT_FACTS: Final = 20_000
"""The daemon's default number of facts between two checkpoints; a start replays at most these."""
BATCH_FACTS: Final = 5_000
HELD_LEASES: Final = 1_000
STARTS: Final = 3
"""Number of starts of each kind; the quickest counts, since noise only adds time."""


def startup() -> dict[str, Any]:
    """Measure a start with a million facts in the history, and a start on an empty ledger."""
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        empty, full = Path(folder) / "empty", Path(folder) / "full"
        full.mkdir()
        tail = asyncio.run(_write_history(full / "ledger.db"))
        empties, fulls = [], []
        for _ in range(STARTS):
            empties.append(_start_seconds(empty))
            # A clean stop writes a checkpoint; this copy has the most facts after a checkpoint.
            fulls.append(_start_seconds(_copy(full, Path(folder) / "copy")))
    return {
        "facts": HISTORY_FACTS,
        "facts_after_checkpoint": tail,
        "empty_seconds": min(empties),
        "full_seconds": min(fulls),
        "full_to_empty": min(fulls) / min(empties),
    }


def _start_seconds(data: Path) -> float:
    started = time.perf_counter()
    with daemon(data):
        return time.perf_counter() - started


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.lock"))


async def _write_history(path: Path) -> int:
    """Write the history of a busy server; return the number of facts after the last checkpoint."""
    ledger = StoredLedger(SqliteFacts(path))
    await ledger.open()
    state, life = State(), _life()
    checkpointed = written = 0
    while written < HISTORY_FACTS:
        facts = list(islice(life, BATCH_FACTS))
        for fact in facts:
            apply(state, fact)
        written = await ledger.append(facts, float(written))
        if written % CHECKPOINT_FACTS == 0 and written < HISTORY_FACTS:
            checkpointed = written
            await ledger.checkpoint(written, list(condense(state)))
    await ledger.close()
    return written - checkpointed


def _life() -> Iterator[Fact]:
    gpus = tuple(Gpu(str(number)) for number in range(8))
    rows = tuple(Node(NodeId(f"n{row:03d}"), 128_000, 1_048_576, gpus) for row in range(125))
    yield ClusterSet(Cluster(ClusterId("history"), rows))
    for number in count():
        if number >= HELD_LEASES:  # All devices are held: the oldest lease ends.
            yield Ended(_lease(number - HELD_LEASES).id, float(number), "released")
        yield Granted(_lease(number))


def _lease(number: int) -> Lease:
    device = number % HELD_LEASES
    return Lease(
        id=RequestId(f"{number:016x}"),
        tenant=Tenant("bench"),
        token_digest=f"token-{number}",
        policy=PolicyRef("fgd:1.0-stable", "0" * 64),
        placement=(Share(ClusterId("history"), NodeId(f"n{device // 8:03d}"), (str(device % 8),)),),
        fencing=number + 1,
        granted_at=float(number),
        expires_at=number + 4e9,
        terms=LeaseTerms(ttl_seconds=4e9),
    )


def first_lease() -> dict[str, Any]:
    """Measure `moored demo` until its first lease, and a process that only imports Moorage."""
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

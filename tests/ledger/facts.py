"""Facts with numbers, and ledgers of them whose process was killed."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from moorage.core.state.facts import Fact, Granted, Renewed
from moorage.ledger.stored import StoredLedger
from moorage.model import Lease, LeaseTerms, PolicyRef, RequestId, Tenant
from moorage.storage.sqlite.facts import SqliteFacts

NOW = 1_763_647_000.125


def numbered_facts(first: int, last: int) -> list[Fact]:
    return [Renewed(RequestId(f"r-{number}"), float(number)) for number in range(first, last + 1)]


def grants(first: int, last: int) -> list[Fact]:
    """Return grants whose fencing numbers count from `first` to `last`."""
    terms, policy = LeaseTerms(1.0), PolicyRef("p", "0")
    return [
        Granted(Lease(RequestId(f"r-{each}"), Tenant("t"), "", policy, (), each, 1.0, 2.0, terms))
        for each in range(first, last + 1)
    ]


async def opened(path: Path) -> StoredLedger:
    ledger = StoredLedger(SqliteFacts(path))
    await ledger.open()
    return ledger


async def leave_as_killed(
    path: Path, commits: int, checkpoints: Mapping[int, Sequence[Fact]]
) -> None:
    """Write grants, one per commit; leave the files in `path` as kill -9 leaves them.

    `checkpoints` has the facts of each checkpoint, by the fact after which it is written.
    """
    alive = path.parent / "alive" / path.name
    ledger = await opened(alive)
    for number, fact in enumerate(grants(1, commits), 1):
        await ledger.append([fact], NOW)
        if number in checkpoints:
            await ledger.checkpoint(number, checkpoints[number])
    shutil.copytree(alive.parent, path.parent, dirs_exist_ok=True)
    await ledger.close()
    shutil.rmtree(alive.parent)

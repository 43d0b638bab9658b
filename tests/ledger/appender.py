"""A program for `test_crash.py` that appends numbered facts until the process is killed.

The program prints each acknowledged seq on a separate line. Facts are `Renewed` with their own seq;
checkpoints consist of `CONDENSED` facts with the checkpoint's seq.
"""

import asyncio
import os
import sys
from pathlib import Path

from moorage.core.state.facts import Fact, Renewed
from moorage.ledger.base import COMMIT_SECONDS_MAX
from moorage.ledger.stored import StoredLedger
from moorage.model import RequestId
from moorage.storage.sqlite.facts import SqliteFacts

CONDENSED = 450
UNDER_WAY = 8


def fact(seq: int) -> Fact:
    return Renewed(RequestId("fact"), float(seq))


async def main(path: Path) -> None:
    ledger = StoredLedger(SqliteFacts(path))
    number = (await ledger.open()).last_seq

    async def append(first: int, last: int) -> int:
        acknowledged = await ledger.append([fact(seq) for seq in range(first, last + 1)], 1.0)
        os.write(sys.stdout.fileno(), b"%d\n" % acknowledged)
        return acknowledged

    async def checkpoints() -> None:
        while True:
            seq = await ledger.append([], 1.0)
            if seq > 0:
                await ledger.checkpoint(seq, [fact(seq)] * CONDENSED)

    under_way: set[asyncio.Task[object]] = {asyncio.ensure_future(checkpoints())}
    while True:
        size = 1 + number % 5
        under_way.add(asyncio.ensure_future(append(number + 1, number + size)))
        number += size
        await asyncio.sleep(0)
        if len(under_way) > UNDER_WAY:
            done, under_way = await asyncio.wait(
                under_way, return_when="FIRST_COMPLETED", timeout=COMMIT_SECONDS_MAX
            )
            for task in done:
                task.result()


asyncio.run(main(Path(sys.argv[1])))

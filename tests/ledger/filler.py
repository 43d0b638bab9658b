"""A program for `test_crash.py` that appends facts to a file that may not grow beyond a limit.

It prints each acknowledged seq on a separate line, then the errors of this and later calls.
"""

import asyncio
import resource
import sys
from pathlib import Path

from moorage.core.state.facts import Ended
from moorage.ledger.base import LedgerFailed
from moorage.ledger.stored import StoredLedger
from moorage.model import RequestId
from moorage.storage.sqlite.facts import SqliteFacts


async def main(path: Path, limit_bytes: int) -> None:
    ledger = StoredLedger(SqliteFacts(path))
    await ledger.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        while True:
            ended = Ended(RequestId("r-1"), 1.0, "x" * 1000)
            print(await ledger.append([ended] * 10, 1.0), flush=True)
    except LedgerFailed as failed:
        print(failed, flush=True)
    for call in (ledger.append([], 1.0), ledger.checkpoint(0, []), ledger.close()):
        try:
            await call
        except LedgerFailed as failed:
            print(failed, flush=True)


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))

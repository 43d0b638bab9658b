"""`python -m benchmarks.peers [NAME…]`: Moorage beside others, on one machine."""

import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
import typer
import uvloop
from rich.console import Console

from benchmarks.peers import dask_semaphore, etcd_transactions, moorage_itself, postgres_best_fit, postgres_rows, redis_locks, redis_script
from benchmarks.peers.measure import Extent, Figures, measure
from benchmarks.peers.session import Nodes, Peer
from moorage.bench.grants import made_up_nodes
from moorage.commands import display
from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag
from moorage.lab.errors import CommandError

PEERS: Final[dict[str, Peer]] = {
    peer.name: peer
    for peer in (
        redis_locks.PEER,
        redis_script.PEER, postgres_rows.PEER, postgres_best_fit.PEER, etcd_transactions.PEER, dask_semaphore.PEER,
    )
}


def run(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    async def main():
        for peer in [moorage_itself.PEER, *(PEERS[n] for n in names or PEERS)]:
            import time
            t = time.time()
            print(peer.name, peer.version(), await measure(peer, made_up_nodes(), Extent()), time.time() - t)
    uvloop.run(main())

if __name__ == "__main__":
    typer.run(run)

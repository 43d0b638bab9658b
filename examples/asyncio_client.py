"""Hold two leases of one GPU at the same time: python asyncio_client.py [URL]."""

import asyncio
import sys

from moorage_client import Client, MoorageError


async def hold(client: Client) -> None:
    """Hold a GPU for a second."""
    lease = client.lease("first_fit:1.0-stable", resources={"gpus": 1}, ttl_seconds=60)
    async with lease as held:
        (share,) = held.placement
        print("yours:", share.node_id, "GPU", *share.gpus)
        await asyncio.sleep(1)  # The work.


async def main(url: str | None) -> None:
    """Hold both leases, over one socket."""
    async with Client(url) as client:
        await asyncio.gather(hold(client), hold(client))


url = sys.argv[1] if len(sys.argv) > 1 else None  # None: MOORAGE_URL, else this machine.
try:
    asyncio.run(main(url))
except MoorageError as error:
    sys.exit(f"no GPU: {error}")

"""Lease a GPU, use it, release it: python blocking_client.py [URL]."""

import sys

from moorage_client import BlockingClient, MoorageError

url = sys.argv[1] if len(sys.argv) > 1 else None  # None: MOORAGE_URL, else this machine.
try:
    with (
        BlockingClient(url) as client,
        client.lease("first_fit:1.0-stable", resources={"gpus": 1}, ttl_seconds=60) as held,
    ):
        (share,) = held.placement
        print("yours:", share.cluster_id, share.node_id, "GPU", *share.gpus)
except MoorageError as error:
    sys.exit(f"no GPU: {error}")

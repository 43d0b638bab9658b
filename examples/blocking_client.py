"""Lease a GPU, use it, give it back: python blocking_client.py [ws://127.0.0.1:8765]."""

import sys

from moorage_client import BlockingClient, NoCapacity

url = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8765"
with BlockingClient(url) as client:
    try:
        with client.lease("first_fit:1.0-stable", resources={"gpus": 1}, ttl_seconds=60) as held:
            (share,) = held.placement
            print("yours:", share.cluster_id, share.node_id, "GPU", *share.gpus)
    except NoCapacity as no:
        sys.exit(f"not now: {no.reason}")

"""Train under a lease: python training_under_a_lease.py URL COMMAND…

The command runs on this machine, sees the GPUs of the lease and no others, and ends when the lease
is lost. To have the server start it on the leased node instead, use `moorage run`.
"""

import os
import subprocess
import sys

from moorage_client import BlockingClient, MoorageError

CHECK_SECONDS = 1
WAIT_SECONDS = 600

if len(sys.argv) < 3:
    sys.exit("usage: python training_under_a_lease.py URL COMMAND...")
_, url, *command = sys.argv
try:
    with BlockingClient(url) as client:
        lease = client.lease(
            "first_fit:1.0-stable",
            resources={"gpus": 1},
            ttl_seconds=60,
            wait_seconds=WAIT_SECONDS,
        )
        with lease as held:
            (share,) = held.placement
            variables = {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # Not the fastest GPU first.
                "CUDA_VISIBLE_DEVICES": ",".join(share.gpus),
                "MOORAGE_FENCING": str(held.fencing),  # For storage that refuses earlier holders.
            }
            training = subprocess.Popen(command, env={**os.environ, **variables})
            try:
                while True:
                    try:
                        code = training.wait(CHECK_SECONDS)
                        break
                    except subprocess.TimeoutExpired:
                        held.check()  # LeaseLost: other programs may use the GPUs.
            finally:
                training.terminate()
                training.wait()
except MoorageError as error:
    sys.exit(f"no GPU, or no longer: {error}")
sys.exit(code)

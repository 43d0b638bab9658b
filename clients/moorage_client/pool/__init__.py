"""The slot pool of a machine, shared by its processes.

`serving.serve` serves a `moorage.slots.ResourcePool` over a Unix socket or loopback HTTP, at the
documented endpoints; `ResourcePoolAdapter` is its client, with the methods of the pool. What a
process holds comes back when it dies, or when its time is up: `holdings`. `moorage pool` is all of
this on the command line.

The errors are those of `moorage.slots`, and `ConnectionFailed` and `Timeout` of `moorage_client`.
"""

from moorage_client.pool.adapter import Checkout, ResourcePoolAdapter

__all__ = ["Checkout", "ResourcePoolAdapter"]

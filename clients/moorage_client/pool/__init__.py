"""The client of a machine's slot pool, which `moorage pool serve` shares among its processes.

`ResourcePoolAdapter` has the methods of a `moorage.slots.ResourcePool`; `moorage pool` is the same
on the command line. The server takes a process's slots back when the process dies, or when their
time is up.

The errors are those of `moorage.slots`, and `ConnectionFailed` and `Timeout` of `moorage_client`.
"""

from moorage_client.pool.adapter import Checkout, ResourcePoolAdapter

__all__ = ["Checkout", "ResourcePoolAdapter"]

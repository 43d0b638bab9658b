"""The slot pool of a machine, served to its processes: `moorage pool serve` runs this package.

`serving.serve` serves a `moorage.slots.ResourcePool` over a Unix socket or loopback HTTP, at the
documented endpoints. `holdings` takes back a process's slots when the process dies, or when the
time of their checkout is up. The server's client is `moorage_client.pool`.
"""

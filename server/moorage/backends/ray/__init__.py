"""The backend `ray`: workloads on the nodes of a Ray cluster, and the cluster's inventory.

`backend` and the modules beside it run in the daemon, and do not import Ray. Only the process
`driver` imports Ray: if Ray hangs or crashes, this process ends, and a new one takes over. The code
in `node` is sent to the nodes of the cluster and runs there, one actor per node of a lease.
"""

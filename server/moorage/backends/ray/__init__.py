"""The backend `ray`: workloads on the nodes of a Ray cluster, and the cluster's inventory.

`backend` and what lies beside it run in the daemon, and import no Ray. `driver` is the process that
does: where Ray hangs or crashes, that process ends, and the next one goes on. `node` is sent to the
nodes of the cluster and runs there, one actor for each node of a lease.
"""

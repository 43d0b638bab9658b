"""All limits of the catalog, with the answer when a limit is reached."""

from typing import Final

CLUSTERS_MAX: Final = 10_000
"""Maximum cluster documents, and metrics documents; one more is refused with `too_large`.

`CLUSTERS_MAX` and all other limits of records have an extra part for tenants with few records: see
`core.state.tenant_loads.fits`."""
BLOCKS_MAX: Final = 10_000
"""Maximum block documents, and metrics of blocks; one more is refused with `too_large`."""
NODES_PER_CLUSTER_MAX: Final = 20_000
"""Maximum nodes of one cluster document; more are refused with `too_large`."""
GPUS_PER_NODE_MAX: Final = 128
"""Maximum devices of one node, including MIG instances, since each node takes as many columns as
the largest node.
"""
DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum bytes of one document as JSON; a larger one is refused with `too_large`."""
POLICIES_MAX: Final = 10_000
"""Maximum number of registered policy versions; one more is refused with `too_large`."""
ALIASES_MAX: Final = 1000
"""Maximum aliases; one more is refused with `too_large`."""
EXECUTORS_MAX: Final = 1000
"""Maximum registered executors; one more is refused with `too_large`."""
STORE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Maximum bytes of all documents and policy files together; more are refused with `too_large`."""
RESULT_BYTES_MAX: Final = 128 * 1024 * 1024
"""Maximum bytes of all documents in one query's answer; more are refused with `too_large`."""

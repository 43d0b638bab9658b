"""All limits of the catalog, with the answer when a limit is reached."""

from typing import Final

CLUSTERS_MAX: Final = 10_000
"""Most cluster documents, and most metrics documents; one more is refused with `too_large`.

This and all other limits of records have an extra part for tenants with few records: see
`core.state.tenant_loads.fits`."""
BLOCKS_MAX: Final = 10_000
"""Most block documents, and most metrics of blocks; one more is refused with `too_large`."""
NODES_PER_CLUSTER_MAX: Final = 20_000
"""Most nodes of one cluster document; more are refused with `too_large`."""
GPUS_PER_NODE_MAX: Final = 128
"""Most devices of one node, including MIG instances, since each node takes as many columns as the
largest node."""
DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Most bytes of one document as JSON; larger ones are refused with `too_large`."""
POLICIES_MAX: Final = 10_000
"""Most registered policy versions; one more is refused with `too_large`."""
ALIASES_MAX: Final = 1000
"""Most aliases; one more is refused with `too_large`."""
EXECUTORS_MAX: Final = 1000
"""Most registered executors; one more is refused with `too_large`."""
STORE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Most bytes of all documents and policy files together; more are refused with `too_large`."""
RESULT_BYTES_MAX: Final = 128 * 1024 * 1024
"""Most bytes of all documents in one query's answer; more are refused with `too_large`."""

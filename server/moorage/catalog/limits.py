"""Every limit of the catalog, with the answer when it is reached."""

from typing import Final

CLUSTERS_MAX: Final = 10_000
"""Cluster documents, and as many metrics documents; one more is refused with `too_large`.

A tenant with few records has its own share of this limit, and of all other limits of records: see
`core.state.tenant_loads.fits`."""
BLOCKS_MAX: Final = 10_000
"""Block documents, and as many of their metrics; one more is refused with `too_large`."""
NODES_PER_CLUSTER_MAX: Final = 20_000
"""Nodes of one cluster document; more are refused with `too_large`."""
GPUS_PER_NODE_MAX: Final = 128
"""Devices of one node, including MIG instances; each node takes as many columns as the largest
node."""
DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""One document as JSON; larger ones are refused with `too_large`."""
POLICIES_MAX: Final = 10_000
"""Registered policy versions; one more is refused with `too_large`."""
ALIASES_MAX: Final = 1000
"""Aliases; one more is refused with `too_large`."""
EXECUTORS_MAX: Final = 1000
"""Registered executors; one more is refused with `too_large`."""
STORE_BYTES_MAX: Final = 512 * 1024 * 1024
"""All documents and policy files together; what goes beyond is refused with `too_large`."""
RESULT_BYTES_MAX: Final = 128 * 1024 * 1024
"""All documents of one query's answer; a wider query is refused with `too_large`."""

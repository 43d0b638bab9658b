"""A pool of a machine's resources, divided into slots: users check slots out and in again.

`ResourcePool` is the flat pool, `NodeResourcePool` the pool of several nodes, and
`make_resource_pool` makes a flat pool of this machine. README.md has examples. Programs may also
use the parts of a pool by themselves: `Inventory`, `Allocator`, `AllocationTransaction` and
`Outcome`.

The package does no I/O, except `dump`, which writes to a file that the caller has opened. All
errors are one tree:

    SlotsError
    ├── ResourceUnavailable         the request does not fit now, or never: see `accommodates`
    │   └── UnevenNodes             the nodes differ in a number (also an InvalidRequest)
    ├── EmptyResourcePoolError      the pool has no types at all
    ├── UnknownResourceType         the pool has no such type (also a TypeError)
    ├── InvalidRequest              the request is malformed (also a ValueError)
    ├── InvalidCheckin              the returned slots are not checked out (also a ValueError)
    └── InvalidSpecification        the description of a pool is wrong (also a ValueError)
        └── SchemaMissingKeyError   the description has no `resources`, `local` or counts
"""

from moorage.slots.errors import (
    EmptyResourcePoolError,
    InvalidCheckin,
    InvalidRequest,
    InvalidSpecification,
    ResourceUnavailable,
    SchemaMissingKeyError,
    SlotsError,
    UnevenNodes,
    UnknownResourceType,
)
from moorage.slots.inventory import AllocationTransaction, Allocator, Inventory
from moorage.slots.machine import make_resource_pool
from moorage.slots.node_requests import NodeRequest
from moorage.slots.nodes import NodeAllocation, NodeResourcePool
from moorage.slots.outcome import Outcome
from moorage.slots.outstanding import Allocation
from moorage.slots.pool import ResourcePool
from moorage.slots.specification import read_specification

__all__ = [
    "Allocation",
    "AllocationTransaction",
    "Allocator",
    "EmptyResourcePoolError",
    "InvalidCheckin",
    "InvalidRequest",
    "InvalidSpecification",
    "Inventory",
    "NodeAllocation",
    "NodeRequest",
    "NodeResourcePool",
    "Outcome",
    "ResourcePool",
    "ResourceUnavailable",
    "SchemaMissingKeyError",
    "SlotsError",
    "UnevenNodes",
    "UnknownResourceType",
    "make_resource_pool",
    "read_specification",
]

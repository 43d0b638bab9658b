"""A pool of this machine's resources, which are lent and returned by the slot.

`ResourcePool` is the flat pool, `NodeResourcePool` the pool of several nodes, and
`make_resource_pool` makes a flat pool of this machine. README.md has examples. The classes that a
pool is made of (`Inventory`, `Allocator`, `AllocationTransaction`) can be used by themselves, and
so can the `Outcome` of asking whether something could ever fit.

Nothing here does I/O, but for what is written to a file that the caller opened. What can go wrong
is one tree:

    SlotsError
    ├── ResourceUnavailable         not now: the type, the request and what there is
    │   └── UnevenNodes             nodes differ in it (also an InvalidRequest)
    ├── EmptyResourcePoolError      the pool has no types at all
    ├── UnknownResourceType         the pool has no such type (also a TypeError)
    ├── InvalidRequest              the request is malformed (also a ValueError)
    ├── InvalidCheckin              not what was checked out, or no longer (also a ValueError)
    └── InvalidSpecification        the description of a pool is wrong (also a ValueError)
        └── SchemaMissingKeyError   it has none of the keys that say what there is
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

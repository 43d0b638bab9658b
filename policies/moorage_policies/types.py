"""The types of a policy's input and results, for editors and type checkers.

Import them below `if TYPE_CHECKING:`, as `moorage policy new` writes it: a policy needs none of
them where it runs. Fields are those of the contract; see "Write a policy" in the documentation.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from moorage.policy import FleetView


class PolicyResources(TypedDict):
    """The `resources` of a request, with a value in every field.

    Attributes:
        gpus: GPUs on each node.
        gpu_milli: Thousandths of each GPU; 1000 is a whole one.
        models: Accepted models; empty: any.
        gpu_memory_mib: Memory that each GPU has at least, in MiB.
        cpu_milli: Thousandths of CPU cores on each node.
        memory_mib: Memory on each node, in MiB.
        nodes: Nodes; more than one is a gang.
        topology: `nvlink`, `numa`, `rack`, `zone`, or empty.
    """

    gpus: int
    gpu_milli: int
    models: tuple[str, ...]
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    nodes: int
    topology: str


class PolicyCapacity(TypedDict):
    """The free resources of a node; GPUs in milli, by id."""

    cpu_milli: int
    memory_mib: int
    gpus: dict[str, int]


class PolicyCluster(TypedDict):
    """A cluster in `cluster_data`.

    Attributes:
        data: The document as registered.
        cluster_metrics: Its latest metrics; None if there are none.
        capacity: The free resources by node id; only reached by its key.
    """

    data: dict[str, Any]
    cluster_metrics: dict[str, Any] | None
    capacity: NotRequired[dict[str, PolicyCapacity]]


class PolicyInput(TypedDict):
    """The argument `input_data` of `eval`.

    Attributes:
        cluster_data: By cluster id.
        inputs: The request's `inputs`.
        resources: The request's demand; None if unknown.
        fleet: All nodes in numpy columns.
        seed: The seed of all random choices.
    """

    cluster_data: Mapping[str, PolicyCluster]
    inputs: dict[str, Any]
    resources: PolicyResources | None
    fleet: FleetView
    seed: int


class Proposal(TypedDict):
    """A proposed placement; `gpus` are ids of the node's devices."""

    cluster_id: str
    node_id: str
    gpus: list[str]
    gpu_milli: NotRequired[int]
    cpu_milli: NotRequired[int]
    memory_mib: NotRequired[int]


class Declined(TypedDict):
    """The reason why the policy proposes no placement."""

    declined: str


Answer = Proposal | Declined | dict[str, Any] | list[Proposal] | list[dict[str, Any]]
"""The value that `eval` returns: a placement, one per node of a gang, a refusal, or other JSON."""

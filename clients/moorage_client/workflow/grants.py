"""The interface between a run and its pool, the same for all pools.

`ResourcePool` counts amounts; `LeasedPool` holds leases of a server. Executors use only this
interface.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moorage.model import Placement
from moorage_client.workflow.journal import RunJournal
from moorage_client.workflow.requirements import ResourceRequirements
from moorage_client.workflow.timeline import ResourceTimeline


@dataclass(slots=True)
class Grant:
    """The resources that one node holds.

    Args:
        requirements: The node's requirements.
        placement: The places of the node's GPUs, one share per machine; empty if the pool only
            counts.
        environment: Variables for the processes that the task starts.
        held: An object in which the pool stores its own data about the grant.
        on_lost: Set by the run; called by the pool, from any thread, when the grant is lost.
        lost: The reason why the grant is lost; the pool sets it before it calls `on_lost`.
    """

    requirements: ResourceRequirements
    placement: Placement = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    held: Any = None
    on_lost: Callable[[Exception], object] | None = None
    lost: Exception | None = None


@dataclass(slots=True, eq=False)
class Claim:
    """One node's place in the queue of a pool.

    Args:
        node_name: The node's name.
        requirements: The node's requirements.
        wake: Called with the claim, from any thread, once it has a grant or an error. The function
            must return at once and take no lock that a caller of a pool holds.
        cost: The bottom level of the node; claims with a higher level are served sooner.
        journal: The journal of the run, or None.
        number: The number of the node in the run.
        grant: The grant, set by the pool.
        error: The reason why the pool can never grant the claim, set by the pool; or None.
        place: An object in which the pool stores its own data about the claim.
    """

    node_name: str
    requirements: ResourceRequirements
    wake: Callable[["Claim"], None]
    cost: float = 0.0
    journal: RunJournal | None = None
    number: int = -1
    grant: Grant | None = None
    error: Exception | None = None
    place: Any = None


class Pool(Protocol):
    """The methods of a pool that an executor calls, safe from any thread."""

    claims_max: int
    """Maximum claims of one run that wait in the queue at a time."""

    @property
    def capacities(self) -> dict[str, float]:
        """The total of each resource."""

    @property
    def timeline(self) -> ResourceTimeline:
        """The allocations over time."""

    @property
    def releases(self) -> int:
        """The number of releases so far, for `watch`."""

    def can_satisfy(self, requirements: ResourceRequirements) -> bool:
        """Return whether the pool's total capacity is enough for a node."""

    def resume(self, journal: RunJournal) -> None:
        """Release the grants that a killed program left, before a run continues its journal."""

    def take(self, requirements: ResourceRequirements, node_name: str) -> Grant | None:
        """Grant a node's requirements at once, or return None."""

    def claim(self, claim: Claim) -> None:
        """Put a claim into the queue; the pool may call `claim.wake` even before this returns."""

    def withdraw(self, claim: Claim) -> bool:
        """Remove a claim from the queue; False: it is already granted, so give its grant back."""

    def exchange(self, waiting: Claim, claim: Claim) -> bool:
        """Give the queue place of the claim `waiting` to `claim`; `waiting` leaves the queue.

        Returns:
            False if `waiting` is already granted, or the pool exchanges no places.
        """

    def outsized(self, requirements: ResourceRequirements, than: ResourceRequirements) -> bool:
        """Return whether `requirements` do not fit now because they are larger than `than`."""

    def give_back(
        self,
        grant: Grant,
        node_name: str,
        by: Callable[[], None] | None,
        journal: RunJournal | None,
    ) -> None:
        """End a grant; wake all watching runs but the caller, whose `wake` function is `by`."""

    def watch(self, wake: Callable[[], None], releases: int) -> bool:
        """Call `wake` once, when another run frees resources.

        Returns:
            False if resources were released since `releases` was read. `wake` is then not
            registered: look for a node that fits once more before you wait.
        """

    def unwatch(self, wake: Callable[[], None]) -> None:
        """End the `watch` with this function."""

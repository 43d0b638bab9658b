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
        held: The pool's own record of the grant.
        on_lost: Set by the run; called by the pool, from any thread, when the grant is lost.
        lost: The reason why the grant is lost, set by the pool before it calls `on_lost`.
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
        wake: Called with the claim, from any thread, when there is a grant or an error. It must
            return at once and take no lock that is ever held while a pool is called.
        cost: The bottom level of the node; higher ones are served sooner.
        journal: The journal of the run, or None.
        number: The number of the node in the run.
        grant: The grant, set by the pool.
        error: Set by the pool if it can never grant the claim.
        place: The pool's own record of the claim.
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
    """At most this many claims of one run may wait in the queue at a time."""

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
        """Return whether the total capacity is enough."""

    def resume(self, journal: RunJournal) -> None:
        """Clean up after a killed program, before a run continues with its journal."""

    def take(self, requirements: ResourceRequirements, node_name: str) -> Grant | None:
        """Grant the requirements at once, or not at all."""

    def claim(self, claim: Claim) -> None:
        """Join the queue; the pool calls `claim.wake` at each change, maybe before this returns."""

    def withdraw(self, claim: Claim) -> bool:
        """Leave the queue; False: the claim was granted meanwhile, and must be given back."""

    def exchange(self, waiting: Claim, claim: Claim) -> bool:
        """Put a claim into the queue place of another claim, which leaves the queue.

        Returns:
            False if the other claim was granted meanwhile, or the pool exchanges no places.
        """

    def outsized(self, requirements: ResourceRequirements, than: ResourceRequirements) -> bool:
        """Return whether requirements do not fit because they are larger than those of others."""

    def give_back(
        self,
        grant: Grant,
        node_name: str,
        by: Callable[[], None] | None,
        journal: RunJournal | None,
    ) -> None:
        """End a grant. `by` is the `wake` function of the calling run, which is not called."""

    def watch(self, wake: Callable[[], None], releases: int) -> bool:
        """Call `wake` once, when another run frees resources.

        Returns:
            False if resources were released since `releases` was read. `wake` is then not
            registered: look for a free node once more before you wait.
        """

    def unwatch(self, wake: Callable[[], None]) -> None:
        """End a `watch`."""

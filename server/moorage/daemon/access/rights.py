"""Which right each message needs, and which clusters a caller may change.

`Router` asks about messages, `web` about the documents of clusters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from moorage.core.facts import Refusal
from moorage.core.state import State
from moorage.gateway.deliver import Request
from moorage.model import ClusterId, Code
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError, status_of
from moorage.records.rights import Caller, Right

RIGHT_OF: Final[Mapping[type[Request], Right]] = {
    wire.AllocationRequest: Right.PLACE,
    wire.BlockRequest: Right.PLACE,
    wire.Release: Right.LEASE,
    wire.Renew: Right.LEASE,
    wire.Cancel: Right.LEASE,
    wire.Flush: Right.LEASE,
    wire.Exec: Right.EXEC,
    wire.Manage: Right.POLICY,
    wire.Cordon: Right.CORDON,
    wire.Drain: Right.CORDON,
    wire.Uncordon: Right.CORDON,
    wire.ReserveNodes: Right.RESERVE,
    wire.UnreserveNodes: Right.RESERVE,
    wire.SetQuota: Right.QUOTA,
    wire.RemoveQuota: Right.QUOTA,
    wire.Status: Right.READ,
    wire.Why: Right.READ,
    wire.QueueListing: Right.READ,
    wire.LeaseListing: Right.READ,
    wire.FleetListing: Right.READ,
    wire.ReservationListing: Right.READ,
    wire.QuotaListing: Right.READ,
    wire.DecisionListing: Right.READ,
    wire.DecisionFleet: Right.READ,
    wire.PastFleet: Right.READ,
    wire.WhatIf: Right.READ,
    wire.Logs: Right.READ,
    wire.WatchTopics: Right.READ,
    wire.Resume: Right.READ,
}
"""The right that each kind of message needs."""
assert RIGHT_OF.keys() == {wire.AllocationRequest, wire.BlockRequest, *wire.OPERATIONS.values()}

_DRY_RUNS_FOR_ALL: Final = wire.Cordon | wire.Drain | wire.Uncordon
"""Operations whose dry runs only need the right to read: they count leases of others."""
_DETAILS: Final[Mapping[str, Any]] = {"verdict": "not_you"}


def refusal(caller: Caller, message: Request) -> Refusal | None:
    """Return why a caller may not send a message, or None."""
    right = RIGHT_OF[type(message)]
    if caller.may(right):
        return None
    if isinstance(message, _DRY_RUNS_FOR_ALL) and message.dry_run and caller.may(Right.READ):
        return None
    field = "op" if type(message) in wire.OPERATIONS.values() else ""
    return Refusal(Code.UNAUTHORIZED, caller.refusal(right), field, right.expected, _DETAILS)


@dataclass(frozen=True, slots=True)
class FleetRights:
    """Decides who may change or delete which cluster.

    Args:
        state: Has the leases; read only.

    """

    state: State

    def check(self, caller: Caller, cluster_id: str) -> None:
        """Refuse to change or delete a cluster on which other tenants hold something.

        Raises:
            ServiceError: `unauthorized`, with the status 403.

        """
        if caller.may(Right.CLUSTER_ALL) or not self._is_used_by_others(
            caller, ClusterId(cluster_id)
        ):
            return
        does = f"change or delete the cluster “{cluster_id}” while other tenants have leases on it"
        raise ServiceError(
            Code.UNAUTHORIZED,
            caller.refusal(Right.CLUSTER_ALL, does),
            field="id",
            expected=Right.CLUSTER_ALL.expected,
            details=_DETAILS,
            status=status_of(Code.FORBIDDEN),  # The token is known.
        )

    def check_new(self, caller: Caller, cluster_id: str) -> None:
        """As `check`, for an id that no cluster has: leases on the last one may stand."""
        if ClusterId(cluster_id) not in self.state.clusters:
            self.check(caller, cluster_id)

    def _is_used_by_others(self, caller: Caller, cluster: ClusterId) -> bool:
        """Tell whether another tenant has a lease there, a warm one too, or a reservation."""
        leases = self.state.leases
        return any(
            leases[name].tenant != caller.tenant
            for place, held in self.state.places.items()
            if place[0] == cluster
            for name in held
        ) or any(
            each.tenant != caller.tenant and any(place[0] == cluster for place in each.nodes)
            for each in self.state.reserved.by_id.values()
        )

"""Rights: the one table of operations that only operators may do.

Both front doors ask it: `operations` about messages, `web` about the documents of clusters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moorage.core.facts import Refusal
from moorage.core.state import State
from moorage.model import ClusterId, Code, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError, status_of

OPERATORS_DO: Final[Mapping[type[wire.Operation], str]] = {
    wire.Cordon: "take clusters and nodes out of service",
    wire.Drain: "take clusters and nodes out of service",
    wire.Uncordon: "put clusters and nodes back into service",
    wire.ReserveNodes: "reserve nodes",
    wire.UnreserveNodes: "end reservations",
    wire.SetQuota: "set quotas",
    wire.RemoveQuota: "remove quotas",
}
"""Operations on what all share, in words that follow "may"."""
DRY_RUNS_FOR_ALL: Final = frozenset({wire.Cordon, wire.Drain, wire.Uncordon})
"""Of these, those whose dry runs every tenant may do: they only count leases of others."""
_EXPECTED: Final = "the token of an operator"
_DETAILS: Final[Mapping[str, Any]] = {"verdict": "not_you"}


@dataclass(frozen=True, slots=True)
class Rights:
    """Decides which tenant may do which operation.

    Args:
        is_operator: Whether a tenant may do all of it, and see leases of others.
        state: Has the leases; read only.

    """

    is_operator: Callable[[Tenant], bool]
    state: State

    def refusal(self, who: Tenant, message: wire.Operation) -> Refusal | None:
        """Return why a tenant may not do an operation, or None."""
        does = OPERATORS_DO.get(type(message))
        if does is None or self.is_operator(who):
            return None
        if getattr(message, "dry_run", False) and type(message) in DRY_RUNS_FOR_ALL:
            return None
        return Refusal(Code.UNAUTHORIZED, _reason(who, does), "op", _EXPECTED, _DETAILS)

    def check_cluster(self, who: Tenant, cluster_id: str) -> None:
        """Refuse to have a tenant change or delete a cluster that others hold something of.

        Raises:
            ServiceError: `unauthorized`, with the status 403.

        """
        if self.is_operator(who) or not self._is_used_by_others(who, ClusterId(cluster_id)):
            return
        does = f"change or delete the cluster “{cluster_id}” while other tenants have leases on it"
        raise ServiceError(
            Code.UNAUTHORIZED,
            _reason(who, does),
            field="id",
            expected=_EXPECTED,
            details=_DETAILS,
            status=status_of(Code.FORBIDDEN),  # The token is known.
        )

    def check_new_cluster(self, who: Tenant, cluster_id: str) -> None:
        """As `check_cluster`, for an id that no cluster has: leases on the last one may stand."""
        if ClusterId(cluster_id) not in self.state.clusters:
            self.check_cluster(who, cluster_id)

    def _is_used_by_others(self, who: Tenant, cluster: ClusterId) -> bool:
        """Tell whether another tenant has a lease there, a warm one too, or a reservation."""
        leases = self.state.leases
        return any(
            leases[name].tenant != who
            for place, held in self.state.places.items()
            if place[0] == cluster
            for name in held
        ) or any(
            each.tenant != who and any(place[0] == cluster for place in each.nodes)
            for each in self.state.reserved.by_id.values()
        )


def _reason(who: Tenant, does: str) -> str:
    """Return the reason of a refusal, with the setting that gives the right."""
    return (
        f"Tenant “{who}” may not {does}: only operators may. Use the token of a tenant that the "
        "setting `operators` (MOORAGE_OPERATORS) names, or have yours added there."
    )

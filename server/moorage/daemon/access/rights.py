"""Which right each message needs, and which clusters, policies and aliases a caller may change.

`Router` asks about messages, `web` about documents.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moorage.catalog.embedded.aliases import Alias, name_of
from moorage.core.state.facts import Refusal
from moorage.core.state.state import State
from moorage.gateway.deliver import Request
from moorage.model import ClusterId, Code
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError, status_of
from moorage.protocol.registry import PolicyDocuments
from moorage.records.json_values import JsonMapping
from moorage.records.rights import SERVER_ITSELF, Caller, Right

RIGHT_OF: Final[Mapping[type[Request], Right]] = {
    wire.AllocationRequest: Right.PLACE,
    wire.BlockRequest: Right.PLACE,
    wire.Release: Right.LEASE,
    wire.Renew: Right.LEASE,
    wire.Cancel: Right.LEASE,
    wire.Flush: Right.LEASE,
    wire.Exec: Right.EXEC,
    wire.Files: Right.EXEC,
    wire.Manage: Right.POLICY,
    wire.Cordon: Right.CORDON,
    wire.Drain: Right.CORDON,
    wire.Uncordon: Right.CORDON,
    wire.ForgetMachine: Right.CORDON,
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
"""Operations whose dry runs need only the right to read: these show only the number of other
tenants' leases."""
_DETAILS: Final[JsonMapping] = {"verdict": "not_you"}


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
class Owners:
    """Functions that return the owner of a document; empty or None: all tenants own it."""

    cluster: Callable[[str], str]
    metrics: Callable[[str], str]
    block: Callable[[str], str | None]
    executor: Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Decides who may change which cluster, block, executor, policy and alias.

    A cluster, block, executor or policy belongs to the tenant that registered it, an alias to the
    tenant that made it; metrics to the owner of their cluster or block, else to the tenant that
    stored them. Objects that were made before owners were recorded belong to all tenants. Any
    tenant may start a shadow on any alias: a shadow changes no answer, and its report shows a
    tenant only the tenant's own requests.

    Args:
        state: The core's state, which has the leases; read only.
        find_alias: Returns an alias by its name, or by a bare policy name.
        owners: Return the owners of documents.
        policy_uris: Returns all versions of policies.
    """

    state: State
    policies: PolicyDocuments
    find_alias: Callable[[str], Alias | None]
    owners: Owners
    policy_uris: Callable[[], Sequence[str]]

    def check_cluster(self, caller: Caller, cluster_id: str) -> None:
        """Refuse to change or delete a cluster that another tenant owns or has leases on.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        if caller.may(Right.CLUSTER_ALL):
            return
        does = f"change or delete the cluster “{cluster_id}”"
        _check_owner(caller, self.owners.cluster(cluster_id), does)
        self._check_not_in_use(caller, cluster_id, does)

    def check_metrics(self, caller: Caller, cluster_id: str) -> None:
        """Refuse to report or remove the metrics of another tenant's cluster.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        does = f"report or remove metrics of the cluster “{cluster_id}”"
        _check_owner(caller, self.owners.metrics(cluster_id), does)

    def check_block(self, caller: Caller, block_id: str) -> None:
        """Refuse to change or delete a block of another tenant, or its metrics.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        does = f"change or delete the block “{block_id}” or its metrics"
        _check_owner(caller, self.owners.block(block_id), does)

    async def check_executor(self, caller: Caller, name: str) -> None:
        """Refuse to change or delete an executor of another tenant.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        does = f"change or delete the executor “{name}”"
        _check_owner(caller, await self.owners.executor(name), does)

    def check_new_cluster(self, caller: Caller, cluster_id: str) -> None:
        """Refuse to register a deleted cluster again while other tenants have leases on it.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        if ClusterId(cluster_id) not in self.state.clusters and not caller.may(Right.CLUSTER_ALL):
            self._check_not_in_use(caller, cluster_id, f"register the cluster “{cluster_id}” again")

    def _check_not_in_use(self, caller: Caller, cluster_id: str, does: str) -> None:
        if self._is_used_by_others(caller, ClusterId(cluster_id)):
            does = f"{does} while other tenants have leases on it"
            raise _refusal(caller, Right.CLUSTER_ALL, does, "id")

    async def check_policy(self, caller: Caller, uri: str) -> None:
        """Refuse to change or delete a policy of another tenant.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        if caller.may(Right.POLICY_ALL):
            return
        owner = (await self._registration(uri))[1]
        if owner not in {"", caller.tenant}:
            does = f"change or delete {uri}, a policy of the tenant “{owner}”"
            raise _refusal(caller, Right.POLICY_ALL, does, "policy_rule_uri")

    async def check_alias(self, caller: Caller, given: str) -> None:
        """Refuse to change another tenant's alias, or to make one for another tenant's policy.

        Otherwise a stranger could take the bare name of a policy that has no alias yet.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        if caller.may(Right.POLICY_ALL):
            return
        alias = self.find_alias(given)
        if alias is None:
            owner, does = await self._first_owner(name_of(given)), f"make the alias {given}"
            does += f" of a policy that the tenant “{owner}” registered first"
        else:
            owner = alias.owner
            does = f"change or delete {alias.name}, an alias of the tenant “{owner}”"
        if owner not in {"", caller.tenant}:
            raise _refusal(caller, Right.POLICY_ALL, does, "alias")

    def check_shadow(self, caller: Caller, given: str) -> None:
        """Refuse to replace or stop another tenant's shadow, unless the alias is the caller's.

        Raises:
            ServiceError: `unauthorized`, with the status 403.
        """
        alias = self.find_alias(given)
        if alias is None or not alias.shadow or caller.may(Right.POLICY_ALL):
            return
        if caller.tenant not in {alias.owner, alias.shadow_owner}:
            does = f"replace or stop the shadow of {alias.name}, which is of the tenant "
            does += f"“{alias.shadow_owner}”"
            raise _refusal(caller, Right.POLICY_ALL, does, "alias")

    async def _first_owner(self, name: str) -> str:
        """Return the tenant that registered the oldest existing version of a policy."""
        uris = [uri for uri in self.policy_uris() if name_of(uri) == name]
        return min([await self._registration(uri) for uri in uris], default=(0.0, ""))[1]

    async def _registration(self, uri: str) -> tuple[float, str]:
        """Return when a policy was registered, and by whom; empty if that is not known."""
        try:
            history = await self.policies.history(uri)
        except ServiceError:
            return 0.0, ""  # Never registered, or another service has the policies.
        entries = (e for e in reversed(history) if e["what"] == "registered")
        return next(((float(e["at"]), str(e["who"])) for e in entries), (0.0, ""))

    def _is_used_by_others(self, caller: Caller, cluster: ClusterId) -> bool:
        """Return whether another tenant has a lease, warm or not, or a reservation on a cluster."""
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


def _check_owner(caller: Caller, owner: str | None, does: str) -> None:
    if not owner or owner == caller.tenant or caller.may(Right.CLUSTER_ALL):
        return
    does += (
        ", which the server maintains" if owner == SERVER_ITSELF else f" of the tenant “{owner}”"
    )
    raise _refusal(caller, Right.CLUSTER_ALL, does, "id")


def _refusal(caller: Caller, right: Right, does: str, field: str) -> ServiceError:
    return ServiceError(
        Code.UNAUTHORIZED,
        caller.refusal(right, does),
        field=field,
        expected=right.expected,
        details=_DETAILS,
        status=status_of(Code.FORBIDDEN),  # The token is known.
    )

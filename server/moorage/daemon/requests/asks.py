"""Turns a client's request into an `Ask` of the core, or into a refusal that says what to change.

`admission` calls it once everything that the ask needs is known: no function here waits, except
`search_candidates`.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import structs

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.catalog.values import SearchAction
from moorage.config.settings import Config
from moorage.core.state.facts import Refusal
from moorage.core.state.refusals import nearest, nearest_or_known
from moorage.daemon.access.lease_tokens import LeaseTokens, digest
from moorage.daemon.answers import refusal_of
from moorage.daemon.policies.finder import Finder
from moorage.daemon.requests.reading import NEAREST, size_of, too_long, unknown_policy
from moorage.daemon.workloads.control import WorkloadControl
from moorage.daemon.workloads.reach import out_of_reach, within_reach
from moorage.model import Ask, ClusterId, Code, Demand, Nodes, Provision, RequestId, Tenant
from moorage.policy import Fleet
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest
from moorage.records.json_values import JsonMapping

WARNED_MAX: Final = 20
"""Maximum unknown clusters that a warning names; further clusters are only counted."""
_DRAWN_BYTES: Final = 16
_DRAWN_MAX: Final = 256
"""Number of requests for which random bytes are drawn in one call."""
_ALIKE_BYTES: Final = 2
"""Number of leading bytes that all ids of one draw share. Their facts are then neighbours in the
ledger's index of ids, so a commit writes a few pages of the index, not one for each fact."""


class Asks:
    """Makes the asks of clients' requests.

    Args:
        config: Limits and defaults.
        finder: Finds the clusters that a request describes.
        fleet: Returns the present fleet; read only.
    """

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        finder: Finder,
        workloads: WorkloadControl,
        tokens: LeaseTokens,
        fleet: Callable[[], Fleet],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._finder = finder
        self._workloads = workloads
        self._tokens = tokens
        self._fleet = fleet
        self._drawn: list[bytes] = []

    def wanted(self, message: AllocationRequest) -> tuple[ClusterId, ...] | None:
        """Return the clusters that a request names; None: it names none; empty: too many."""
        named = message.candidates()
        too_many = named is not None and len(named) > self._config.candidates_max
        return () if too_many else named

    async def search_candidates(
        self, tenant: Tenant, message: AllocationRequest, allowance: Allowance
    ) -> tuple[AllocationRequest, list[str]]:
        """Search a request's candidates; return the request that names them, and warnings."""
        body = message.filter or message.search
        assert body is not None
        action: SearchAction = "filter" if message.filter else "search"
        named = await self._catalog.search.ask(action, body, allowance)
        if named is None:
            found = await self._finder.find(
                action, body, tenant, allowance, at=action, candidates=True
            )
            ids, matched = tuple(map(ClusterId, found.ids)), found.matched
            warnings = found.warnings
        else:
            ids, matched, warnings = tuple(named), len(named), list[str]()
        if not ids:
            what = f"{matched} clusters match, but none is live" if matched else ""
            reason = f"{action}: {what or 'no cluster matches'}."
            expected = "a description that matches live clusters"
            raise ServiceError(Code.UNKNOWN_CLUSTERS, reason, field=action, expected=expected)
        limit = self._config.candidates_max
        if len(ids) > limit:
            warnings.append(f"Only the first {limit} of {len(ids)} clusters found were considered.")
        return structs.replace(message, clusters=ids[:limit], filter=None, search=None), warnings

    def ask(
        self, tenant: Tenant, message: AllocationRequest, warnings: list[str]
    ) -> tuple[Ask, str] | Refusal:
        """Return the ask for a message, and the token of the lease that may be granted."""
        record = self._catalog.memory.policy(message.policy_rule_uri)
        if record is None:
            return unknown_policy(message.policy_rule_uri, self._catalog.memory.policy_uris())
        refusal = self._refuse_unsupported(message)
        if refusal is not None:
            return refusal
        demand, provision = message.demand(), message.provisioning()
        alternatives = message.demands()
        demands = alternatives or (demand,)
        if provision is not None:
            most = max(1 if each is None else each.nodes for each in demands)
            settled = self._workloads.resolve_provision(provision, most)
            if isinstance(settled, Refusal):
                return settled
            provision = settled
        candidates = self._candidates(message, warnings)
        if candidates is not None and not isinstance(candidates, tuple):
            return candidates
        reached = self._reach(provision, candidates, demands[-1])
        if not isinstance(reached, tuple):
            return reached
        candidates, avoid = reached
        inputs = message.inputs
        parameters: JsonMapping = message.parameters or {}
        settings: JsonMapping = message.settings or {}
        if record.schemas is not None:
            try:
                inputs = record.schemas.complete(inputs)
                parameters, settings = record.schemas.overrides(parameters, settings)
            except ServiceError as error:
                return refusal_of(error)
        drawn = self._draw()
        request = RequestId(drawn[:8].hex())
        token = self._tokens.make(request)
        ask = Ask(  # With more keyword arguments than these, Python would make a dict.
            request,
            tenant,
            record.ref,
            candidates,
            demand=demand,
            alternatives=alternatives,
            terms=message.terms(),
            provision=provision,
            inputs=inputs,
            parameters=parameters,
            settings=settings,
            token_digest=digest(token),
            seed=int.from_bytes(drawn[8:]) >> 1,
            explain=message.explain,
            dry_run=message.dry_run,
            size=size_of(message),
            avoid=avoid,
            deadline_seconds=message.deadline_seconds or 0.0,
        )
        return ask, token

    def _reach(
        self,
        provision: Provision | None,
        candidates: tuple[ClusterId, ...] | None,
        demand: Demand | None,
    ) -> tuple[tuple[ClusterId, ...] | None, Nodes] | Refusal:
        """Return the candidates where the backend can start workloads, and nodes to avoid."""
        if provision is None:
            return candidates, ()
        name, supports = provision.backend, self._workloads.supports()
        reached = within_reach(self._fleet(), supports[name], candidates, demand)
        if reached is None:
            return out_of_reach(self._fleet(), name, supports, candidates, demand)
        return reached

    def _draw(self) -> bytes:
        """Return random bytes for the id and the seed of one request."""
        if not self._drawn:  # A system call costs more than all the rest.
            many = secrets.token_bytes(_DRAWN_BYTES * _DRAWN_MAX)
            ends = range(_DRAWN_BYTES, len(many) + 1, _DRAWN_BYTES)
            own = _DRAWN_BYTES - _ALIKE_BYTES
            self._drawn = [many[:_ALIKE_BYTES] + many[end - own : end] for end in ends]
        return self._drawn.pop()

    def _refuse_unsupported(self, message: AllocationRequest) -> Refusal | None:
        if (message.deadline_seconds or 0) > self._config.policy_deadline_seconds_max:
            return too_long("deadline_seconds", self._config.policy_deadline_seconds_max)
        if message.lease is not None:
            longest = self._config.lease_ttl_seconds_max
            if message.lease.ttl_seconds > longest:
                return too_long("lease.ttl_seconds", longest, "; renew it for longer")
        if message.provision is not None:
            if message.lease is None:
                reason = "provision: expected a `lease`, too: a workload only starts under a lease."
                return Refusal(
                    Code.BAD_MESSAGE, reason, "lease", "a `lease`, under which the workload starts"
                )
            provision = message.provision
            if provision.attempts_max is not None and provision.on_failure != "requeue":
                expected = '`on_failure` "requeue" as well; otherwise there is only one start'
                reason = f"provision.attempts_max: expected {expected}."
                return Refusal(Code.BAD_MESSAGE, reason, "provision.attempts_max", expected)
            longest = self._config.keep_warm_seconds_max
            if provision.keep_warm_seconds > longest:
                return too_long("provision.keep_warm_seconds", longest)
        return None

    def _candidates(
        self, message: AllocationRequest, warnings: list[str]
    ) -> tuple[ClusterId, ...] | Refusal | None:
        limit, memory = self._config.candidates_max, self._catalog.memory
        named = message.candidates()
        if named is None:
            live = memory.live_ids()
            if len(live) <= limit:
                return None
            what = f"only the first {limit} of {len(live)} live clusters were considered"
            warnings.append(f"No clusters, filter or search was given: {what}.")
            return live[:limit]
        if len(named) > limit:
            reason = f"clusters: expected at most {limit} ids, got {len(named)}."
            return Refusal(Code.BAD_MESSAGE, reason, "clusters", f"at most {limit} ids")
        missing = [name for name in named if not memory.is_live(name)]
        if not missing:
            return named
        gone = [name for name in missing if not memory.knows(name)]
        asleep = [name for name in missing if memory.knows(name)]
        for names, what in ((gone, "Unknown clusters"), (asleep, "Clusters that are not live")):
            if names:
                warnings.append(f"{what} were left out: {self._list(names)}.")
        candidates = tuple(name for name in named if memory.is_live(name))
        if not candidates:
            which = f"none of the {len(named)} named clusters is registered and live"
            reason = f"clusters: {which}: {self._list(missing)}."
            expected = "ids of live clusters"
            details = {"unknown": missing[:WARNED_MAX]}
            return Refusal(Code.UNKNOWN_CLUSTERS, reason, "clusters", expected, details)
        return candidates

    def _list(self, missing: Sequence[ClusterId]) -> str:
        """List clusters that are not live; add similar names to the first few."""
        memory = self._catalog.memory
        shown: list[str] = list(missing[:WARNED_MAX])
        for number, name in enumerate(shown[:NEAREST]):
            if not memory.knows(missing[number]):
                find = nearest if number else nearest_or_known  # List existing names once.
                shown[number] += find(name, memory.live_ids())
        more = f" and {len(missing) - WARNED_MAX} more" if len(missing) > WARNED_MAX else ""
        return ", ".join(shown) + more

"""Publishing: decides which version of a policy answers under an alias; changes aliases.

`admission` asks `choose` for every request that names an alias; the HTTP services change aliases.
A change is durable before it is answered, and in force at once: requests that were admitted
before it finish with the version that they were given.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from typing import Final

import structlog
from prometheus_client.metrics_core import Metric

from moorage.catalog.embedded.aliases import (
    Alias,
    AliasChange,
    Canary,
    Standing,
    What,
    alias_name,
    name_of,
    unknown_alias,
)
from moorage.catalog.ports import Catalog
from moorage.core.allocator import Allocator
from moorage.core.turns.effects import Response
from moorage.daemon.news.watchers import Watchers
from moorage.daemon.observability.counters import counters, gauges_of
from moorage.daemon.publishing.shadows import Shadows
from moorage.daemon.publishing.version_statistics import VersionStatistics
from moorage.daemon.publishing.versions import Versions
from moorage.daemon.tasks import Tasks
from moorage.model import Code, PolicyRef, Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest
from moorage.protocol.registry import CanaryStart
from moorage.records.json_values import JsonObject
from moorage.records.policies import ShadowComparison
from moorage.sandbox.host.sandbox import Sandbox

SELF: Final = "moored"
"""The recorded author of changes that the server itself makes to an alias."""
_SHARE_BYTES: Final = 8
_FINDING_CHARS_MAX: Final = 300
Noting = Callable[[Response, float | None, float], None]
"""Records an answer, its duration (None: the duration is not the policy's), and the monotonic
time."""

log = structlog.get_logger("moored")


class Publishing:
    """Chooses versions for aliases, changes aliases, and has their statistics and shadows.

    Args:
        sandbox: Loads a version before it is activated.
        allocator: Knows to which version the first request of an idempotency key went; read only.
        watchers: The clients that get changes as events of the topic `policies`.
        failures_max: Faults in a row after which an alias falls back; 0: never.

    Attributes:
        shadows: Consult the candidates that aliases name.
    """

    def __init__(
        self,
        catalog: Catalog,
        sandbox: Sandbox,
        allocator: Allocator,
        watchers: Watchers,
        tasks: Tasks,
        failures_max: int,
    ) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._allocator = allocator
        self._watchers = watchers
        self._tasks = tasks
        self._failures_max = failures_max
        self._statistics: dict[tuple[str, str], VersionStatistics] = {}
        self._changes: dict[What, int] = {}
        self._falling: set[str] = set()
        self._number = 0
        # No version is deleted between the check that it exists and its use by an alias.
        self._changing = asyncio.Lock()
        self.aliases = catalog.aliases
        self.shadows = Shadows(catalog, sandbox, allocator, tasks)
        self._versions = Versions(catalog, sandbox)
        for alias in self.aliases.all():
            self.shadows.follow(alias.name, alias)

    # The hot path --------------------------------------------------------------------------

    def choose(self, tenant: Tenant, message: AllocationRequest) -> str:
        """Return the version that answers a request whose `policy_rule_uri` names an alias.

        A repeated request (one with an idempotency key that is known) goes where the first one
        went, even if another version was activated since.
        """
        alias = self.aliases.find(message.policy_rule_uri)
        assert alias is not None  # The caller found its name in `aliases`.
        key = message.lease.idempotency_key if message.lease is not None else ""
        if key:
            earlier = self._allocator.policy_of(tenant, key)
            if earlier and name_of(earlier) == name_of(alias.name):
                return earlier
        if alias.canary is not None and self._draw(alias.canary, tenant, key):
            return alias.canary.version
        return alias.version

    def _draw(self, canary: Canary, tenant: Tenant, key: str) -> bool:
        """Return whether a request goes to the candidate; equal keys always get the same answer."""
        if canary.by == "tenant":
            key = ""
        elif not key:
            self._number += 1  # Without a key, each request counts as a new one.
            key = f" {self._number}"
        text = f"{canary.seed}\0{tenant}\0{key}".encode()
        drawn = int.from_bytes(blake2b(text, digest_size=_SHARE_BYTES).digest())
        return drawn < canary.percent / 100 * (1 << 8 * _SHARE_BYTES)

    def statistics(self, given: str, version: str, tenant: Tenant) -> Noting | None:
        """Return a function that counts the outcome of a request; None if it named no alias."""
        alias = self.aliases.find(given)
        if alias is None or version not in alias.versions:
            return None
        statistics = self._statistics_of(alias.name, version)
        statistics.asked += 1
        return partial(statistics.note, tenant)

    def _statistics_of(self, name: str, version: str) -> VersionStatistics:
        statistics = self._statistics.get((name, version))
        if statistics is None:
            statistics = VersionStatistics(version, lambda failed: self._failed(name, failed))
            self._statistics[name, version] = statistics
        return statistics

    # Changes -------------------------------------------------------------------------------

    async def activate(self, given: str, uri: str, who: str, *, force: bool = False) -> JsonObject:
        """Make a version the active one of an alias; activating it again changes nothing.

        Args:
            given: The alias, or a bare policy name for its `stable`; it is made if it does not
                exist.
            uri: The version, of a policy of the alias's name.
            who: The caller's tenant.
            force: Whether a version that fails as the alias's shadow is accepted; else it is
                refused with `conflict`.

        Raises:
            ServiceError: `unknown_policy`; `bad_policy`: the version cannot be loaded;
                `bad_message`.
        """
        ref = await self._versions.require_of(name := alias_name(given), uri, who)
        if not force:
            self.shadows.refuse_failing(name, uri, who)
        return await self._activate(name, ref, who, "activated")

    async def roll_back(self, given: str, who: str) -> JsonObject:
        """Activate the version that was active before the present one; a second call undoes this.

        Raises:
            ServiceError: `not_found`: there is no such alias, or it had one version only.
                `conflict`: the server fell back from the former version, or its URI has other
                content now.
        """
        alias = self._find(given)
        if not alias.former:
            reason = f"alias: {alias.name} never had another version than {alias.version}"
            raise ServiceError(Code.NOT_FOUND, reason, field="alias")
        if alias.history and alias.history[-1].what == "fell_back":
            # After a fallback, "back" is ambiguous: an author must activate a version.
            reason = f"alias: {alias.name} fell back from {alias.former}, which kept failing"
            expected = f"an explicit activation of {alias.former}, if you want it"
            raise ServiceError(Code.CONFLICT, reason, field="alias", expected=expected)
        ref = await self._versions.require_of(alias.name, alias.former, who, alias.former_digest)
        return await self._activate(alias.name, ref, who, "rolled_back")

    async def _activate(
        self, name: str, ref: PolicyRef, who: str, what: What, reason: str = "", expected: str = ""
    ) -> JsonObject:
        """Make a version active; if `expected` is given, only in place of that version."""
        uri = ref.uri
        self._sandbox.close_circuits(uri)
        before = self.aliases.find(name)
        left = self._catalog.memory.policy(before.version) if before else None
        digest = left.ref.digest if left else ""
        standing: Standing = self._standing(name, before.version) if before else "untried"

        def change(alias: Alias | None) -> Alias:
            if alias is None:
                return Alias(name, uri, owner=who).replace(AliasChange(time.time(), who, what, uri))
            if alias.version == uri or (expected and alias.version != expected):
                return alias
            # The version before the fallback was failing, even if it gave an answer meanwhile.
            stood: Standing = "failing" if what == "fell_back" else standing
            entry = AliasChange(time.time(), who, what, uri, alias.version, stood, digest, reason)
            canary = alias.canary if alias.canary and alias.canary.version != uri else None
            shadow = alias.shadow if alias.shadow != uri else ""
            return alias.replace(entry, version=uri, canary=canary, shadow=shadow)

        after = await self._put(name, change, ref)
        if after.history[-1:] != (before.history[-1:] if before else ()):
            self._statistics_of(name, uri).reset()
            self._log_change(after)
        return after.document()

    async def start_canary(self, given: str, start: CanaryStart, who: str) -> JsonObject:
        """Send a share of an alias's requests to another version; the report starts again.

        The start does not reset the active version's faults in a row, which lead to a fallback.
        """
        alias = self._find(given)
        uri = start.policy_rule_uri
        ref = await self._versions.require_of(alias.name, uri, who)
        self._refuse_active(alias, uri)
        canary = Canary(uri, start.percent, start.by, start.seed)
        after = await self._change(alias.name, who, "canary_started", ref, canary=canary)
        self._statistics_of(alias.name, after.version).restart_report()
        self._statistics_of(alias.name, uri).reset()
        return after.document()

    async def stop_canary(self, given: str, who: str) -> JsonObject:
        """Send all requests to the active version again."""
        alias = self._find(given)
        if alias.canary is None:
            raise ServiceError(Code.NOT_FOUND, f"alias: {alias.name} has no canary", field="alias")
        after = await self._change(
            alias.name, who, "canary_ended", alias.canary.version, canary=None
        )
        return after.document()

    async def start_shadow(self, given: str, uri: str, who: str) -> JsonObject:
        """Send each request also to a candidate, which may be of any policy; start a new report."""
        alias = self._find(given)
        ref = await self._versions.require(uri, who)
        self._refuse_active(alias, uri)
        self.shadows.follow(alias.name, None)
        after = await self._change(alias.name, who, "shadow_started", ref, shadow=uri)
        return after.document()

    async def stop_shadow(self, given: str, who: str) -> JsonObject:
        """Stop the shadow of an alias."""
        alias = self._find(given)
        if not alias.shadow:
            raise ServiceError(Code.NOT_FOUND, f"alias: {alias.name} has no shadow", field="alias")
        after = await self._change(alias.name, who, "shadow_ended", alias.shadow, shadow="")
        return after.document()

    def shadow_report(self, given: str, who: str) -> ShadowComparison:
        """Return how a candidate's answers differ from the active version's since its start.

        The alias's owner sees the whole report, others only the part about their own requests.
        """
        alias = self._find(given)
        report = self.shadows.report(alias.name, Tenant(who), whole=alias.is_owned_by(who))
        if report is None:
            reason = f"alias: {alias.name} has no shadow; start one with {{policy_rule_uri}}"
            raise ServiceError(Code.NOT_FOUND, reason, field="alias")
        return report

    async def delete(self, given: str) -> JsonObject:
        """Delete an alias; return it as it was. Its versions stay."""
        gone = await self.aliases.delete(self._find(given).name)
        self._tidy(gone.name)
        self.shadows.follow(gone.name, None)
        return gone.document()

    async def delete_version(self, uri: str, who: str, *, force: bool = False) -> JsonObject:
        """Delete a version and return its document, or refuse where an alias needs it.

        Args:
            uri: The version.
            who: The caller's tenant.
            force: Whether a version that an alias would fall back to is deleted, too. A version
                that an alias sends requests to is never deleted.

        Raises:
            ServiceError: `already_exists` naming the aliases; `unknown_policy`.
        """
        async with self._changing:
            self._versions.refuse_deletion(uri, force=force)
            return await self._catalog.policies.delete(uri, who)

    async def _change(
        self,
        name: str,
        who: str,
        what: What,
        named: PolicyRef | str,
        reason: str = "",
        **fields: object,
    ) -> Alias:
        """Change an alias; if `named` is a `PolicyRef`, check that it is still registered."""
        ref = named if isinstance(named, PolicyRef) else None
        version = ref.uri if ref else str(named)

        def change(alias: Alias | None) -> Alias:
            if alias is None:
                raise unknown_alias(name, (each.name for each in self.aliases.all()))
            return alias.replace(
                AliasChange(time.time(), who, what, version, reason=reason), **fields
            )

        after = await self._put(name, change, ref)
        self._log_change(after)
        return after

    async def _put(
        self, name: str, change: Callable[[Alias | None], Alias], ref: PolicyRef | None
    ) -> Alias:
        """Change an alias if `ref`, its loaded new version, is still registered; None: no check."""
        async with self._changing:
            if ref is not None:
                self._versions.record(ref.uri, ref.digest)
            return await self.aliases.change(name, change)

    def _log_change(self, alias: Alias) -> None:
        """Log the latest change of an alias; drop the counts of versions that it no longer uses."""
        change = alias.history[-1]
        self._changes[change.what] = self._changes.get(change.what, 0) + 1
        self._tidy(alias.name, *alias.versions)
        self.shadows.follow(alias.name, alias)
        told = ("at", "who", "what", "version", "former", "reason")
        data: JsonObject = {"alias": alias.name, "policy_rule_uri": alias.version}
        data |= {name: getattr(change, name) for name in told}
        by_itself = change.who == SELF  # It fell back, or ended a canary: a user should look.
        (log.warning if by_itself else log.info)("alias_changed", **data)
        self._watchers.tell("policies", change.what, data)

    def _tidy(self, name: str, *versions: str) -> None:
        for key in [k for k in self._statistics if k[0] == name and k[1] not in versions]:
            del self._statistics[key]

    # Failing -------------------------------------------------------------------------------

    def _standing(self, name: str, version: str) -> Standing:
        statistics = self._statistics.get((name, version))
        if statistics is None:
            return "untried"
        if (
            statistics.consecutive
            and statistics.consecutive >= self._failures_max
            and statistics.fails_all
        ):
            return "failing"
        if statistics.consecutive and not statistics.was_good:
            return "failing"
        return "good" if statistics.was_good else "untried"

    def _failed(self, name: str, statistics: VersionStatistics) -> None:
        """Fall back if a version has failed too often in a row, and for all its users."""
        bearable = self._failures_max + statistics.bearable
        if not self._failures_max or statistics.consecutive < bearable:
            return
        alias = self.aliases.find(name)
        if alias is None or name in self._falling:
            return
        if not statistics.fails_all:
            if statistics.consecutive == bearable:
                self._stays(
                    name,
                    statistics.version,
                    statistics.failure,
                    "it fails, but not for all tenants that use it",
                )
            return
        self._falling.add(name)
        if alias.canary is not None and alias.canary.version == statistics.version:
            self._tasks.spawn(self._end_canary(name, statistics.version, statistics.failure))
        elif alias.version == statistics.version:
            self._tasks.spawn(self._fall_back(name, statistics, statistics.failure))
        else:
            self._falling.discard(name)  # The version is not consulted any more.

    async def _end_canary(self, name: str, version: str, failure: str) -> None:
        try:
            await self._change(name, SELF, "canary_ended", version, failure, canary=None)
        except ServiceError as error:
            log.warning(
                "canary_not_ended", alias=name, finding=f"the canary could not be ended: {error}"
            )
        finally:
            self._falling.discard(name)

    async def _fall_back(self, name: str, statistics: VersionStatistics, failure: str) -> None:
        """Activate the last good version that still loads; change nothing if there is none.

        `failure` is the reason at the time of the decision: later answers do not change it.
        """
        try:
            alias = self.aliases.find(name)
            finding = "it fails, and the alias has no version to fall back to"
            for uri, digest in alias.fallbacks() if alias else ():
                try:
                    ref = await self._versions.require_of(name, uri, SELF, digest)
                    await self._activate(name, ref, SELF, "fell_back", failure, statistics.version)
                except ServiceError as error:
                    log.warning(
                        "fallback_failed", alias=name, finding=f"{uri} cannot take over: {error}"
                    )
                    finding += f"; {uri} cannot take over: {error.reason}"[:_FINDING_CHARS_MAX]
                else:
                    return
            # The next attempt comes after as many more faults, not after each fault.
            statistics.bearable = statistics.consecutive
            self._stays(name, statistics.version, failure, finding[: 4 * _FINDING_CHARS_MAX])
        finally:
            self._falling.discard(name)

    def _stays(self, name: str, version: str, failure: str, finding: str) -> None:
        data = {"alias": name, "policy_rule_uri": version, "reason": failure}
        log.warning("no_fallback", finding=finding, **data)
        self._watchers.tell("policies", "no_fallback", {**data, "finding": finding})

    # Looking -------------------------------------------------------------------------------

    def list(self) -> list[JsonObject]:
        """Return all aliases by name, without their histories."""
        documents = [alias.document() for alias in self.aliases.all()]
        for document in documents:
            del document["history"]
        return documents

    def show(self, given: str) -> JsonObject:
        """Return an alias with its history; raise `not_found` if it does not exist."""
        return self._find(given).document()

    def canary_report(self, given: str, who: str) -> JsonObject:
        """Return the results of an alias's versions since the start of its canary."""
        alias = self._find(given)
        whole = alias.is_owned_by(who)
        candidate = alias.canary.version if alias.canary else ""
        return {
            "alias": alias.name,
            "canary": alias.document()["canary"],
            "active": self._statistics_of(alias.name, alias.version).report(whole=whole),
            "candidate": (
                self._statistics_of(alias.name, candidate).report(whole=whole)
                if candidate
                else None
            ),
        }

    def metrics(self) -> Iterable[Metric]:
        """Yield the number of changes of aliases, and the results of their versions."""
        changes = ((what, float(count)) for what, count in self._changes.items())
        about = "Changes of aliases, since the start"
        yield counters("moorage_policy_changes", about, "what", changes)
        rows: list[tuple[tuple[str, str, str], float]] = []
        for (name, version), statistics in self._statistics.items():
            refused = sum(statistics.refused.values())
            counts = {
                "asked": statistics.asked,
                "granted": statistics.granted,
                "advised": statistics.advised,
                "refused": refused - statistics.faults,
                "faults": statistics.faults,
                "consecutive_faults": statistics.consecutive,
            }
            rows += [((name, version, what), float(count)) for what, count in counts.items()]
        labels = ("alias", "policy", "what")
        yield gauges_of("moorage_alias", "Requests under an alias, by version", labels, rows)

    # Checks --------------------------------------------------------------------------------

    def _find(self, given: str) -> Alias:
        name = alias_name(given)
        alias = self.aliases.find(name)
        if alias is None:
            raise unknown_alias(name, (each.name for each in self.aliases.all()))
        return alias

    def _refuse_active(self, alias: Alias, uri: str) -> None:
        if uri == alias.version:
            reason = f"policy_rule_uri: {uri} is the active version of {alias.name} already"
            expected = "another version than the active one"
            raise ServiceError(Code.BAD_MESSAGE, reason, field="policy_rule_uri", expected=expected)

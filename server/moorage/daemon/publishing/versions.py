"""Finds the version for an alias; the version must be registered, loadable and unchanged.

Used by `aliases`. A URI names a version; its digest identifies the content. A removed version may
be registered again with other code, so a fallback to a good version checks both.
"""

from moorage.catalog.allowances import Allowance
from moorage.catalog.embedded.aliases import Alias, Former, name_of
from moorage.catalog.embedded.records import unknown_id_error
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.daemon.policies.finder import code_of
from moorage.model import Code, PolicyRef
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox


class Versions:
    """Finds versions of policies for aliases, and protects the versions that aliases need.

    Args:
        sandbox: Loads a version as a check.
    """

    def __init__(self, catalog: Catalog, sandbox: Sandbox) -> None:
        self._catalog = catalog
        self._sandbox = sandbox

    async def require_of(self, name: str, uri: str, who: str, digest: str = "") -> PolicyRef:
        """Return a version that an alias may use: of the same policy, registered and loadable.

        `who` is the tenant that waits for its turn of the check.
        """
        if name_of(uri) != name_of(name):
            raise ServiceError.wrong_field(
                "policy_rule_uri", f"a version of {name_of(name)}, as `{name_of(name)}:1.0-beta`"
            )
        return await self.require(uri, who, digest)

    async def require(self, uri: str, who: str, digest: str = "") -> PolicyRef:
        """Return a version, checked to be registered and loadable."""
        await self._catalog.freshness.fetch(uri, (), Allowance())
        record = self.record(uri, digest)
        try:
            async with self._sandbox.rechecks.turn(who):
                found = await self._sandbox.check(code_of(record))
        except PolicyFault as fault:
            raise ServiceError(fault.refusal.code, fault.refusal.reason) from fault
        if not found.ok:
            reason = f"policy_rule_uri: {uri} cannot be loaded: {found.findings[0].message}"
            raise ServiceError(Code.BAD_POLICY, reason, field="policy_rule_uri")
        return record.ref

    def record(self, uri: str, digest: str) -> PolicyRecord:
        """Return a version if it is registered with this digest; an empty digest matches all."""
        record = self._catalog.memory.policy(uri)
        if record is None or record.ref.uri != uri:
            raise self._unknown(uri)
        if not Former(uri, digest).is_still(record.ref.digest):
            reason = f"policy_rule_uri: {uri} was removed, and later registered with other content"
            expected = "an explicit activation, if you want the new content"
            raise ServiceError(Code.CONFLICT, reason, field="policy_rule_uri", expected=expected)
        return record

    def _unknown(self, uri: str) -> ServiceError:
        known = self._catalog.memory.policy_uris()
        versions = [each for each in known if name_of(each) == name_of(uri)]
        return unknown_id_error("policy", uri, versions or known)

    def refuse_deletion(self, uri: str, *, force: bool) -> None:
        """Refuse to delete a version that an alias sends requests to, or would fall back to.

        Args:
            uri: The version.
            force: Whether only versions that an alias sends requests to are refused.
        """
        aliases = self._catalog.aliases
        if (alias := aliases.find(uri)) is not None:
            reason = (
                f"policy_rule_uri: {uri} is an alias; DELETE /policy-alias/{alias.name} removes it"
            )
            expected = "a version, name:version-tag"
            raise ServiceError(
                Code.UNKNOWN_POLICY, reason, field="policy_rule_uri", expected=expected
            )
        names = aliases.using(uri)
        does, then = "serves", "activate another version, or first DELETE /policy-alias/ALIAS"
        expected = "a version that no alias points at"
        if not names and not force:
            names = [alias.name for alias in aliases.all() if self._refuge(alias) == uri]
            does, then = (
                "is the fallback version of",
                "the version was the last one that worked well there, or never had a request",
            )
            expected += " and no alias would fall back to; force=true removes this version anyway"
        if names:
            raise ServiceError(
                Code.ALREADY_EXISTS,
                f"policy_rule_uri: {uri} {does} the alias {', '.join(names)}; {then}",
                field="policy_rule_uri",
                expected=expected,
                details={"aliases": names},
            )

    def _refuge(self, alias: Alias) -> str:
        """Return the first version that an alias would fall back to, or "" if there is none."""
        for former in alias.fallbacks():
            record = self._catalog.memory.policy(former.version)
            if record is not None and former.is_still(record.ref.digest):
                return former.version
        return ""

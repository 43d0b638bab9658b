"""What authors do with a rule at work: calls of its `management`, and what it printed."""

from typing import Any

from moorage.catalog.allowances import Allowance
from moorage.catalog.base import Catalog, PolicyRecord
from moorage.daemon.finding import code_of
from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host import PolicyFault, Sandbox


class Management:
    """Runs `management(action, data)` of rules, and shows what they printed.

    Args:
        catalog: Has the rules.
        rules: Runs them.
        elsewhere: Another server executes rules, and keeps their state.

    """

    def __init__(self, catalog: Catalog, rules: Sandbox, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._catalog = catalog
        self._rules = rules

    async def run(self, uri: str, tenant: Tenant, action: str, data: dict[str, Any]) -> Any:
        """Return what the rule returned, as plain JSON values.

        Args:
            uri: A version, an alias, or a bare name.
            tenant: On whose behalf.
            action: For the rule.
            data: For the rule.

        Raises:
            ServiceError: `unknown_policy`, `unavailable`, `unsupported` where the rule has no
                `management`, or what it did wrong.

        """
        record = await self._record(uri)
        if self._elsewhere:
            reason = f"{record.ref.uri} is executed by another server, which has no management"
            raise ServiceError(Code.UNSUPPORTED, reason, field="policy_rule_uri")
        try:
            return await self._rules.manage(code_of(record), tenant, action, data)
        except PolicyFault as fault:
            no = fault.refusal
            raise ServiceError(
                no.code, no.reason, field=no.field, expected=no.expected, details=no.details
            ) from fault

    async def logs(self, uri: str, tenant: Tenant) -> dict[str, Any]:
        """Return what a version printed and logged lately, at requests of this tenant.

        Beside it is whether it rests for this tenant, and for how long.

        Raises:
            ServiceError: `unknown_policy`, `unavailable`.

        """
        ref = (await self._record(uri)).ref
        rest = self._rules.rest(ref, tenant)
        said = None
        if rest is not None:
            said = {"overruns": rest.overruns, "retry_after_seconds": round(rest.seconds, 1)}
        return {
            "policy_rule_uri": ref.uri,
            "printed": self._rules.output(ref, tenant),
            "rests": said,
        }

    async def _record(self, uri: str) -> PolicyRecord:
        await self._catalog.fetch(uri, (), Allowance())
        record = self._catalog.policy(uri)
        if record is None:
            raise ServiceError(
                Code.UNKNOWN_POLICY,
                f"No policy “{uri[:300]}” is registered.",
                field="policy_rule_uri",
                expected="the URI of a registered policy",
            )
        return record

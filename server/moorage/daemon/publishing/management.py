"""What authors do with a policy at work: calls of its `management`, and what it printed."""

from typing import Any

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.daemon.requests.finder import code_of
from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox


class Management:
    """Runs `management(action, data)` of policies, and shows what they printed.

    Args:
        catalog: Has the policies.
        sandbox: Runs them.
        elsewhere: Another server executes policies, and keeps their state.

    """

    def __init__(self, catalog: Catalog, sandbox: Sandbox, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._catalog = catalog
        self._sandbox = sandbox

    async def run(self, uri: str, tenant: Tenant, action: str, data: dict[str, Any]) -> Any:
        """Return what the policy returned, as plain JSON values.

        Args:
            uri: A version, an alias, or a bare name.
            tenant: On whose behalf.
            action: For the policy.
            data: For the policy.

        Raises:
            ServiceError: `unknown_policy`, `unavailable`, `unsupported` where the policy has no
                `management`, or what it did wrong.

        """
        record = await self._record(uri)
        if self._elsewhere:
            reason = f"{record.ref.uri} is executed by another server, which has no management"
            raise ServiceError(Code.UNSUPPORTED, reason, field="policy_rule_uri")
        try:
            return await self._sandbox.manage(code_of(record), tenant, action, data)
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
        rest = self._sandbox.rest(ref, tenant)
        said = None
        if rest is not None:
            said = {"overruns": rest.overruns, "retry_after_seconds": round(rest.seconds, 1)}
        return {
            "policy_rule_uri": ref.uri,
            "printed": self._sandbox.output(ref, tenant),
            "rests": said,
        }

    async def _record(self, uri: str) -> PolicyRecord:
        await self._catalog.freshness.fetch(uri, (), Allowance())
        record = self._catalog.memory.policy(uri)
        if record is None:
            raise ServiceError(
                Code.UNKNOWN_POLICY,
                f"No policy “{uri[:300]}” is registered.",
                field="policy_rule_uri",
                expected="the URI of a registered policy",
            )
        return record

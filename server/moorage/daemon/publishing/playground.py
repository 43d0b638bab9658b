"""The console's playground: runs a page's trials in a separate program.

That program is `moorage.lab.offline`, which runs trials on a core and in cells of its own, in the
same jail. The program gets only a few environment variables of this process, runs at low priority,
and ends when its time is over.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from moorage.catalog.ports import Catalog
from moorage.core.state.state import State
from moorage.daemon.offline import offline
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.rights import Caller
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.host.sandbox import CHECKS_BUSY

RUN_SECONDS_MAX: Final = 60.0
BACKTEST_SECONDS_MAX: Final = 240.0
AT_ONCE_MAX: Final = 2
"""Maximum trials at a time, one per tenant."""
WAITING_MAX: Final = 8
TRIAL: Final = "playground:1.0-trial"
"""The name that code without a version has during a trial."""
_FIELDS: Final = frozenset(
    {"code", "policy_rule_uri", "fleet", "requests", "parameters", "settings", "trace"}
)

Fleet = JsonObject
"""The fleet of a trial: its `clusters` and `held` leases, or only its `documents`."""


class Playground:
    """Runs trials of policies for pages of the console.

    Args:
        recalled: Returns the clusters and leases as they were when a tenant's request was decided.
        mode: The isolation of the cells.
    """

    def __init__(
        self,
        catalog: Catalog,
        state: State,
        recalled: Callable[[str, Caller], Awaitable[Fleet]],
        mode: Mode,
    ) -> None:
        self._catalog = catalog
        self._state = state
        self._recalled = recalled
        self._mode = mode
        self._turns = FairSemaphore(AT_ONCE_MAX, WAITING_MAX, busy=CHECKS_BUSY)

    async def run(self, body: JsonMapping, caller: Caller) -> JsonObject:
        """Try a policy on a fleet; if the body has a `trace`, backtest the policy.

        Raises:
            ServiceError: The body or the policy is wrong; `busy`, `policy_timeout`.
        """
        for field in body.keys() - _FIELDS:
            raise ServiceError.wrong_field(field, f"one of {', '.join(sorted(_FIELDS))}")
        trace = body.get("trace", "")
        if not isinstance(trace, str):
            raise ServiceError.wrong_field("trace", "a table (CSV) as text")
        async with self._turns.turn(caller.tenant):
            job = {
                "policy": await self._policy(body),
                "requests": _requests(body),
                "trace": trace,
                "mode": self._mode,
                **await self._fleet(body.get("fleet", "live"), caller),
            }
            seconds = BACKTEST_SECONDS_MAX if trace else RUN_SECONDS_MAX
            packed = await asyncio.to_thread(msgspec.json.encode, job)
            return await offline("play", packed, seconds)

    async def _policy(self, body: JsonMapping) -> JsonObject:
        code, uri = body.get("code"), body.get("policy_rule_uri")
        if isinstance(code, str) and uri is None:
            return {"policy_rule_uri": TRIAL, "type": "python_class_v1", "code": code}
        if isinstance(uri, str) and code is None:
            found = await self._catalog.policies.get(uri)
            return {name: each for name, each in found.items() if name != "digest"}
        raise ServiceError.wrong_field("code", "code as text, or a `policy_rule_uri` instead")

    async def _fleet(self, wanted: JsonValue, caller: Caller) -> Fleet:
        match wanted:
            case "live":
                documents = await self._catalog.clusters.query({})
                clusters = [self._state.offered(each) for each in self._state.clusters.values()]
                leases = self._state.leases.values()
                held = [share for lease in leases for share in lease.placement]
                return {"documents": documents, "clusters": clusters, "held": held}
            case {"clusters": [dict(), *_] as documents} if len(wanted) == 1:
                return {"documents": documents}
            case {"decision": str(request)} if len(wanted) == 1:
                return await self._recalled(request, caller)
            case _:  # Anything else that JSON has.
                expected = '"live", {"clusters": [documents]} or {"decision": request id}'
                raise ServiceError.wrong_field("fleet", expected)


def _requests(body: JsonMapping) -> list[JsonObject]:
    requests = body.get("requests", [])
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise ServiceError.wrong_field("requests", "a list of requests, each an object")
    common = {name: body[name] for name in ("parameters", "settings") if name in body}
    return [{**common, **each} for each in requests]

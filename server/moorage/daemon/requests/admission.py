"""Admission: turns a request for a placement into an event of the core, or refuses it.

Everything that an ask needs from outside the core (its policy, its candidates, a token, a seed) is
settled before it is posted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address
from moorage.core.turns.events import Asked
from moorage.daemon.answers import encode, refusal_of
from moorage.daemon.inbox import Inbox
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.requests.asks import Asks
from moorage.daemon.requests.http_calls import HttpCalls
from moorage.daemon.requests.reading import is_described, overridden_fields
from moorage.daemon.requests.replies import Replies, ReplyContext
from moorage.gateway.deliver import Taking
from moorage.model import Code, PolicyRef, Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """Turns requests for a placement into events of the core, or refuses them.

    Args:
        publishing: Chooses the version that an alias means.
        is_crowded: Returns whether too many requests of a tenant wait for a policy, including a
            given number of requests in the inbox.
    """

    catalog: Catalog
    publishing: Publishing
    asks: Asks
    inbox: Inbox
    replies: Replies
    is_crowded: Callable[[PolicyRef, Tenant, int], bool]

    def request(
        self, to: Address, tenant: Tenant, message: AllocationRequest, warnings: Sequence[str] = ()
    ) -> Taking:
        """Handle a request as `gateway.deliver.Deliver` describes; the answer goes to `to`."""
        if self.replies.traces is not None:
            self.replies.traces.begin(to, tenant, message)
        alias, message = self._with_version(tenant, message)
        if self._refuse_beyond_bounds(to, tenant, message):
            return self.inbox.turn()
        warnings = [*warnings, *overridden_fields(message)]
        if not is_described(message):
            uri, wanted = message.policy_rule_uri, self.asks.wanted(message)
            found = self.catalog.freshness.at_hand(uri, wanted)
            if found is not None:
                self._admit(to, tenant, message, [*warnings, *found], alias)
                return None
        return self._fetch(to, tenant, message, warnings, alias)

    async def _fetch(
        self,
        to: Address,
        tenant: Tenant,
        message: AllocationRequest,
        warnings: list[str],
        alias: str,
    ) -> None:
        """Handle a request that first needs a search or an external service."""
        uri, allowance = message.policy_rule_uri, Allowance()
        fetch = self.catalog.freshness.fetch
        try:
            if is_described(message):
                # Look up the policy first: if it is unknown, no search is needed.
                warnings += await fetch(uri, (), allowance, searching=True)
                message, found = await self.asks.search_candidates(tenant, message, allowance)
                warnings += found
                uri = ""
            warnings += await fetch(uri, self.asks.wanted(message), allowance)
        except ServiceError as error:
            refusal = refusal_of(error)
            self.replies.send(to, encode(refusal, message_id=message.id, warnings=warnings))
        else:
            self._admit(to, tenant, message, list(dict.fromkeys(warnings)), alias)

    def _refuse_beyond_bounds(
        self, to: Address, tenant: Tenant, message: AllocationRequest
    ) -> bool:
        """Refuse a request that exceeds a limit, before any work is done for it."""
        record = self.catalog.memory.policy(message.policy_rule_uri)
        if record is None or not self.is_crowded(record.ref, tenant, self.inbox.requests(tenant)):
            return False
        reason = f"too many requests for {record.ref.uri} wait for a decision"
        refusal = Refusal(Code.BUSY, reason, expected="the same request, in a second")
        self.replies.send(to, encode(refusal, message_id=message.id))
        return True

    def _with_version(
        self, tenant: Tenant, message: AllocationRequest
    ) -> tuple[str, AllocationRequest]:
        """Return the alias that a request names, or "", and the request with a version instead."""
        alias = message.policy_rule_uri
        if alias not in self.catalog.aliases:
            return "", message
        version = self.publishing.choose(tenant, message)
        return alias, structs.replace(message, policy_rule_uri=version)

    def _admit(
        self,
        to: Address,
        tenant: Tenant,
        message: AllocationRequest,
        warnings: list[str],
        alias: str,
    ) -> None:
        verdict = self.asks.ask(tenant, message, warnings)
        version = message.policy_rule_uri if alias else ""
        if not isinstance(verdict, tuple):
            reply = encode(verdict, message_id=message.id, warnings=warnings, version=version)
            self.replies.send(to, reply)
            return
        # Existing clients get the two documented keys; a client that asks for more gets the id.
        shown = message.id is not None or message.explain or message.lease is not None
        ask, token = verdict
        streams = message.stream and not HttpCalls.has(to)  # Over HTTP no one could read it.
        context = ReplyContext(message.id, ask.id, token, shown, warnings, streams=streams)
        if alias:
            note = self.publishing.statistics(alias, version, tenant)
            now = time.monotonic()
            context = structs.replace(context, version=version, note=note, admitted_at=now)
        self.replies.expect(to, context)
        self.inbox.post(Asked(to, ask), tenant)

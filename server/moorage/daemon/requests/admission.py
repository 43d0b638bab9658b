"""Admission: a request for a placement becomes an event of the core, or is refused at the door.

Everything that an ask needs from outside the core (its policy, its candidates, a token, a seed) is
settled before it is posted.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.core.effects import Address
from moorage.core.events import Asked
from moorage.core.facts import Refusal
from moorage.daemon.inbox import Inbox
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.requests.answers import refusal_of, refuse
from moorage.daemon.requests.asks import Asks
from moorage.daemon.requests.reading import is_described, outranked
from moorage.daemon.requests.replies import Replies, ReplyContext
from moorage.model import Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest


class Admission:
    """Takes requests for a placement.

    Args:
        catalog: Knows policies and clusters.
        publishing: Chooses the version that an alias means.
        asks: Makes the asks.
        inbox: Where they go.
        replies: Where they are answered.

    """

    def __init__(
        self,
        catalog: Catalog,
        publishing: Publishing,
        asks: Asks,
        inbox: Inbox,
        replies: Replies,
    ) -> None:
        self._catalog = catalog
        self._publishing = publishing
        self._asks = asks
        self._inbox = inbox
        self._replies = replies

    async def request(
        self, to: Address, tenant: Tenant, message: AllocationRequest, warnings: Sequence[str] = ()
    ) -> None:
        """Take a request that needs a search, or something of an external service, first."""
        alias, message = self._versioned(tenant, message)
        uri, allowance = message.policy_rule_uri, Allowance()
        warnings = [*warnings, *outranked(message)]
        fetch = self._catalog.freshness.fetch
        try:
            if is_described(message):
                # The policy first: where it is not there, nothing needs to be searched.
                warnings += await fetch(uri, (), allowance, searching=True)
                message, found = await self._asks.searched(tenant, message, allowance)
                warnings += found
                uri = ""
            warnings += await fetch(uri, self._asks.wanted(message), allowance)
        except ServiceError as error:
            refusal = refusal_of(error)
            self._replies.send(to, refuse(refusal, message_id=message.id, warnings=warnings))
        else:
            self._admit(to, tenant, message, list(dict.fromkeys(warnings)), alias)

    def request_nowait(
        self, to: Address, tenant: Tenant, message: AllocationRequest, warnings: Sequence[str] = ()
    ) -> bool:
        """Take a request; it is answered at `to`, now or later. False: `request` has to."""
        if is_described(message):
            return False
        alias, message = self._versioned(tenant, message)
        uri, wanted = message.policy_rule_uri, self._asks.wanted(message)
        found = self._catalog.freshness.at_hand(uri, wanted)
        if found is None:
            return False
        self._admit(to, tenant, message, [*warnings, *outranked(message), *found], alias)
        return True

    def _versioned(
        self, tenant: Tenant, message: AllocationRequest
    ) -> tuple[str, AllocationRequest]:
        """Return the alias that a request names, or "", and the request with a version in it."""
        alias = message.policy_rule_uri
        if alias not in self._catalog.aliases:
            return "", message
        version = self._publishing.choose(tenant, message)
        return alias, structs.replace(message, policy_rule_uri=version)

    def _admit(
        self,
        to: Address,
        tenant: Tenant,
        message: AllocationRequest,
        warnings: list[str],
        alias: str,
    ) -> None:
        verdict = self._asks.ask(tenant, message, warnings)
        version = message.policy_rule_uri if alias else ""
        if isinstance(verdict, Refusal):
            reply = refuse(verdict, message_id=message.id, warnings=warnings, version=version)
            self._replies.send(to, reply)
            return
        # Existing clients get the two documented keys; one that asks for more gets the id.
        shown = message.id is not None or message.explain or message.lease is not None
        ask, token = verdict
        context = ReplyContext(message.id, ask.id, token, shown, warnings)
        if alias:
            note = self._publishing.statistics(alias, version, tenant)
            context = replace(context, version=version, note=note, admitted_at=time.monotonic())
        self._replies.expect(to, context)
        self._inbox.post(Asked(to, ask))

"""Quotas: sets the limits of tenants and projects, and refuses requests that exceed them.

The allocator is the only caller. `core.state.accounts` has the held and the remaining amounts. The
queue passes over waiters that exceed their quota, and reserves no nodes for them; it reserves quota
for waiters that were overtaken too often.
"""

import numpy as np
from msgspec.structs import astuple

from moorage.core.queue.order import WaitingQueue
from moorage.core.state import refusals
from moorage.core.state.accounts import (
    EVERYONE,
    Account,
    Accounts,
    Amounts,
    accounts_of,
    demand_amounts,
    placement_amounts,
)
from moorage.core.state.facts import HalfLifeSet, QuotaSet, Refusal
from moorage.core.turns.effects import Information
from moorage.core.turns.events import QuotaAsked
from moorage.core.turns.turn import TurnWriter
from moorage.model import RESOURCES, Ask, Lease, Placement, Quota
from moorage.records.json_values import JsonObject
from moorage.records.replies import QuotaTerms
from moorage.records.requests import QuotaAmounts

QUOTAS_MAX = 10_000
"""Maximum quotas that are set at one time; one more is refused."""


class Quotas:
    """Sets and checks the limits of tenants and their projects.

    Args:
        writer: Writer of the turn's facts and effects.
        queue: The queue, which knows the quota that waiters reserve.
    """

    def __init__(self, writer: TurnWriter, queue: WaitingQueue) -> None:
        self._turn = writer
        self._queue = queue
        self._accounts = writer.state.accounts

    def apply(self, event: QuotaAsked) -> None:
        """Apply a quota that an operator or the configuration sets."""
        account, before = (event.tenant, event.project), self._accounts.quotas
        if event.quota is not None and account not in before and len(before) >= QUOTAS_MAX:
            if event.to is not None:
                self._turn.respond(event.to, refusals.too_many_quotas(QUOTAS_MAX))
            return
        if before.get(account) != event.quota:
            self._turn.record(QuotaSet(*account, event.quota, self._turn.now, event.who))
            self._turn.wakes = True
        if event.to is not None:
            self._turn.respond(event.to, Information(row(self._accounts, account)))

    def half_life(self, seconds: float) -> None:
        """Set the half-life of past use, in seconds."""
        if seconds != self._accounts.half_life:
            self._turn.record(HalfLifeSet(seconds, self._turn.now))

    def refusal(
        self, ask: Ask, placement: Placement | None = None, ends: Lease | None = None
    ) -> Refusal | None:
        """Return why a request exceeds a quota, or None.

        Args:
            ask: The request; advice needs no quota.
            placement: The planned placement; None: not known yet.
            ends: A lease that would end in the same turn.
        """
        if ask.terms is None or not self._accounts.quotas:
            return None
        amounts = demand_amounts(ask) if placement is None else placement_amounts(placement)
        for account in accounts_of(ask.tenant, ask.project):
            freed = None
            if ends is not None and account in accounts_of(ends.tenant, ends.terms.project):
                freed = placement_amounts(ends.placement)
            found = self._short(ask, account, amounts, freed)
            if found is not None:
                return found
        return None

    def _short(
        self, ask: Ask, account: Account, amounts: Amounts, freed: Amounts | None
    ) -> Refusal | None:
        number = np.array([self._accounts.number(account)], np.int64)
        room = self._accounts.room(number, freed)[0]
        reserved, by = self._queue.quota_reservation(ask, account) or ((0,) * len(RESOURCES), None)
        for column, name in enumerate(RESOURCES):
            amount = amounts[column]
            if amount > 0 and int(room[column]) - reserved[column] < amount:
                figures = self._accounts.row(account)[name]
                return refusals.over_quota(account, name, amount, figures, (reserved[column], by))
        return None


def row(accounts: Accounts, account: Account) -> JsonObject:
    """Return a quota and its use as JSON values."""
    tenant, project = account
    quota = accounts.quota(account)
    held = {} if tenant == EVERYONE else {"resources": accounts.row(account)}
    return {
        "tenant": tenant,
        "project": project,
        "weight": quota.weight if quota else 1.0,
        "quota": None if quota is None or account not in accounts.quotas else _terms(quota),
        **held,
        "share": None if tenant == EVERYONE else round(accounts.share(account), 6),
    }


def _terms(quota: Quota) -> QuotaTerms:
    each = (quota.nominal, quota.borrow, quota.lend)
    nominal, borrow, lend = (QuotaAmounts(*astuple(amounts)) for amounts in each)
    return QuotaTerms(nominal, borrow, lend, quota.notice_seconds)

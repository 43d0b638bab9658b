"""Tests of pages of decisions, from a ledger of many facts."""

from typing import Any

from msgspec.structs import replace

from moorage.core.state.facts import ClusterRemoved, Fact, Granted, Refusal
from moorage.core.turns.effects import Address, Information, Respond
from moorage.core.turns.events import Asked
from moorage.core.turns.turn import Turn
from moorage.daemon.history.decisions import REFUSALS_MAX, WINDOWS_MAX, Decisions
from moorage.ledger.base import PAGE_FACTS_MAX
from moorage.ledger.memory import MemoryLedger
from moorage.model import (
    Ask,
    ClusterId,
    Code,
    Lease,
    LeaseTerms,
    PolicyRef,
    RequestId,
    SessionId,
    Tenant,
)
from moorage.protocol.messages import DecisionListing
from moorage.records.rights import Caller, Role

ONE = Ask(RequestId("r"), Tenant("ann"), PolicyRef("p", "d"))


async def test_a_page_of_decisions_without_a_match_leads_to_the_next_page() -> None:
    ledger = MemoryLedger()
    await ledger.open()
    who = RequestId("first"), Tenant("ann"), ""
    terms, policy = LeaseTerms(ttl_seconds=60.0), PolicyRef("p", "d")
    facts: list[Fact] = [Granted(Lease(*who, policy, (), 1, 0.0, 60.0, terms))]
    facts += [ClusterRemoved(ClusterId("c"))] * (WINDOWS_MAX * PAGE_FACTS_MAX)
    await ledger.append(facts, 1.0)
    decisions = Decisions(ledger)

    async def page(after: str = "") -> dict[str, Any]:
        message = DecisionListing(filters={"request": "first"}, after=after)
        answer = await decisions.page(message, Caller(Tenant("ops"), Role.OPERATOR))
        assert isinstance(answer, Information)
        return answer.data

    empty = await page()
    assert empty["decisions"] == []
    found = await page(empty["next"])
    assert [row["request"] for row in found["decisions"]] == ["first"]
    assert found["next"] is None


def test_refusals_of_a_tenant_do_not_push_out_refusals_of_another_tenant() -> None:
    decisions = Decisions(MemoryLedger())
    for number in range(REFUSALS_MAX + 1):
        tenant = "bob" if number == 0 else "mallory"
        one, to = replace(ONE, id=f"r{number}", tenant=tenant), Address(SessionId("s"), 1)
        refused = Turn([], [Respond(to, Refusal(Code.NO_CAPACITY, "full"))])
        decisions.observe_step(Asked(to, one), refused)
    assert decisions.refusal("r0") is not None
    assert decisions.refusal("r1") is None
    assert decisions.refusal("r2") is not None

"""Pages of decisions over a ledger of many facts."""

from typing import Any

from moorage.core.state.facts import ClusterRemoved, Fact, Granted
from moorage.core.turns.effects import Information
from moorage.daemon.history.decisions import WINDOWS_MAX, Decisions
from moorage.ledger.base import PAGE_FACTS_MAX
from moorage.ledger.memory import MemoryLedger
from moorage.model import ClusterId, Lease, LeaseTerms, PolicyRef, RequestId, Tenant
from moorage.protocol.operations import DecisionListing
from moorage.records.rights import Caller, Role


async def test_where_no_fact_of_a_page_matches_the_next_one_goes_on() -> None:
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

"""Tests of the turns and waits of tenants that share the cells of a policy."""

import asyncio
import itertools

import pytest

from moorage.model import Code, LeaseTerms, PolicyRef, RequestId, Tenant
from moorage.sandbox.host.contract import PolicyCode
from moorage.sandbox.host.groups import QUICK_ANSWERS_MIN, Backlog
from moorage.sandbox.host.sandbox import Limits
from moorage.sandbox.host.work import Work

ANSWER_SECONDS_MAX = 60.0

HANGS = """
import time
if input_data['inputs'].get('hang'):
    time.sleep(60)
time.sleep(input_data['inputs'].get('seconds', 0))
return input_data['inputs'].get('n', 0)
"""
TERMS = LeaseTerms(ttl_seconds=60)
A, B = Tenant("a"), Tenant("b")
CODE = PolicyCode(PolicyRef("rule:1-x", "digest"), {})


def works(*tenants: str) -> list[Work]:
    return [Work("evaluate", CODE, tenant, action=str(n)) for n, tenant in enumerate(tenants)]


def take_order(backlog: Backlog) -> str:
    said = []
    while backlog:
        work = next(backlog.heads())
        backlog.take(work)
        said.append(f"{work.tenant}{work.action}")
    return " ".join(said)


def test_tenants_take_turns_at_a_cell_and_the_requests_of_each_tenant_stay_in_order() -> None:
    backlog = Backlog()
    for work in works("b", "b", "b", "b", "a", "a", "c"):
        backlog.append(work)
    assert (len(backlog), len(list(backlog))) == (7, 7)
    assert take_order(backlog) == "b0 a4 c6 b1 a5 b2 b3"


def test_a_busy_tenant_does_not_block_other_tenants() -> None:
    backlog, most = Backlog(), 4
    for work in works("b", "b", "b"):
        assert not backlog.is_full("b", most)
        backlog.append(work)
    for work in works("b"):
        backlog.append(work)
    assert backlog.is_full("b", most)
    for work in works("a", "a"):
        assert not backlog.is_full("a", most)
        backlog.append(work)
    assert backlog.is_full("a", most)
    assert backlog.is_full("b", most)
    assert not backlog.is_full("c", most)


def test_an_evaluation_that_returns_to_the_queue_is_first_again() -> None:
    backlog = Backlog()
    waiting, again = works("b", "b"), works("a", "b", "b", "a")
    for work in waiting:
        backlog.append(work)
    backlog.put_back(again)
    assert len(backlog) == 6
    assert take_order(backlog) == "a0 b1 a3 b2 b0 b1"
    assert not backlog


def test_the_withdrawal_of_a_tenants_last_evaluation_removes_the_queue_of_the_tenant() -> None:
    backlog = Backlog()
    first, second = works("a", "b")
    backlog.append(first)
    assert not backlog.remove(second)
    assert backlog.remove(first)
    assert not backlog.remove(first)
    assert not list(backlog.heads())
    backlog.append(second)
    assert backlog.clear() == [second]
    assert not backlog


async def test_a_policy_that_hangs_for_one_tenant_delays_no_other_tenant(make_bench):
    limits = Limits(evaluation_seconds=1.0, circuit_overruns=0, cells_per_policy_max=2)
    bench = await make_bench(limits=limits)
    code = bench.policy(HANGS)
    assert await bench.value(code, {"n": 7}, tenant=A) == 7
    # The pool does not know yet that the policy hangs; it sends the waiting request elsewhere.
    first = bench.ask(code, {"hang": True}, tenant=B)
    behind = bench.ask(code, {"n": 8}, tenant=A)
    assert (await behind).value == 8
    assert (await first).refusal.code is Code.POLICY_TIMEOUT
    # From now on, B never gets both cells, and no request of A waits behind B's.
    stuck = [bench.ask(code, {"hang": True}, tenant=B) for n in range(12)]
    for n in range(20):
        assert (await bench.outcome(code, {"n": n}, tenant=A)).value == n
    assert sum(each.done() for each in stuck) <= 2, "A did not wait until B's requests were stopped"


@pytest.mark.heavy
async def test_a_single_tenant_may_use_all_cells(make_bench):
    limits = Limits(evaluation_seconds=1.0, circuit_overruns=0, cells_per_policy_max=2)
    bench = await make_bench(limits=limits)
    code = bench.policy(HANGS)
    assert (await bench.refusal(code, {"hang": True})).code is Code.POLICY_TIMEOUT
    stuck = [bench.ask(code, {"hang": True})]
    async with asyncio.timeout(30):
        while bench.sandbox.report().cells.get(code.ref.uri, 0) < limits.cells_per_policy_max:
            await asyncio.sleep(0.3)  # By then the pool knows that the first cell is busy.
            stuck.append(bench.ask(code, {"hang": True}))
        codes = {(await each).refusal.code for each in stuck}
    assert codes == {Code.POLICY_TIMEOUT}


async def test_a_formerly_slow_tenant_gets_turns_beside_a_busy_tenant(make_bench):
    limits = Limits(cells_per_policy_max=2, pipeline_max=8)
    bench = await make_bench(limits=limits)
    code = bench.policy(HANGS)
    assert await bench.value(code, {}, tenant=B) == 0
    assert await bench.value(code, {"seconds": 0.5, "n": 1}, tenant=A) == 1
    served, flooded, stop = 0, asyncio.Event(), asyncio.Event()

    async def ask_on_and_on() -> None:
        nonlocal served
        while not stop.is_set():
            await bench.value(code, {"seconds": 0.002}, tenant=B)
            served += 1
            if served == 100:
                flooded.set()

    flood = [asyncio.create_task(ask_on_and_on()) for _ in range(64)]
    await asyncio.wait_for(flooded.wait(), ANSWER_SECONDS_MAX)
    for n in range(5):
        before = served
        assert await bench.value(code, {"n": n}, tenant=A) == n
        # `A` waits at most for one cell's pipe; the other cell serves `B` meanwhile.
        assert served - before < 20 * limits.pipeline_max
    stop.set()
    await asyncio.gather(*flood)


async def test_a_burst_of_evaluations_of_one_tenant_spreads_over_cells(make_bench):
    bench = await make_bench()
    code = bench.policy(HANGS)
    assert await bench.value(code, {"n": 0}) == 0
    # All go into the pipe of one cell, until the first one shows that the policy is slow.
    burst = [bench.ask(code, {"seconds": 0.7, "n": n}) for n in range(8)]
    quick = bench.ask(code, {"n": 99})
    assert (await quick).value == 99
    done = sum(each.done() for each in burst)
    assert done < len(burst) / 2, "the quick request waited for one evaluation at most"
    assert [(await each).value for each in burst] == list(range(8))
    most = Limits().cells_per_policy_max
    assert bench.sandbox.report().cells[code.ref.uri] == most
    # The policy is known to be slow: pipes stay empty, and no more cells start.
    again = [bench.ask(code, {"seconds": 0.1, "n": n}) for n in range(3 * most)]
    assert [(await each).value for each in again] == list(range(3 * most))
    assert bench.sandbox.report().cells[code.ref.uri] <= most
    assert "timeouts" not in bench.sandbox.report().counters


async def test_a_tenant_whose_evaluations_are_fast_again_shares_a_cell_again(make_bench):
    bench = await make_bench()
    code = bench.policy(HANGS)
    assert await bench.value(code, {"seconds": 0.2, "n": 1}) == 1
    (group,) = bench.sandbox._pool._groups.values()
    for n in range(QUICK_ANSWERS_MIN):
        assert group._heavy
        assert await bench.value(code, {"n": n}) == n
    assert not group._heavy
    several = [bench.ask(code, {"n": n}) for n in range(20)]
    assert [(await each).value for each in several] == list(range(20))
    assert len(group.cells) == 1


@pytest.mark.heavy
async def test_requests_that_compete_for_leases_use_few_cells_at_a_time(make_bench):
    bench = await make_bench()
    code = bench.policy(HANGS)
    slow = {"seconds": 0.15}
    assert await bench.value(code, slow) == 0
    (group,) = bench.sandbox._pool._groups.values()

    async def deciding(granted: bool) -> int:
        """Return how many cells decide about leases at one time, and settle all of them."""
        names = [f"{next(numbers)}" for _ in range(12)]
        works = [bench.ask(code, slow, request=name, terms=TERMS) for name in names]
        most = 0
        for name, work in zip(names, works, strict=True):
            await work
            most = max(most, sum(bool(cell.sent) for cell in group.cells))
            bench.sandbox.settle(RequestId(name), granted)
        return most

    numbers = itertools.count()
    assert await deciding(granted=True) > 2
    await deciding(granted=False)
    assert await deciding(granted=False) <= 1
    await deciding(granted=True)
    assert await deciding(granted=True) > 1


HANGS_OR_ANSWERS = """
import time
while input_data['inputs'].get('hang'):
    time.sleep(60)
return input_data['inputs'].get('n', 0)
"""


async def test_no_tenant_gets_all_cells_and_the_refusal_names_the_share_of_a_tenant(make_bench):
    limits = Limits(
        evaluation_seconds=60.0, cells_max=4, queue_seconds=1.5, spares=0, circuit_overruns=0
    )
    bench = await make_bench(limits=limits)
    mine = [bench.policy(HANGS_OR_ANSWERS, f"mine-{number}") for number in range(5)]
    hanging = [bench.ask(policy, {"hang": True}, tenant=A) for policy in mine]
    refused, _ = await asyncio.wait(hanging, return_when=asyncio.FIRST_COMPLETED)
    refusals = [each.result().refusal for each in refused]
    assert {refusal.code for refusal in refusals} == {Code.BUSY}
    assert all("3 evaluations of your tenant" in refusal.reason for refusal in refusals)
    other = bench.policy(HANGS_OR_ANSWERS, "other")
    assert await bench.value(other, {"n": 1}, tenant=B) == 1
    cells = bench.sandbox._pool._group_of
    assert sum(bool(cell.sent) and cell.sent[0].tenant == A for cell in cells) == 3
    _ = bench.ask(other, {"hang": True}, tenant=B)
    while sum(bool(cell.sent) for cell in cells) < 4:  # noqa: ASYNC110  # No event reports this.
        await asyncio.sleep(0.01)  # As above.
    refusal = await bench.refusal(bench.policy("return 1", "third"), tenant=Tenant("c"))
    assert refusal.code is Code.BUSY
    assert "all 4 cells of this server are busy" in refusal.reason


async def test_a_cell_in_use_is_not_ended_to_serve_a_tenant_that_has_many_cells(make_bench):
    limits = Limits(evaluation_seconds=60.0, cells_max=8, spares=0, circuit_overruns=0)
    bench = await make_bench(limits=limits)
    theirs = [bench.policy(HANGS_OR_ANSWERS, f"their-{number}") for number in range(5)]
    for policy in theirs:
        assert await bench.value(policy, {"n": 1}, tenant=B) == 1
    used = list(bench.sandbox._pool._group_of)
    mine = [bench.policy(HANGS_OR_ANSWERS, f"mine-{number}") for number in range(8)]
    for policy in mine:
        bench.ask(policy, {"hang": True}, tenant=A)
    cells = bench.sandbox._pool._group_of
    while [c.sent[0].kind for c in cells if c.sent].count("evaluate") < 3:  # noqa: ASYNC110  # No event reports this.
        await asyncio.sleep(0.01)  # As above.
    for policy in theirs:
        assert await bench.value(policy, {"n": 2}, tenant=B) == 2
    assert all(cell.alive for cell in used)
    assert bench.sandbox.report().counters.get("evicted", 0) == 0

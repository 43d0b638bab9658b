"""Tests of cells and zygotes that are killed from outside, as by a kernel without memory."""

import asyncio
import os
import signal

import pytest

from moorage.model import Code, Demand
from moorage.policy import Fleet
from moorage.sandbox.host.sandbox import Limits, PolicyFault, Sample
from moorage.sandbox.host.spawner import PATIENCE_SECONDS, PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN
from tests.waiting import async_until as until

SLOW = "import time\ntime.sleep(0.5)\nreturn input_data['inputs']['n']"
HUNGRY = """
import time
held = bytearray(230 << 20)
for place in range(0, len(held), 4096):
    held[place] = 1
print('ate')
time.sleep(20)
return len(held)
"""


async def busy_cell(bench):
    """Return the cell that evaluates a request now."""
    cells = bench.sandbox._pool._group_of
    busy = await until(lambda: [c for c in cells if c.sent and c.sent[0].kind != "load"])
    return busy[0]


async def kill(bench, number=signal.SIGKILL):
    cell = await busy_cell(bench)
    os.kill(cell.pid, number)
    await until(lambda: not cell.alive)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_evaluation_of_a_killed_cell_is_repeated_once(bench, number):
    code = bench.policy(SLOW)
    requests = [bench.ask(code, {"n": n}) for n in range(3)]
    await kill(bench, number)
    assert [(await each).value for each in requests] == [0, 1, 2]
    assert bench.sandbox.report().counters["killed_outside"] == 1


async def test_an_evaluation_killed_twice_is_refused_without_blaming_the_policy(bench):
    code = bench.policy(SLOW)
    request = bench.ask(code, {"n": 1})
    for _ in range(2):
        await kill(bench)
    refusal = (await asyncio.wait_for(request, 60)).refusal
    assert refusal.code is Code.UNAVAILABLE
    assert "killed by SIGKILL" in refusal.reason
    assert refusal.details["retry_after_seconds"] > 0
    assert await bench.value(code, {"n": 2}) == 2


async def test_a_management_command_is_not_repeated(bench):
    code = bench.policy("return 1", "commanded")
    source = code.files["function.py"] + (
        b"    def management(self, action, data):\n        import time\n        time.sleep(20)\n"
    )
    code = type(code)(code.ref, {"function.py": source})
    request = asyncio.ensure_future(bench.sandbox.manage(code, "t", "reset", None))
    await kill(bench)
    with pytest.raises(PolicyFault) as caught:
        await asyncio.wait_for(request, 60)
    assert caught.value.refusal.code is Code.UNAVAILABLE


async def test_a_policy_whose_cells_are_repeatedly_killed_near_the_memory_limit_is_refused(bench):
    code = bench.policy(HUNGRY, "hungry")
    request = bench.ask(code)
    for _ in range(2):
        cell = await busy_cell(bench)
        await until(lambda pid=cell.pid: resident_mib(pid) >= 230)
        await kill(bench)
    refusal = (await asyncio.wait_for(request, 60)).refusal
    assert refusal.code is Code.POLICY_MEMORY
    assert "MiB, of the 256 that it may" in refusal.reason


def resident_mib(pid):
    with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123  # procfs.
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.heavy
async def test_a_policy_that_uses_up_the_cpu_time_of_its_cell_is_refused_with_policy_crashed(
    make_bench,
):
    # With low priority, it could run for minutes on a busy machine.
    limits = Limits(evaluation_seconds=600, demote_seconds=600, cpu_seconds_per_cell_max=1)
    bench = await make_bench(limits=limits)
    refusal = await bench.refusal(bench.policy("while True: pass"))
    assert refusal.code is Code.POLICY_CRASHED
    assert "CPU time" in refusal.reason


async def test_requests_are_answered_if_a_loading_cell_is_killed(bench):
    code = bench.policy("return input_data['inputs']['n']")
    source = b"import time\ntime.sleep(0.5)\n" + code.files["function.py"]
    code = type(code)(code.ref, {"function.py": source})
    requests = [bench.ask(code, {"n": n}) for n in range(3)]
    cells = await until(lambda: list(bench.sandbox._pool._group_of))
    os.kill(cells[0].pid, signal.SIGKILL)
    assert [(await each).value for each in requests] == [0, 1, 2]


@pytest.mark.parametrize("times", [1, 2])
async def test_an_upload_is_checked_again_after_its_cell_is_killed(bench, times):
    code = bench.policy("import time\ntime.sleep(0.5)\nreturn {}", "upload")
    sample = Sample("t", Fleet(), bench.registry, input_data={})
    before = set(bench.sandbox._pool.spawner.living)
    checked = asyncio.ensure_future(bench.sandbox.check(code, [sample]))
    for _ in range(times):
        fresh = await until(lambda seen=frozenset(before): trying(bench, seen))
        before |= fresh
        os.kill(fresh.pop(), signal.SIGKILL)
    if times == 1:
        assert (await checked).outcomes[0].refusal is None
    else:
        with pytest.raises(PolicyFault) as caught:
            await checked
        assert caught.value.refusal.code is Code.UNAVAILABLE


def trying(bench, before):
    living = bench.sandbox._pool.spawner.living
    return {p for p, cell in living.items() if cell.sent and cell.sent[0].sample} - before


@pytest.mark.heavy
async def test_kills_of_the_zygote_stop_policies_for_seconds_only(bench):
    spawner = bench.sandbox._pool.spawner
    code = bench.policy("return 1")
    assert await bench.value(code) == 1
    assert sum(PAUSE_SECONDS_MIN * 2**each for each in range(4)) < PAUSE_SECONDS_MAX
    rounds = 0

    async def kill_zygote():
        nonlocal rounds
        await until(lambda: spawner.up)
        os.kill(spawner._zygote.pid, signal.SIGKILL)
        rounds += 1
        await until(lambda: bench.sandbox.report().counters.get("zygote_restarts", 0) == rounds)

    while PAUSE_SECONDS_MIN * 2.0 ** (rounds - 2) <= PATIENCE_SECONDS:
        assert await bench.value(code) == 1  # Requests wait during the pause, too.
        await kill_zygote()
    assert rounds > 5
    # A zygote that always dies is started less and less often, and then requests do not wait.
    refusal = reason = None
    while not (refusal and reason):
        refusal = getattr(await bench.outcome(code), "refusal", None)
        try:
            await bench.sandbox.check(code)
        except PolicyFault as fault:
            reason = str(fault)
        if not (refusal and reason):  # The pause may be over; the next is longer.
            await kill_zygote()
    assert refusal.code is Code.UNAVAILABLE
    assert "is started again in" in refusal.reason
    assert "is started again in" in reason
    await until(lambda: spawner.up)
    assert await bench.value(code, demand=Demand()) == 1

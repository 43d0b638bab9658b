"""Tests of requests whose cells are slow, die, are evicted or are replaced."""

# ruff: noqa: ASYNC110  # A demotion is a counter, not an event; the deadline bounds these loops.

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from moorage.core.state.facts import Refusal
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.model import Code, Demand, LeaseTerms, Tenant
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import CHECKS_MAX, CHECKS_WAITING_MAX, Limits, PolicyFault

TERMS = LeaseTerms(ttl_seconds=60)
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


async def test_a_timeout_of_a_cell_fails_only_the_running_request(hasty):
    bench = hasty
    code = bench.policy("""
if input_data["inputs"].get("loop"):
    while True: pass
return input_data["inputs"]["n"]
""")
    await bench.value(code, {"n": -1})
    futures = [bench.ask(code, {"n": n, "loop": n in (5, 20)}) for n in range(60)]
    for n, future in enumerate(futures):
        outcome = await future
        if n in (5, 20):
            assert outcome.refusal.code == Code.POLICY_TIMEOUT
        else:
            assert outcome.value == n
    counters = bench.sandbox.report().counters
    assert counters["timeouts"] == 2
    assert counters["resent"] > 0


async def test_the_deadline_is_set_by_the_request_or_the_policy_or_the_server(make_bench):
    limits = Limits(evaluation_seconds=5.0, evaluation_seconds_max=0.4, circuit_overruns=0)
    bench = await make_bench(limits=limits)
    plain = bench.policy("import time\ntime.sleep(input_data['inputs']['for'])\nreturn 1")
    assert await bench.value(plain, {"for": 0.6}) == 1
    bench = await make_bench(limits=replace(limits, evaluation_seconds=0.3))
    quick = replace(plain, ref=structs.replace(plain.ref, digest="other"), deadline_seconds=0.1)
    for code, named, seconds in (
        (plain, 0.0, 0.3),
        (quick, 0.0, 0.1),
        (quick, 0.2, 0.2),
        (
            replace(quick, ref=structs.replace(quick.ref, digest="third"), deadline_seconds=9.0),
            0.0,
            0.4,
        ),
    ):
        refusal = await bench.refusal(code, {"for": 60}, deadline_seconds=named)
        assert refusal.code is Code.POLICY_TIMEOUT
        assert refusal.details["seconds"] == seconds


async def test_a_crash_of_a_cell_fails_only_the_running_request(bench):
    code = bench.policy("""
import os
if input_data["inputs"]["n"] % 10 == 3: os._exit(7)
return input_data["inputs"]["n"]
""")
    outcomes = await asyncio.gather(*[bench.ask(code, {"n": n}) for n in range(50)])
    for n, outcome in enumerate(outcomes):
        if n % 10 == 3:
            assert outcome.refusal.code == Code.POLICY_CRASHED
            assert "status 7" in outcome.refusal.reason
        else:
            assert outcome.value == n


async def test_an_idle_cell_starts_at_once_and_a_busy_cell_gets_all_waiting_requests_together(
    bench,
):
    code = bench.policy("return input_data['inputs']['n']")
    await bench.value(code, {"n": -1})
    (cell,) = bench.sandbox._pool._group_of
    requests = [bench.ask(code, {"n": n}) for n in range(4)]
    assert len(cell.sent) == 1  # In the same iteration of the event loop.
    assert [(await each).value for each in requests] == [0, 1, 2, 3]


@pytest.mark.heavy
async def test_a_policy_that_exceeded_its_deadline_starts_with_low_priority(make_bench):
    limits = Limits(evaluation_seconds=1.0, demote_seconds=0.01, circuit_overruns=0)
    bench = await make_bench(limits=limits)
    code = bench.policy("while input_data['inputs']['stuck']:\n    pass\nreturn 1")
    counters = bench.sandbox.report
    for _ in range(2):
        assert (await bench.refusal(code, {"stuck": True})).code is Code.POLICY_TIMEOUT
    demoted = counters().counters["demotions"]
    # The third cell starts with low priority, and answers; so the fourth one does not. On a busy
    # machine, the third may get no CPU time at all; then the next one has low priority, too.
    async with asyncio.timeout(60):
        while isinstance(await bench.outcome(code, {"stuck": False}), ConsultFailed):
            demoted += 1
    assert counters().counters["demotions"] == demoted + 1
    assert (await bench.refusal(code, {"stuck": True})).code is Code.POLICY_TIMEOUT
    demoted = counters().counters["demotions"]
    assert await bench.value(code, {"stuck": False}) == 1
    assert counters().counters["demotions"] == demoted


async def test_a_policy_that_overruns_is_paused_only_for_its_tenant(make_bench):
    begun = []
    limits = Limits(evaluation_seconds=0.1, circuit_overruns=2, cells_per_policy_max=1)
    bench = await make_bench(limits=limits, circuits=begun.append)
    code = bench.policy("while input_data['inputs']['stuck']:\n    pass\nreturn 1")
    stuck = [bench.ask(code, {"stuck": True}, tenant=Tenant("a")) for _ in range(6)]
    honest = bench.ask(code, {"stuck": False}, tenant=Tenant("b"))
    codes = [(await each).refusal.code for each in stuck]
    # Waiting requests are refused when the circuit opens, and do not overrun one by one.
    assert codes == [Code.POLICY_TIMEOUT] * 2 + [Code.BUSY] * 4
    # As above, the honest request may get no CPU time; its circuit never opens.
    async with asyncio.timeout(60):
        while isinstance(answer := await honest, ConsultFailed):
            assert answer.refusal.code is Code.POLICY_TIMEOUT
            bench.sandbox.close_circuits(code.ref.uri)
            honest = bench.ask(code, {"stuck": False}, tenant=Tenant("b"))
    assert answer.value == 1
    assert [(rest.ref, rest.tenant) for rest in begun] == [(code.ref, "a")]
    report = bench.sandbox.report().counters
    assert (report["circuits_opened"], report["circuit_refusals"]) == (1, 4)
    bench.sandbox.close_circuits(code.ref.uri)
    assert bench.sandbox.open_circuit(code.ref, Tenant("a")) is None
    refusal = await bench.refusal(code, {"stuck": True}, tenant=Tenant("a"))
    assert refusal.code is Code.POLICY_TIMEOUT


class CountingMeter:
    """A meter of the CPU time of each tenant's evaluations, with the tenants at their limit."""

    def __init__(self):
        self.seconds = Counter()
        self.refused = set()

    def burnt(self, tenant, seconds):
        self.seconds[tenant] += seconds

    def refusal(self, tenant):
        return Refusal(Code.BUSY, "no more") if tenant in self.refused else None


BURNS = """
import time
begun = time.process_time()
while time.process_time() - begun < input_data["inputs"]["burn"]: pass
if input_data["inputs"].get("exit"):
    import os
    os._exit(7)
return time.process_time() - begun
"""


async def test_cpu_time_of_evaluations_is_counted_for_their_tenant(make_bench):
    meter = CountingMeter()
    patient = Limits(
        load_seconds=60, evaluation_seconds=60
    )  # A cell that computes for long runs at idle priority.
    bench = await make_bench(meter=meter, limits=patient)
    code, (ann, bob, eve) = bench.policy(BURNS), map(Tenant, ("ann", "bob", "eve"))
    loading = bench.policy(BURNS, "loading")
    source = b"import time\nwhile time.process_time() < 0.5: pass\n" + loading.files["function.py"]
    await bench.value(replace(loading, files={"function.py": source}), {"burn": 0.0}, tenant=eve)
    await bench.value(code, {"burn": 0.0}, tenant=bob)
    said = 0.0
    for burn in (0.1, 0.2):  # One by one, since a pipelined request may have begun.
        said += await bench.value(code, {"burn": burn}, tenant=ann)
        await bench.value(code, {"burn": 0.0}, tenant=bob)
    assert said <= meter.seconds[ann] < said + 0.1
    assert meter.seconds[bob] < 0.1
    assert meter.seconds[eve] < 0.1, "no tenant pays for the load of a policy"
    await bench.refusal(code, {"burn": 0.1, "exit": True}, tenant=eve)
    assert meter.seconds[eve] >= 0.1, "a crash does not avoid the count"


async def test_the_cpu_time_of_a_stopped_evaluation_is_counted(make_bench):
    meter = CountingMeter()
    bench = await make_bench(meter=meter, limits=Limits(evaluation_seconds=0.3))
    refusal = await bench.refusal(bench.policy(BURNS), {"burn": 60}, tenant=Tenant("ann"))
    assert refusal.code is Code.POLICY_TIMEOUT
    assert meter.seconds["ann"] > 0


async def test_a_tenant_beyond_its_cpu_budget_gets_no_evaluations(make_bench):
    meter = CountingMeter()
    bench = await make_bench(meter=meter)
    code, ann = bench.policy("return 1"), Tenant("ann")
    given = {"input_data": {}, "parameters": {}, "settings": {}}
    assert await bench.sandbox.evaluate(code, ann, **given) == 1
    meter.refused.add(ann)
    with pytest.raises(PolicyFault, match="no more"):
        await bench.sandbox.evaluate(code, ann, **given)
    with pytest.raises(PolicyFault, match="no more"):
        await bench.sandbox.evaluate(code, ann, **given, proxied=True)
    assert await bench.value(code, tenant=ann) == 1, "a request that already waits is still served"


@pytest.mark.parametrize("isolation", ["per_tenant", "per_eval"])
async def test_the_circuit_breaker_works_with_any_isolation(make_bench, isolation):
    limits = Limits(evaluation_seconds=0.05, circuit_overruns=2)
    bench = await make_bench(limits=limits, isolation=isolation)
    code = bench.policy("while True: pass")
    # If cells start slowly, a pause may end before the next request; the next pause is longer.
    async with asyncio.timeout(120):
        while (await bench.refusal(code)).code is not Code.BUSY:
            pass
    assert bench.sandbox.report().counters["circuits_opened"] >= 1
    assert isolation == "per_tenant" or not bench.sandbox._pool._groups


@IN_ONE_LOOP
async def test_cells_are_in_the_servers_session_for_fair_scheduling(shared_bench):
    await shared_bench.value(shared_bench.policy("return 1"))
    for pid in shared_bench.sandbox._pool.spawner.living:
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C in a terminal reaches only the server.


async def test_a_slow_evaluation_gets_low_priority_and_delays_no_other_evaluations(make_bench):
    bench = await make_bench(limits=Limits(evaluation_seconds=2.0, demote_seconds=0.01))
    code = bench.policy("""
if input_data["inputs"].get("loop"):
    while True: pass
return "quick"
""")
    await bench.value(code)
    slow = bench.ask(code, {"loop": True})
    while not bench.sandbox.report().counters.get("demotions"):
        await asyncio.sleep(0.005)  # No event reports this; the deadline ends the loop.
        assert not slow.done()
    assert await bench.value(code) == "quick"  # The same policy, in another cell.
    assert not slow.done()
    assert bench.sandbox.report().cells == {"rule:1-test": 2}
    assert (await slow).refusal.code == Code.POLICY_TIMEOUT


@pytest.mark.parametrize("count", [2, 40])
async def test_a_tenant_recovers_from_an_overrun_with_a_full_queue(make_bench, count):
    """At idle priority, the cell would never finish the new requests, and so never recover."""
    limits = Limits(evaluation_seconds=30.0, demote_seconds=0.01, cells_per_policy_max=1)
    bench = await make_bench(limits=limits)
    code = bench.policy("""
import time
n = input_data["inputs"]["n"]
while n == 0 and time.process_time() < 0.5: pass
if n == 1: time.sleep(0.5)
return n
""")
    first, *others = [bench.ask(code, {"n": n}) for n in range(count)]
    assert (await first).value == 0
    assert bench.sandbox.report().counters["demotions"] == 1
    (cell,) = bench.sandbox._pool._group_of
    assert not others[0].done()
    assert cell.demoted == (os.geteuid() != 0)  # Only root can raise the priority again.
    assert [(await each).value for each in others] == [*range(1, count)]


async def test_the_answer_of_a_cancelled_request_is_not_delivered(bench):
    code = bench.first_fit()
    bench.ask(code, demand=Demand(gpus=1), terms=TERMS, request="gone")
    bench.sandbox.forget("gone", 1)
    value = await bench.value(code, demand=Demand(gpus=1), terms=TERMS, request="a")
    bench.ask(code, demand=Demand(gpus=1), terms=TERMS, request="gone2")
    await asyncio.sleep(0)  # The request is in the pipe now.
    bench.sandbox.forget("gone2", 1)
    other = await bench.value(code, demand=Demand(gpus=1), terms=TERMS, request="b")
    third = await bench.value(code, demand=Demand(gpus=1), terms=TERMS, request="c")
    assert "gone" not in bench.order
    assert "gone2" not in bench.order
    # The forgotten proposal's GPU is free again for the second next request. If the cell reads the
    # cancellation before it evaluates, it proposes nothing, and the next request gets the GPU.
    assert value["gpus"] == ["0"]
    assert sorted(each["gpus"] for each in (other, third)) == [["1"], ["2"]]


async def test_evaluations_beyond_a_full_queue_are_refused_at_once(make_bench):
    bench = await make_bench(limits=Limits(queue_max=10, pipeline_max=1))
    code = bench.policy("return 1")
    outcomes = await asyncio.gather(*[bench.ask(code) for _ in range(40)])
    codes = [o.refusal.code if isinstance(o, ConsultFailed) else None for o in outcomes]
    assert codes.count(Code.BUSY) >= 28
    assert codes.count(None) + codes.count(Code.BUSY) == 40
    assert await bench.value(code) == 1


STATEFUL = """
import builtins
seen = builtins.seen = getattr(builtins, 'seen', [])
seen.append(input_data['inputs']['n'])
return list(seen)
"""


async def test_no_request_waits_forever_for_a_slow_policy(make_bench):
    limits = Limits(
        evaluation_seconds=5.0, queue_seconds=0.2, cells_per_policy_max=1, pipeline_max=1
    )
    bench = await make_bench(limits=limits)
    slow = bench.policy("import time\ntime.sleep(0.1)\nreturn {}")
    outcomes = await asyncio.gather(*[bench.ask(slow) for _ in range(12)])
    refused = [each for each in outcomes if isinstance(each, ConsultFailed)]
    assert 0 < len(refused) < 12
    assert {each.refusal.code for each in refused} == {Code.BUSY}
    assert "too slow for so many requests" in refused[0].refusal.reason


async def test_a_request_starts_after_the_answer_of_a_slow_evaluation_before_it(make_bench):
    limits = Limits(
        evaluation_seconds=20.0, demote_seconds=0.01, cells_per_policy_max=1, pipeline_max=1
    )
    bench = await make_bench(limits=limits)
    slow = bench.policy("import time\ntime.sleep(0.1)\nreturn input_data['inputs']['n']")
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*[bench.ask(slow, {"n": n}) for n in range(4)])
    assert [each.value for each in outcomes] == [0, 1, 2, 3]


async def test_isolation_levels_separate_tenants_and_evaluations(make_bench):  # Class 87.
    bench = await make_bench()
    code = bench.policy(STATEFUL)
    assert await bench.value(code, {"n": 1}, tenant=Tenant("a")) == [1]
    assert await bench.value(code, {"n": 2}, tenant=Tenant("b")) == [1, 2]
    tenants = await make_bench(isolation="per_tenant")
    assert await tenants.value(code, {"n": 1}, tenant=Tenant("a")) == [1]
    assert await tenants.value(code, {"n": 2}, tenant=Tenant("b")) == [2]
    assert await tenants.value(code, {"n": 3}, tenant=Tenant("a")) == [1, 3]
    alone = await make_bench(isolation="per_eval")
    for n in range(5):
        assert await alone.value(code, {"n": n}) == [n]
    assert await asyncio.gather(*[alone.value(code, {"n": n}) for n in range(20)]) == [
        [n] for n in range(20)
    ]
    assert alone.sandbox.report().cells == {}


async def test_idle_cells_end_when_other_policies_need_cells(make_bench):
    bench = await make_bench(limits=Limits(cells_max=3))
    codes = [bench.policy(f"return {n}", f"p{n}") for n in range(8)]
    for _ in range(2):
        values = await asyncio.gather(*[bench.value(code) for code in codes])
        assert values == list(range(8))
    assert sum(bench.sandbox.report().cells.values()) <= 3


async def test_a_cell_is_replaced_after_a_number_of_evaluations(make_bench):
    bench = await make_bench(limits=Limits(evaluations_per_cell_max=10))
    code = bench.policy(STATEFUL)
    lengths = [len(await bench.value(code, {"n": n})) for n in range(30)]
    assert max(lengths) <= 10
    assert bench.sandbox.report().counters["recycled"] >= 2


@IN_ONE_LOOP
async def test_new_defaults_of_a_policy_with_unchanged_code_take_effect(shared_bench):
    code = shared_bench.policy("return parameters", parameters={"x": 1})
    assert await shared_bench.value(code) == {"x": 1}
    assert await shared_bench.value(type(code)(code.ref, code.files, {}, {"x": 2})) == {"x": 2}


async def test_the_unsafe_mode_evaluates_policies_and_logs_a_warning(make_bench):
    bench = await make_bench(mode="unsafe")
    report = bench.sandbox.report()
    assert "UNSAFE" in report.warning
    assert "seccomp" not in report.layers
    assert await bench.value(bench.policy("return open('/proc/self/comm').read() != ''")) is True


@IN_ONE_LOOP
async def test_the_report_of_the_self_test_names_the_layers_and_every_attack(shared_bench):
    report = shared_bench.sandbox.report()
    assert report.mode == "jail"
    assert report.warning == ""
    assert "seccomp" in report.layers
    assert "rlimits" in report.layers
    assert report.probes["open"].startswith("refused")
    assert report.probes["ptrace"].startswith("killed: SIGSYS")


async def test_the_close_of_the_sandbox_refuses_waiting_requests(make_bench):
    bench = await make_bench(limits=Limits(evaluation_seconds=30.0))
    code = bench.policy("while True: pass")
    futures = [bench.ask(code) for _ in range(5)]
    while not bench.sandbox.report().counters.get("demotions"):
        await asyncio.sleep(0.005)  # As above.
    await bench.sandbox.close()
    assert {f.result().refusal.code for f in futures} == {Code.SHUTTING_DOWN}
    late = bench.ask(code)
    assert (await late).refusal.code == Code.SHUTTING_DOWN


async def test_a_dead_zygote_is_replaced_and_no_request_hangs(bench):
    code = bench.policy("return 1")
    assert await bench.value(code) == 1
    os.kill(bench.sandbox._pool.spawner._zygote.pid, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*[bench.ask(code) for _ in range(20)]), 60)
    assert [o for o in outcomes if not isinstance(o, Proposed)] == []  # No policy is to blame.
    async with asyncio.timeout(60):
        while "zygote_restarts" not in bench.sandbox.report().counters:
            await asyncio.sleep(0.005)  # The kernel ends killed processes with a delay.
    assert await bench.value(code) == 1
    assert bench.sandbox.report().counters["zygote_restarts"] == 1


async def test_no_process_outlives_a_killed_server(tmp_path):  # Class 25.
    script = tmp_path / "server.py"
    script.write_text(
        f"import asyncio, importlib.util, os, sys\n"
        f"spec = importlib.util.spec_from_file_location('c', {str(Path(__file__).parents[1] / 'conftest.py')!r})\n"  # noqa: E501  # A path.
        "c = importlib.util.module_from_spec(spec); spec.loader.exec_module(c)\n"
        "async def main():\n"
        "    bench = c.Bench(); await bench.sandbox.start()\n"
        "    await bench.value(bench.policy('return 1'))\n"
        "    slow = bench.ask(bench.policy('import time; time.sleep(60)', 'slow'))\n"
        "    nursery = bench.sandbox._pool.spawner\n"
        "    while len(nursery.living) < 2: await asyncio.sleep(0.005)\n"
        "    print(nursery._zygote.pid, *nursery.living, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE
    )
    line = await asyncio.wait_for(server.stdout.readline(), 60)
    pids = [int(pid) for pid in line.split()]
    assert len(pids) >= 3
    fds = [os.pidfd_open(pid) for pid in pids]
    server.kill()
    await server.wait()
    loop = asyncio.get_running_loop()
    for fd in fds:
        ended = loop.create_future()
        loop.add_reader(fd, lambda ended=ended: ended.done() or ended.set_result(None))
        await asyncio.wait_for(ended, 60)
        loop.remove_reader(fd)
        os.close(fd)


async def test_no_cell_is_used_before_its_jail_is_complete(bench):  # Must-have 12.
    for _ in range(10):
        cell = await bench.sandbox._pool.spawner.blank()
        status = Path(f"/proc/{cell.pid}/status").read_text()  # noqa: ASYNC240  # procfs.
        assert "Seccomp:\t2" in status
        assert cell.code is None  # The cell has no policy yet.
        bench.sandbox._pool.spawner.destroy(cell)


async def test_no_policy_is_blamed_for_the_death_of_its_zygote(make_bench):
    bench = await make_bench(limits=Limits(evaluation_seconds=5.0))
    code = bench.policy("import time\ntime.sleep(0.2)\nreturn input_data['inputs']['n']")
    await bench.value(code, {"n": -1})
    running = [bench.ask(code, {"n": n}) for n in range(3)]
    checked = asyncio.ensure_future(bench.sandbox.check(bench.policy("return 1", "other")))
    await asyncio.sleep(0)  # The request is in the pipe now.
    os.kill(bench.sandbox._pool.spawner._zygote.pid, signal.SIGKILL)
    assert [(await each).value for each in running] == [0, 1, 2]
    (result,) = await asyncio.gather(checked, return_exceptions=True)
    if isinstance(result, PolicyFault):  # The check was in progress; the refusal blames nothing.
        assert result.refusal.code == Code.UNAVAILABLE
    else:
        assert result.ok


async def test_a_new_zygote_forks_the_cells_that_were_ordered_from_a_dead_zygote(bench):
    at_work = bench.policy("return 1")
    assert await bench.value(at_work) == 1
    zygote = bench.sandbox._pool.spawner._zygote.pid
    os.kill(zygote, signal.SIGSTOP)
    requests = [bench.ask(bench.policy(f"return {n}", f"rule-{n}")) for n in range(4)]
    assert await bench.value(at_work) == 1  # By now, cells for the other policies are ordered.
    os.kill(zygote, signal.SIGKILL)
    assert [(await each).value for each in requests] == [0, 1, 2, 3]
    assert bench.sandbox.report().counters["zygote_restarts"] == 1


async def test_the_number_of_checked_and_of_waiting_uploads_is_limited(make_bench):
    bench = await make_bench(limits=Limits(load_seconds=0.2))
    loop = bench.policy("return 1", "loop")
    loop = type(loop)(loop.ref, {"function.py": b"import time\ntime.sleep(60)\n"})
    number = CHECKS_MAX + CHECKS_WAITING_MAX + 3

    async def check(tenant):
        async with bench.sandbox.uploads.turn(tenant):
            return await bench.sandbox.check(loop)

    checks = [asyncio.ensure_future(check(f"t{each % 2}")) for each in range(number)]
    done, _ = await asyncio.wait(checks, return_when=asyncio.FIRST_COMPLETED)
    living = len(bench.sandbox._pool.spawner.living)
    assert living <= CHECKS_MAX + bench.sandbox._limits.spares
    results = await asyncio.gather(*checks, return_exceptions=True)
    busy = [each for each in results if isinstance(each, ServiceError)]
    assert [fault.code for fault in busy] == [Code.BUSY] * 3
    assert {each.result() if not each.exception() else None for each in done} == {None}
    stopped = [each for each in results if not isinstance(each, ServiceError)]
    assert all("did not load" in each.findings[0].message for each in stopped)


async def test_new_checks_of_registered_policies_precede_checks_of_uploads(make_bench):
    bench = await make_bench(limits=Limits(load_seconds=5))
    good = bench.policy("return 1")
    loop = type(good)(good.ref, {"function.py": b"while True: pass\n"})
    number = CHECKS_MAX + CHECKS_WAITING_MAX

    async def check(turns, code):
        async with turns.turn("t"):
            return await bench.sandbox.check(code)

    waiting = bench.sandbox.uploads
    uploads = [asyncio.ensure_future(check(waiting, loop)) for _ in range(number)]
    await asyncio.sleep(0)  # Each has begun, or waits for its turn.
    assert (await check(bench.sandbox.rechecks, good)).ok
    assert not all(each.done() for each in uploads)
    for each in uploads:
        each.cancel()
    await asyncio.gather(*uploads, return_exceptions=True)

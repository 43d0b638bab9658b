"""Policies on the nodes of a real Ray: as here, and a worker that fails costs one retry."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from moorage.core.turns.events import Proposed
from moorage.model import Code, Demand, LeaseTerms
from moorage.sandbox.host.sandbox import Limits, WorkerSettings
from moorage.sandbox.host.workers import WORKER_SILENT_SECONDS_MAX

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
SLEEPS = "import time\ntime.sleep(0.2)\nreturn {'n': input_data['inputs']['n']}"
SAYS_WHEN = (
    "import time\nbegan = time.monotonic()\ntime.sleep(0.2)\n"
    "return {'n': input_data['inputs']['n'], 'when': [began, time.monotonic()]}"
)
TOLD = "self._agent.tell(relay.CellSaid(self._number, data, given_bytes))"
AGENT = "sandbox/workers/agent.py"


def places(bench: Any) -> set[str]:
    """Return the workers that have cells; an empty name: this machine."""
    return {cell.worker for cell in bench.sandbox._pool._group_of}


def have_cells(bench: Any, count: int) -> bool:
    return len(places(bench)) == count


def counted(bench: Any, name: str) -> int:
    return bench.sandbox.report().counters.get(name, 0)


async def asked(bench: Any, count: int = 40, body: str = SLEEPS) -> tuple[float, list[Any]]:
    """Ask a policy that takes 0.2 s so often at one time; return how long all of it took."""
    policy = bench.policy(body, "takes-long")
    began = time.perf_counter()
    asks = [bench.outcome(policy, {"n": n}) for n in range(count)]
    outcomes = await asyncio.gather(*asks)
    return time.perf_counter() - began, outcomes


async def at_work(world: Any, bench: Any) -> None:
    """Wait until one more evaluation has been answered: others are under way then."""
    before = len(bench.order)
    await world.until(lambda: len(bench.order) > before)


def all_answered(outcomes: list[Any]) -> bool:
    answers = [each.value["n"] for each in outcomes if isinstance(each, Proposed)]
    return answers == list(range(len(outcomes)))


async def test_placements_are_those_of_this_machine(world, make_bench) -> None:
    world.have(1)
    here, there = await make_bench(), await make_bench(workers=world.workers())
    await world.up(there, 1)
    first_fit, asks = here.first_fit(), {"demand": Demand(gpus=2), "terms": LeaseTerms(60.0)}
    placed = []
    for bench in (here, there):
        found = []
        for number in range(8):  # All there is, each where the one before it left.
            outcome = await bench.outcome(first_fit, request=f"q{number}", **asks)
            found.append(outcome.value)
        bench.fleet.set_capacity(0, 64_000, 64_000, [0, 0, 1000, 1000])
        for number in range(8):
            bench.sandbox.settle(f"q{number}", granted=False)
        found.append((await bench.outcome(first_fit, **asks)).value)
        placed.append(found)
    assert placed[0] == placed[1]
    assert placed[0][0]["gpus"] == ["0", "1"]
    assert placed[0][-1]["gpus"] == ["2", "3"]
    assert places(here) == {""}
    assert "" not in places(there)


async def test_a_worker_calls_services_and_keeps_contexts_as_here(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers())
    await world.up(bench, 1)
    policy = bench.policy(
        "context['n'] = context.get('n', 0) + 1\n"
        "found = self.settings['cluster_client'].read_cluster('c1')\n"
        "return {'n': context['n'], 'found': found, 'ids': sorted(input_data['cluster_data']),\n"
        "        'tags': input_data['cluster_data']['c0']['data']['tags']}"
    )
    values = [await bench.value(policy) for _ in range(3)]
    assert [each["n"] for each in values] == [1, 2, 3]
    assert values[0]["ids"] == ["c0", "c1"]
    assert values[0]["tags"] == ["a"]
    assert values[0]["found"][1]["arguments"] == ["c1"]
    assert "" not in places(bench)


async def test_failures_of_policies_read_as_here(world, make_bench) -> None:
    world.have(1)
    limits = Limits(evaluation_seconds=1.0)
    here = await make_bench(limits=limits)
    there = await make_bench(limits=limits, workers=world.workers())
    await world.up(there, 1)
    for body, code in [
        ("return 1 / 0", Code.POLICY_ERROR),
        ("return object()", Code.POLICY_BAD_OUTPUT),
        ("x = 'a' * (1 << 30)", Code.POLICY_MEMORY),
        ("while True: pass", Code.POLICY_TIMEOUT),
        ("import ctypes\nctypes.string_at(1)", Code.POLICY_ERROR),
    ]:
        policy = here.policy(body)
        expected, found = await here.refusal(policy), await there.refusal(policy)
        # Which line it is at is not told where the machine is too busy to say it in time.
        reasons = {each.reason.partition(" (function.py")[0] for each in (expected, found)}
        assert (len(reasons), found.code) == (1, expected.code), reasons
        assert found.code is code
    assert counted(there, "worker_doubts") == 0


async def test_throughput_grows_and_a_killed_raylet_loses_nothing(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers())
    await world.up(bench, 1)
    await asked(bench, 8)
    one, outcomes = await asked(bench)
    assert all_answered(outcomes)
    world.have(2)
    await world.up(bench, 2)
    deadline = time.monotonic() + 90
    while not have_cells(bench, 2):  # A busy machine takes long to start them.
        assert time.monotonic() < deadline
        await asked(bench, 16)
    two, outcomes = await asked(bench)
    assert all_answered(outcomes)
    print(f"\n40 asks of a policy that takes 0.2 s: one raylet {one:.2f} s, {40 / one:.0f}/s;"
          f" two {two:.2f} s, {40 / two:.0f}/s; x{one / two:.2f}")  # fmt: skip
    running = asyncio.ensure_future(asked(bench, 120))
    await at_work(world, bench)
    await asyncio.to_thread(world.kill, world.raylets[0])
    seconds, outcomes = await running
    assert all_answered(outcomes)
    assert counted(bench, "worker_losses") >= 1
    print(f"120 asks, one of two raylets killed at work: {len(outcomes)} answered in"
          f" {seconds:.2f} s, {counted(bench, 'resent')} done again")  # fmt: skip


def side_by_side(outcomes: list[Any]) -> int:
    """Return how many evaluations were under way at one time, by what they say of themselves."""
    spans = [each.value["when"] for each in outcomes]
    return max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


async def test_cells_of_two_raylets_work_at_one_time(world, make_bench) -> None:
    for count in (1, 2):
        world.have(count)
        bench = await make_bench(workers=world.workers(1))
        await world.up(bench, count)
        await asked(bench, 4, SAYS_WHEN)
        running = asyncio.ensure_future(asked(bench, body=SAYS_WHEN))
        await world.until(partial(have_cells, bench, count))
        assert "" not in places(bench)
        _, outcomes = await running
        assert all_answered(outcomes)
        assert side_by_side(outcomes) == count, "one cell on each raylet"
        await bench.sandbox.close()


async def test_a_client_server_of_ray_will_do(world, make_bench) -> None:
    world.have(1)
    with client_server(world) as address:
        bench = await make_bench(workers=replace(world.workers(), address=address))
        await world.up(bench, 1)
        seconds, outcomes = await asked(bench)
        assert all_answered(outcomes)
        assert "" not in places(bench)
        await bench.sandbox.close()
    print(f"\n40 asks of a policy that takes 0.2 s, by ray://: {seconds:.2f} s")


@contextmanager
def client_server(world: Any) -> Iterator[str]:
    """Run what `ray start --head` runs for clients of other machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ray.util.client.server", "--mode", "proxy"]
    where = ["--address", world.cluster.address, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, *where], stderr=subprocess.DEVNULL)
    try:
        yield f"ray://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


async def test_all_workers_lost_is_as_without_ray(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers())
    await world.up(bench, 1)
    running = asyncio.ensure_future(asked(bench, 16))
    await at_work(world, bench)
    await asyncio.to_thread(world.kill, world.raylets[0])
    _, outcomes = await running
    assert all_answered(outcomes)
    await world.until(lambda: counted(bench, "worker_losses"))
    _, outcomes = await asked(bench, 4)
    assert all_answered(outcomes)
    assert places(bench) == {""}
    world.have(1)
    await world.up(bench, 1)
    await asked(bench, 4)
    assert "" not in places(bench)


async def test_a_hanging_worker_costs_one_retry(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers())
    await world.up(bench, 1)
    await asked(bench, 1)
    (agent,) = await world.until(lambda: world.agents(world.raylets[0]))
    os.kill(agent, signal.SIGSTOP)
    try:
        seconds, outcomes = await asked(bench, 4)
    finally:
        os.kill(agent, signal.SIGKILL)
    assert all_answered(outcomes)
    assert counted(bench, "worker_losses") == 1
    print(f"\na worker that hangs: answered after {seconds:.2f} s, at a bound of"
          f" {WORKER_SILENT_SECONDS_MAX:g} s")  # fmt: skip
    assert [each for each in world.said if "silent" in each[1]]


async def test_a_cell_that_hangs_on_a_worker_costs_one_retry(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers(), limits=Limits(evaluation_seconds=2.0))
    await world.up(bench, 1)
    await asked(bench, 1)
    (agent,) = await world.until(lambda: world.agents(world.raylets[0]))
    cells = [pid for zygote in children(agent) for pid in children(zygote)]
    for pid in cells:
        os.kill(pid, signal.SIGSTOP)
    _, outcomes = await asked(bench, 1)
    assert all_answered(outcomes)
    assert counted(bench, "worker_doubts") == 1
    assert counted(bench, "timeouts") == 0


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123  # One line of procfs.
        first = [int(each) for each in file.read().split()]
    threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  # As above.
    for thread in threads:
        if thread != str(pid):
            with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123  # As above.
                first += [int(each) for each in file.read().split()]
    return first


def lie(said: str) -> str:
    """Return what an agent does that says something else in the place of an answer."""
    return f"data = {said} if b'\"n\"' in data else data\n        {TOLD}"


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("its-bytes", lie("data[:-1] + b'\\xff'")),
        ("its-length", lie("b'\\xff\\xff\\xff\\x7f' + data")),
        ("which-question", lie("data[:7] + b'12345678' + data[15:]")),
        ("its-wall", TOLD.replace("data,", "data[:4] + b'\\x94\\x10\\x80\\xa1x\\xa0',")),
        ("its-messages", TOLD + "\n        self._agent._outgoing.append(b'\\xc1')"),
    ],
)
async def test_a_worker_that_lies_is_refused(world, make_bench, name: str, new: str) -> None:
    world.have(0)
    liar = world.add(world.changed(name, AGENT, TOLD, new))
    try:
        bench = await make_bench(workers=world.workers())
        await world.up(bench, 1)
        _, outcomes = await asked(bench, 4)
        assert all_answered(outcomes)
        assert places(bench) == {""}
        print(f"\nlying about {name}: {bench.sandbox.report().counters}")
        if name in {"its-bytes", "its-length", "which-question"}:
            doubts = counted(bench, "worker_doubts")  # Each ask may have been in a cell of its own.
            assert 1 <= doubts <= 4
            assert doubts == counted(bench, "protocol_breaches")
    finally:
        world.kill(liar)


async def test_a_node_without_the_wall_gets_no_policy(world, make_bench) -> None:
    world.have(0)
    source = world.changed(
        "wall-less",
        "sandbox/cell/jail.py",
        '    layers["seccomp"] = _seccomp()\n',
        '    layers["seccomp"] = "none"\n',
    )
    open_node = world.add(source)
    try:
        bench = await make_bench(workers=world.workers())
        # Ray may still name nodes that were killed just before: agents cannot start there either.
        found = await world.until(lambda: [x for x in world.said if "may run no policies" in x[1]])
        print(f"\n{found}")
        assert "seccomp" in found[0][1]
        assert not found[0][2]
        _, outcomes = await asked(bench, 4)
        assert all_answered(outcomes)
        assert places(bench) == {""}
        assert bench.sandbox.report().workers_up == 0
    finally:
        world.kill(open_node)


async def test_without_ray_the_sandbox_serves(make_bench) -> None:
    said: list[tuple[str, str, bool]] = []
    settings = WorkerSettings("127.0.0.1:1", 4, lambda *each: said.append(each))
    bench = await make_bench(workers=settings)
    _, outcomes = await asked(bench, 2)
    assert all_answered(outcomes)
    assert places(bench) == {""}

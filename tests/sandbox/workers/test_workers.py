"""Policies on the nodes of a real Ray: as here, and a worker that fails costs one retry."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from moorage.core.turns.events import Proposed
from moorage.model import Code, Demand, LeaseTerms
from moorage.sandbox.host.sandbox import Limits, WorkerSettings

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
SEEN_SECONDS_MAX = 90
SLEEPS = "import time\ntime.sleep(0.2)\nreturn {'n': input_data['inputs']['n']}"
SAYS_WHEN = (
    "import time\nbegan = time.monotonic()\ntime.sleep(0.2)\n"
    "return {'n': input_data['inputs']['n'], 'when': [began, time.monotonic()]}"
)
SENDS = "self._agent.tell(relay.CellSaid(self._number, data, given_bytes))"
AGENT = "sandbox/workers/agent.py"


def places(bench: Any) -> set[str]:
    """Return the workers that have cells; an empty name: this machine."""
    return {cell.worker for cell in bench.sandbox._pool._group_of}


def have_cells(bench: Any, count: int) -> bool:
    return len(places(bench)) == count


def counted(bench: Any, name: str) -> int:
    return bench.sandbox.report().counters.get(name, 0)


async def evaluated(bench: Any, count: int, body: str = SLEEPS) -> list[Any]:
    """Have a policy that takes 0.2 s evaluated `count` times at once; return what came of it."""
    policy = bench.policy(body, "takes-long")
    return await asyncio.gather(*(bench.outcome(policy, {"n": n}) for n in range(count)))


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
        # Which line it is at is missing where the machine is too busy to find it in time.
        reasons = {each.reason.partition(" (function.py")[0] for each in (expected, found)}
        assert (len(reasons), found.code) == (1, expected.code), reasons
        assert found.code is code
    assert counted(there, "worker_doubts") == 0


async def test_a_killed_raylet_loses_nothing(world, make_bench) -> None:
    world.have(2)
    bench = await make_bench(workers=world.workers())
    await world.up(bench, 2)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while not have_cells(bench, 2):  # A busy machine takes long to start them.
            await evaluated(bench, 16)
    running = asyncio.ensure_future(evaluated(bench, 60))
    await at_work(world, bench)
    await asyncio.to_thread(world.kill, world.raylets[0])
    assert all_answered(await running)
    assert counted(bench, "worker_losses") >= 1


def side_by_side(outcomes: list[Any]) -> int:
    """Return how many evaluations were under way at one time, by what they say of themselves."""
    spans = [each.value["when"] for each in outcomes]
    return max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


async def test_cells_of_two_raylets_work_at_one_time(world, make_bench) -> None:
    for count in (1, 2):
        world.have(count)
        bench = await make_bench(workers=world.workers(1))
        await world.up(bench, count)
        await evaluated(bench, 4, SAYS_WHEN)
        running = asyncio.ensure_future(evaluated(bench, 20, SAYS_WHEN))
        await world.until(partial(have_cells, bench, count))
        assert "" not in places(bench)
        outcomes = await running
        assert all_answered(outcomes)
        assert side_by_side(outcomes) == count, "one cell on each raylet"
        await bench.sandbox.close()


async def test_a_client_server_of_ray_will_do(world, make_bench) -> None:
    world.have(1)
    with client_server(world) as address:
        bench = await make_bench(workers=replace(world.workers(), address=address))
        await world.up(bench, 1)
        assert all_answered(await evaluated(bench, 8))
        assert "" not in places(bench)
        await bench.sandbox.close()


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
    running = asyncio.ensure_future(evaluated(bench, 16))
    await at_work(world, bench)
    await asyncio.to_thread(world.kill, world.raylets[0])
    assert all_answered(await running)
    await world.until(lambda: counted(bench, "worker_losses"))
    assert all_answered(await evaluated(bench, 4))
    assert places(bench) == {""}
    world.have(1)
    await world.up(bench, 1)
    await evaluated(bench, 4)
    assert "" not in places(bench)


async def test_a_hanging_worker_costs_one_retry(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers())
    await world.up(bench, 1)
    await evaluated(bench, 1)
    (agent,) = await world.until(lambda: world.agents(world.raylets[0]))
    os.kill(agent, signal.SIGSTOP)
    try:
        outcomes = await evaluated(bench, 4)
    finally:
        os.kill(agent, signal.SIGKILL)
    assert all_answered(outcomes)
    assert counted(bench, "worker_losses") == 1
    assert [each for each in world.said if "silent" in each[1]]


async def test_a_cell_that_hangs_on_a_worker_costs_one_retry(world, make_bench) -> None:
    world.have(1)
    bench = await make_bench(workers=world.workers(), limits=Limits(evaluation_seconds=2.0))
    await world.up(bench, 1)
    await evaluated(bench, 1)
    (agent,) = await world.until(lambda: world.agents(world.raylets[0]))
    cells = [pid for zygote in children(agent) for pid in children(zygote)]
    for pid in cells:
        os.kill(pid, signal.SIGSTOP)
    assert all_answered(await evaluated(bench, 1))
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
    return f"data = {said} if b'\"n\"' in data else data\n        {SENDS}"


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("its-bytes", lie("data[:-1] + b'\\xff'")),
        ("its-length", lie("b'\\xff\\xff\\xff\\x7f' + data")),
        ("which-question", lie("data[:7] + b'12345678' + data[15:]")),
        ("its-wall", SENDS.replace("data,", "data[:4] + b'\\x94\\x10\\x80\\xa1x\\xa0',")),
        ("its-messages", SENDS + "\n        self._agent._outgoing.append(b'\\xc1')"),
    ],
)
async def test_a_worker_that_lies_is_refused(world, make_bench, name: str, new: str) -> None:
    world.have(0)
    liar = world.add(world.changed(name, AGENT, SENDS, new))
    try:
        bench = await make_bench(workers=world.workers())
        await world.up(bench, 1)
        assert all_answered(await evaluated(bench, 4))
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
        assert all_answered(await evaluated(bench, 4))
        assert places(bench) == {""}
        assert bench.sandbox.report().workers_up == 0
    finally:
        world.kill(open_node)


async def test_without_ray_the_sandbox_serves(make_bench) -> None:
    said: list[tuple[str, str, bool]] = []
    settings = WorkerSettings("127.0.0.1:1", 4, lambda *each: said.append(each))
    bench = await make_bench(workers=settings)
    assert all_answered(await evaluated(bench, 2))
    assert places(bench) == {""}

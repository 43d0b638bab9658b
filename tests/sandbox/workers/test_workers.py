"""Policies on the nodes of a real Ray work as on this machine; a failing worker costs one retry."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moorage.core.turns.events import Proposed
from moorage.model import Code, Demand, LeaseTerms
from moorage.sandbox.host.sandbox import Limits, WorkerSettings
from tests.ports import free_port
from tests.ray_clusters import listens, until
from tests.waiting import async_until

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
CELLS = 4
SLEEPS = "import time\ntime.sleep(0.2)\nreturn {'n': input_data['inputs']['n']}"
SAYS_WHEN = (
    "import time\nbegan = time.monotonic()\ntime.sleep(0.2)\n"
    "return {'n': input_data['inputs']['n'], 'when': [began, time.monotonic()]}"
)
SENT = "self._agent.tell(relay.CellSaid(self._number, data, given_bytes))"
AGENT = "sandbox/workers/agent.py"


@pytest.fixture
def serving(world, make_bench) -> Callable[..., Awaitable[Any]]:
    """Return a function that starts a sandbox with raylets, and waits for its workers."""

    async def start(count: int, source: Path | None = None, cells: int = CELLS, **more: Any) -> Any:
        world.have(count, source)
        bench = await make_bench(workers=world.workers(cells), **more)
        await world.up(bench, count + (source is not None))
        return bench

    return start


def places(bench: Any) -> set[str]:
    """Return the workers that have cells; an empty name: this machine."""
    return {cell.worker for cell in bench.sandbox._pool._group_of}


def have_cells(bench: Any, count: int) -> bool:
    return len(places(bench)) == count


def read_count(bench: Any, name: str) -> int:
    return bench.sandbox.report().counters.get(name, 0)


async def results(bench: Any, count: int, body: str = SLEEPS) -> list[Any]:
    """Return the outcomes of `count` concurrent evaluations of a policy that takes 0.2 s."""
    policy = bench.policy(body, "takes-long")
    return await asyncio.gather(*(bench.outcome(policy, {"n": n}) for n in range(count)))


async def at_work(world: Any, bench: Any) -> None:
    """Wait for the answer of one more evaluation while other evaluations are in progress."""
    before = len(bench.order)
    await async_until(lambda: len(bench.order) > before)


def answer_all(outcomes: list[Any]) -> bool:
    answers = [each.value["n"] for each in outcomes if isinstance(each, Proposed)]
    return answers == list(range(len(outcomes)))


async def test_workers_propose_the_placements_that_the_daemons_machine_proposes(
    make_bench, serving
) -> None:
    here, there = await make_bench(), await serving(1)
    first_fit, asks = here.first_fit(), {"demand": Demand(gpus=2), "terms": LeaseTerms(60.0)}
    placed = []
    for bench in (here, there):
        found = []
        for number in range(8):  # All free GPUs, one after the other.
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


async def test_cells_on_workers_call_services_and_store_contexts_like_local_cells(serving) -> None:
    bench = await serving(1)
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


async def test_failures_of_policies_on_workers_have_the_same_messages(make_bench, serving) -> None:
    limits = Limits(evaluation_seconds=1.0)
    here, there = await make_bench(limits=limits), await serving(1, limits=limits)
    for body, code in [
        ("return 1 / 0", Code.POLICY_ERROR),
        ("return object()", Code.POLICY_BAD_OUTPUT),
        ("x = 'a' * (1 << 30)", Code.POLICY_MEMORY),
        ("while True: pass", Code.POLICY_TIMEOUT),
        ("import ctypes\nctypes.string_at(1)", Code.POLICY_ERROR),
    ]:
        policy = here.policy(body)
        expected, found = await here.refusal(policy), await there.refusal(policy)
        # On a busy machine, the line may be missing.
        reasons = {each.reason.partition(" (function.py")[0] for each in (expected, found)}
        assert (len(reasons), found.code) == (1, expected.code), reasons
        assert found.code is code
    assert read_count(there, "worker_doubts") == 0


async def test_a_killed_raylet_loses_no_request(world, serving) -> None:
    bench = await serving(2)
    deadline = time.monotonic() + 90
    while not have_cells(bench, 2):  # No event reports this.
        assert time.monotonic() < deadline
        await results(bench, 16)
    running = asyncio.ensure_future(results(bench, 60))
    await at_work(world, bench)
    await asyncio.to_thread(world.kill, 0)
    assert answer_all(await running)
    assert read_count(bench, "worker_losses") >= 1


def side_by_side(outcomes: list[Any]) -> int:
    """Return how many evaluations overlapped, by the times that they report."""
    spans = [each.value["when"] for each in outcomes]
    return max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


async def test_cells_of_two_raylets_work_in_parallel(world, serving) -> None:
    bench = await serving(2, cells=1)
    await results(bench, 4)
    running = asyncio.ensure_future(results(bench, 40, SAYS_WHEN))
    await async_until(partial(have_cells, bench, 2))
    assert "" not in places(bench)
    outcomes = await running
    assert answer_all(outcomes)
    assert side_by_side(outcomes) == 2, "one cell on each raylet"


async def test_the_daemon_can_connect_to_workers_through_rays_client_server(
    world, make_bench
) -> None:
    world.have(1)
    with client_server(world) as address:
        bench = await make_bench(workers=replace(world.workers(CELLS), address=address))
        await world.up(bench, 1)
        assert answer_all(await results(bench, 8))
        assert "" not in places(bench)
        await bench.sandbox.close()


@contextmanager
def client_server(world: Any) -> Iterator[str]:
    """Run the client server that `ray start --head` runs for other machines."""
    port = free_port()
    command = [sys.executable, "-m", "ray.util.client.server", "--mode", "proxy"]
    where = ["--address", world.address, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, *where], stderr=subprocess.DEVNULL)
    try:
        until(lambda: listens(port))  # An earlier client would wait for many seconds.
        yield f"ray://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


async def test_without_live_workers_the_daemons_machine_evaluates(world, serving) -> None:
    bench = await serving(1)
    running = asyncio.ensure_future(results(bench, 16))
    await at_work(world, bench)
    await asyncio.to_thread(world.kill, 0)
    assert answer_all(await running)
    await async_until(lambda: read_count(bench, "worker_losses"))
    assert answer_all(await results(bench, 4))
    assert places(bench) == {""}
    world.have(1)
    await world.up(bench, 1)
    await results(bench, 4)
    assert "" not in places(bench)


async def test_a_hanging_worker_causes_a_single_retry(world, serving) -> None:
    bench = await serving(1)
    await results(bench, 1)
    (agent,) = await async_until(lambda: world.agents(0))
    os.kill(agent, signal.SIGSTOP)
    try:
        outcomes = await results(bench, 4)
    finally:
        os.kill(agent, signal.SIGKILL)
    assert answer_all(outcomes)
    assert read_count(bench, "worker_losses") == 1
    assert [each for each in world.said if "silent" in each[1]]


async def test_a_hanging_cell_on_a_worker_causes_a_single_retry(world, serving) -> None:
    bench = await serving(1, limits=Limits(evaluation_seconds=2.0))
    await results(bench, 1)
    (agent,) = await async_until(lambda: world.agents(0))
    cells = [pid for zygote in children(agent) for pid in children(zygote)]
    for pid in cells:
        os.kill(pid, signal.SIGSTOP)
    assert answer_all(await results(bench, 1))
    assert read_count(bench, "worker_doubts") == 1
    assert read_count(bench, "timeouts") == 0


def children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for file in files for each in file.read_text().split()]


def lie(said: str) -> str:
    """Return code for an agent that replaces each answer with `said`."""
    return f"data = {said} if b'\"n\"' in data else data\n        {SENT}"


@pytest.mark.parametrize(
    "new",
    [
        pytest.param(lie("data[:-1] + b'\\xff'"), id="its-bytes"),
        pytest.param(lie("b'\\xff\\xff\\xff\\x7f' + data"), id="its-length"),
        pytest.param(lie("data[:7] + b'12345678' + data[15:]"), id="which-question"),
        pytest.param(
            SENT.replace("data,", "data[:4] + b'\\x94\\x10\\x80\\xa1x\\xa0',"), id="its-wall"
        ),
        pytest.param(SENT + "\n        self._agent._outgoing.append(b'\\xc1')", id="its-messages"),
    ],
)
async def test_wrong_answers_of_a_worker_are_refused(world, serving, new: str) -> None:
    bench = await serving(0, world.changed(AGENT, SENT, new))
    assert answer_all(await results(bench, 4))
    assert places(bench) == {""}
    if new.startswith("data = "):
        doubts = read_count(bench, "worker_doubts")  # Each request may have been in another cell.
        assert 1 <= doubts <= 4
        assert doubts == read_count(bench, "protocol_breaches")


async def test_a_node_with_a_failing_jail_gets_no_policy(world, make_bench) -> None:
    sets = '    layers["seccomp"] = '
    source = world.changed("sandbox/cell/jail.py", f"{sets}_seccomp()\n", f'{sets}"none"\n')
    world.have(0, source)
    bench = await make_bench(workers=world.workers(CELLS))
    # Ray may still list nodes that were just killed: agents cannot start there either.
    found = await async_until(lambda: [x for x in world.said if "cannot run policies" in x[1]])
    assert "seccomp" in found[0][1]
    assert not found[0][2]
    assert answer_all(await results(bench, 4))
    assert places(bench) == {""}
    assert bench.sandbox.report().workers_up == 0


async def test_the_sandbox_evaluates_although_ray_is_missing(make_bench) -> None:
    settings = WorkerSettings("127.0.0.1:1", 4, lambda *_: None)
    bench = await make_bench(workers=settings)
    assert answer_all(await results(bench, 2))
    assert places(bench) == {""}

"""What clients see of a takeover: two real servers on one PostgreSQL, whose writer goes away."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from served import MOORAGE, cluster, moored
from test_takeover import One, one

from moorage.testing.daemon_process import child, serve_variables
from moorage_client import Client
from moorage_client.watching import Watch

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

FIRST_FIT = "first_fit:1.0-stable"
COUNTING = "for i in $(seq 40); do echo $i; sleep 0.1; done; echo whole; exit 3"
CLIENTS = 50
LEASES = 20


@pytest.fixture
def storage(postgres) -> str:
    return postgres.database()


@pytest.fixture
def pair(storage: str, tmp_path: Path) -> Iterator[tuple[One, One]]:
    """The server that leads, with a fleet and a policy, and one that stands by."""
    backends = {"MOORAGE_BACKENDS": "local,memory"}
    with one(tmp_path / "a", storage, **backends) as first:
        first.server.fill(cluster("east", nodes=2, gpus=8))
        with one(tmp_path / "b", storage, **backends) as second:
            yield first, second


def urls(pair: tuple[One, One], side: str = "ws") -> str:
    return ",".join(each.ready[side] for each in pair)


async def ask_many(client: Client, answered: dict[str, int], half: asyncio.Event) -> None:
    """Ask for leases one by one; note each that is answered."""
    for _ in range(LEASES):
        demand = {"cpu_milli": 1}
        lease = (await client.ask(FIRST_FIT, resources=demand, lease={"ttl_seconds": 600})).lease
        assert lease is not None
        assert lease.id not in answered
        answered[lease.id] = lease.fencing
        if len(answered) >= CLIENTS * LEASES // 3:
            half.set()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_many_clients_ask_on_and_nothing_is_granted_twice(
    pair: tuple[One, One], how: signal.Signals
) -> None:
    writer, other = pair
    answered: dict[str, int] = {}
    half = asyncio.Event()
    clients = [Client(urls(pair)) for _ in range(CLIENTS)]
    async with asyncio.timeout(120):
        await asyncio.gather(*(each.__aenter__() for each in clients))
        asking = [asyncio.create_task(ask_many(each, answered, half)) for each in clients]
        await half.wait()
        os.kill(writer.process.pid, how)
        await asyncio.gather(*asking)
        await asyncio.gather(*(each.close() for each in clients))
    assert len(answered) == CLIENTS * LEASES
    async with Client(other.ready["ws"]) as client:
        there = {each.id: each.fencing async for each in client.leases()}
    assert there == answered, "grants and answers are not the same"
    assert len({*there.values()}) == len(there)


async def test_what_waits_is_served_by_the_next_writer_in_its_order(pair: tuple[One, One]) -> None:
    writer, _ = pair

    async def wait(client: Client) -> int:
        terms = {"ttl_seconds": 600, "wait_seconds": 120}
        lease = (await client.ask(FIRST_FIT, resources={"gpus": 8}, lease=terms)).lease
        assert lease is not None
        await client.release(lease.id, lease.token)
        return lease.fencing

    async with asyncio.timeout(120), Client(urls(pair)) as client:
        held = [
            (await client.ask(FIRST_FIT, resources={"gpus": 8}, lease={"ttl_seconds": 600})).lease
            for _ in range(2)
        ]
        waiting = []
        for number in range(6):
            waiting.append(asyncio.create_task(wait(client)))
            while len([each async for each in client.queue()]) != number + 1:
                pass
        os.kill(writer.process.pid, signal.SIGKILL)
        for lease in held:
            assert lease is not None
            await client.release(lease.id, lease.token)
        fencing = await asyncio.gather(*waiting)
        assert fencing == sorted(fencing)


async def test_news_and_renewals_go_on(pair: tuple[One, One]) -> None:
    writer, other = pair
    client = Client(urls(pair))
    async with asyncio.timeout(120), client:
        news = await client.begin_watch("leases")
        async with client.lease(FIRST_FIT, resources={"gpus": 1}, ttl_seconds=4) as held:
            os.kill(writer.process.pid, signal.SIGKILL)
            assert "reconnected" in [each async for each in names_until(news, "reconnected")]
            assert [each async for each in names_until(news, "renewed")]
            held.check()
        assert [each async for each in names_until(news, "ended")]
        await news.close()
    assert other.server.held() == []


async def names_until(news: Watch, last: str) -> AsyncGenerator[str, None]:
    """Yield the names of news up to the one that is named."""
    while (event := await news.next()) is not None:
        yield event.event
        if event.event == last:
            return


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_line_runs_on(pair: tuple[One, One], how: signal.Signals) -> None:
    writer, _ = pair
    environment = {**os.environ, "MOORAGE_URL": urls(pair), "MOORAGE_HTTP_URL": urls(pair, "http")}
    done = subprocess.run(
        [MOORAGE, "ask", FIRST_FIT, "--gpus", "1", "--ttl", "60", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lease = json.loads(done.stdout)["lease"]["id"]
    os.kill(writer.process.pid, how)
    for command in (["renew", lease], ["policy", "list"], ["leases"], ["release", lease]):
        done = subprocess.run(
            [MOORAGE, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_on_a_machine_with_an_agent_runs_through(
    pair: tuple[One, One], storage: str, tmp_path: Path, how: signal.Signals
) -> None:
    writer, other = pair
    made = moored("agent", "token", "--cluster", "lab", MOORAGE_STORAGE=storage)
    place = ["--server", urls(pair), "--data", str(tmp_path / "box"), "--name", "box"]
    agent = [sys.executable, "-P", "-m", "moorage", "agent", *place, "--no-machine-id"]
    command = [*agent, "--token", made.stdout.strip()]
    with child(command, tmp_path / "box.log", serve_variables()) as (_, ready):
        assert ready["node_id"] == "box"
        run = ["run", "--policy", FIRST_FIT, "--cluster", "lab", "--cpu-milli", "100", "--"]
        with subprocess.Popen(
            [MOORAGE, *run, "sh", "-c", COUNTING],
            env={**os.environ, "MOORAGE_URL": urls(pair)},
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            said = [running.stdout.readline()]
            os.kill(writer.process.pid, how)
            said += running.stdout
        assert running.returncode == 3
        assert [each.strip() for each in said] == [*map(str, range(1, 41)), "whole"]
    assert other.server.held() == []

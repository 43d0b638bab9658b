"""Tests of clients while one of two servers on a PostgreSQL takes over."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import COUNTED, COUNTING
from served import FIRST_FIT, MOORAGE, invoke, until
from test_takeover import One, two

from moorage.testing.daemon_process import child, serve_variables
from moorage_client import Client, Lease
from moorage_client.watching import Watch

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]


@pytest.fixture
def storage(postgres) -> str:
    return postgres.database()


@pytest.fixture
def pair(storage: str, tmp_path: Path) -> Iterator[tuple[One, One]]:
    with two(tmp_path, storage, MOORAGE_BACKENDS="local,memory") as servers:
        yield servers


def urls(pair: tuple[One, One], side: str = "ws") -> str:
    return ",".join(each.ready[side] for each in pair)


async def grant(client: Client, wait_seconds: float = 0.0, **resources: int) -> Lease:
    terms = {"ttl_seconds": 600, "wait_seconds": wait_seconds}
    lease = (await client.ask(FIRST_FIT, resources=resources, lease=terms)).lease
    assert lease is not None
    return lease


async def names_until(news: Watch, last: str) -> list[str]:
    """Return the names of news up to a given name."""
    names = [""]
    while names[-1] != last and (event := await news.next()) is not None:
        names.append(event.event)
    return names


async def test_waiters_keep_their_order_and_news_and_renewals_continue_after_a_takeover(
    pair: tuple[One, One],
):
    writer, other = pair

    async def wait(client: Client) -> int:
        lease = await grant(client, 120, gpus=8)
        await client.release(lease.id, lease.token)
        return lease.fencing

    client = Client(urls(pair))
    async with asyncio.timeout(120), client:
        held = [await grant(client, gpus=8) for _ in range(2)]
        waiting = []
        for number in range(6):
            waiting.append(asyncio.create_task(wait(client)))
            while len([each async for each in client.queue()]) != number + 1:
                pass
        news = await client.begin_watch("leases")
        async with client.lease(FIRST_FIT, resources={"cpu_milli": 1}, ttl_seconds=4) as short:
            os.kill(writer.process.pid, signal.SIGKILL)
            assert "reconnected" in await names_until(news, "reconnected")
            assert "renewed" in await names_until(news, "renewed")
            short.check()
        assert "ended" in await names_until(news, "ended")
        await news.close()
        for lease in held:
            await client.release(lease.id, lease.token)
        fencing = await asyncio.gather(*waiting)
        assert fencing == sorted(fencing)
    assert other.server.held() == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_commands_and_workloads_of_agents_continue_after_a_takeover(pair, storage, tmp_path, how):
    writer, other = pair
    own = {"MOORAGE_URL": urls(pair), "MOORAGE_HTTP_URL": urls(pair, "http")}
    ask = ("ask", FIRST_FIT, "--gpus", "1", "--ttl", "60", "--json")
    lease = json.loads(writer.server.moorage(*ask, **own).stdout)["lease"]["id"]
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "none")}  # As a user who has run no server.
    made = invoke("agent", "token", "--cluster", "lab", MOORAGE_STORAGE=storage, **elsewhere)
    assert made.returncode == 0, made.stderr
    standby_first = urls((other, writer))  # The standby names the leader.
    place = ["--server", standby_first, "--data", str(tmp_path / "box"), "--name", "box"]
    agent = [sys.executable, "-P", "-m", "moorage", "agent", *place, "--no-machine-id"]
    command = [*agent, "--token", made.stdout.strip()]
    with child(command, tmp_path / "box.log", serve_variables()) as (_, ready):
        assert ready["node_id"] == "box"
        run = ["run", "--policy", FIRST_FIT, "--cluster", "lab", "--cpu-milli", "100", "--"]
        go = tmp_path / "go"
        with subprocess.Popen(
            [MOORAGE, *run, "sh", "-c", COUNTING.format(go=go)],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            lines = [running.stdout.readline()]
            os.kill(writer.process.pid, how)
            for words in (["renew", lease], ["policy", "list"], ["leases"], ["release", lease]):
                done = writer.server.moorage(*words, **own)
                assert done.returncode == 0, (words, done.stderr)
            go.touch()
            lines += running.stdout
        assert ("".join(lines), running.returncode) == COUNTED
    until(lambda: other.server.held() == [])

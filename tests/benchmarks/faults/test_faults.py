"""After a short run of injected faults, all answers that clients received are still true."""

import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]
pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from benchmarks.faults.__main__ import NEMESES  # noqa: E402  # After the skip.
from benchmarks.faults.servers import SKEWED_CLOCK, ServerPair  # noqa: E402  # As above.

COUNTS = (
    "--kills 1 --frozen 1 --partitions 1 --planned 1 --ended 1 --restarts 1 --promoted 1 "
    "--cut-off 1 --skewed 1 --pooled 1"
)


async def report(*words: str) -> dict[str, Any]:
    """Run the command, and return its report, which must list no wrong answer."""
    command = [sys.executable, "-m", "benchmarks.faults", "--json", *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(600):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(output)
    assert [each for each in found["violations"].values() if each] == []
    return found


FULL = ("server's disk full", "database's disk full")


async def test_answers_to_clients_stay_true_during_faults():
    found = await report(*COUNTS.split(), "--full", "0", "--full-database", "0")
    assert found["pauses"].keys() == NEMESES.keys() - {*FULL}
    assert found["grants_in_the_ledger"] >= found["grants"] > 0
    assert found["servers_that_led"] >= 6


async def test_answers_to_clients_stay_true_on_a_full_disk():
    if os.getuid():
        pytest.skip("only root can make a small disk")
    none = [word for word in COUNTS.split() if word != "1"]
    others = [word for option in none for word in (option, "0")]
    found = await report(*others, "--full", "1", "--full-database", "1")
    assert found["pauses"].keys() == {*FULL}


async def test_a_run_uses_given_servers_and_a_given_fault(postgres, tmp_path: Path):
    pair = ServerPair(tmp_path, postgres, random.Random(1))
    async with asyncio.timeout(300), pair.running():
        leader, _ = await pair.roles()
        assert leader.process is not None
        fault = f"kill -9 {leader.process.pid}"
        found = await report("--url", pair.urls, "--fault", fault)
    assert found["pauses"][fault]["times"] == 1
    assert found["servers_that_led"] >= 2


def test_the_skewed_clock_sets_the_calendar_and_leaves_the_monotonic_clock(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("d", -3_600.0))
    variables = {"PYTHONPATH": str(SKEWED_CLOCK), "SKEWED_CLOCK": str(clock)}
    command = [sys.executable, "-P", "-c", "import time; print(time.time(), time.monotonic())"]
    before = time.monotonic()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    calendar, monotonic = map(float, done.stdout.split())
    assert 3_000 < time.time() - calendar < 3_601
    assert before < monotonic < time.monotonic()


async def test_the_fault_run_refuses_the_option_url_without_the_option_fault():
    command = [sys.executable, "-m", "benchmarks.faults", "--url", "ws://127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert "pass --url and --fault together" in errors.decode()

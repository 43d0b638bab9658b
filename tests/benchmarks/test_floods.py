"""A server that one tenant floods for some seconds refuses no other tenant, and leaks nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from benchmarks import floods
from benchmarks.flood_attacks import ATTACKS
from moorage.testing.daemon_process import Running, daemon

SECONDS = 2.0
PREPARING_SECONDS = 6.0
"""Duration of attacks that need preparation, which takes seconds on a busy machine."""
PREPARED = {"alternatives", "log_readers", "recalled_fleets", "waiters"}


def play(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks", "floods", "--json", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("floods")
    with daemon(folder, environment=floods.VARIABLES) as running:
        floods._fill(running)
        yield running, folder


async def flood(attack: str, running: Running, folder: Path) -> tuple[floods._Phase, dict, int]:
    bystander = floods._Bystander(running)
    await bystander.connect()
    try:
        seconds = PREPARING_SECONDS if attack in PREPARED else SECONDS
        during, attacker, _ = await floods._attack(attack, seconds, running, bystander)
        if not attacker["sent"]:  # On a busy machine, preparation took all the time.
            seconds *= 10
            during, attacker, _ = await floods._attack(attack, seconds, running, bystander)
    finally:
        await bystander.close()
    return during, attacker, await floods._workloads(folder)


@pytest.mark.heavy
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_flood_by_one_tenant_causes_no_refusal_of_another_tenant(attack: str, server) -> None:
    during, attacker, left = uvloop.run(flood(attack, *server))
    assert during.asks
    assert during.refused == []
    assert attacker["sent"] > 0
    assert left == 0


@pytest.mark.heavy
def test_the_command_gives_a_row_for_an_attack() -> None:
    done = play("--attack", "queries", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["floods"]["attacks"]
    assert (row["attack"], row["refused"], row["refusals"]) == ("queries", 0, [])
    assert (row["asks"] > 0, row["workloads_left"]) == (True, 0)


def test_an_unknown_attack_is_refused() -> None:
    done = play("--attack", "rain")
    assert done.returncode == 1
    assert "there is no attack rain; there are short_leases, endless_policies" in done.stderr

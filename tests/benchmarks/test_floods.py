"""One tenant at full force for some seconds: another is refused nothing, and nothing is left."""

import json
import subprocess
import sys

import pytest

from benchmarks.flood_attacks import ATTACKS


def flooded(*words: str) -> dict:
    """Play the command as its users do."""
    command = [sys.executable, "-m", "benchmarks", "floods", "--json", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["floods"]


@pytest.mark.heavy
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_flood_of_one_tenant_has_nothing_of_another_refused(attack: str) -> None:
    (row,) = flooded("--attack", attack, "--seconds", "3")["attacks"]
    assert row["attack"] == attack
    assert (row["refused"], row["refusals"]) == (0, [])
    assert row["asks"] > 0
    assert row["sent"] > 0
    assert row["workloads_left"] == 0


def test_an_attack_that_there_is_not_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "floods", "--attack", "rain"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "there is no attack rain; there are short_leases, endless_policies" in done.stderr

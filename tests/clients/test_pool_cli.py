"""`moorage pool` on the command line, against a pool that is served."""

import json
import os
import subprocess

import pytest

from moorage_client.pool import ResourcePoolAdapter
from tests.clients.pools import MOORAGE, comes_back, refusal, serving

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    where = f"uds:{tmp_path_factory.mktemp('pool')}/pool.sock"
    options = ("-r", "gpu=2", "-r", "cpus=1", "-r", "slots_per_gpu=2", "--slots-per", "cpus=2")
    with serving("--address", where, *options, "--oversubscribe", "cpus=2") as (served, _):
        assert served == where
        yield where


@pytest.fixture
def moorage(address, shell):
    """Run `moorage pool …` within this process."""
    shell.environment["MOORAGE_POOL_ADDRESS"] = address
    return lambda *arguments: shell("pool", *arguments)


def test_checkout_show_and_checkin_print_text(moorage):
    taken = moorage("checkout", "gpus=1x2", "cpus=2x0.5", "--ttl", "600")
    assert taken.returncode == 0, taken.stderr
    kinds = [line.split() for line in taken.stdout.splitlines()]
    assert kinds[:2] == [["gpus", "0"], ["cpus", "0,0"]]
    transaction = kinds[2][1]
    shown = moorage("show").stdout
    assert transaction in shown
    assert f"process {os.getppid()}" in shown
    state = json.loads(moorage("show", "--json").stdout)
    assert state["slots_per_resource_type"] == {"cpus": 4, "gpus": 4}
    assert state["resources"]["gpus"] == [{"id": "0", "slots": 0}, {"id": "1", "slots": 2}]
    assert [each["transaction"] for each in state["holdings"]] == [transaction]
    assert moorage("checkin", transaction).returncode == 0
    again = moorage("checkin", transaction, "--json")
    assert again.returncode == 5
    assert json.loads(again.stdout)["error"]["code"] == "not_found"


def test_with_the_option_json_a_checkout_prints_a_document(moorage):
    taken = json.loads(moorage("checkout", "gpus", "--pid", str(os.getpid()), "--json").stdout)
    assert taken["resources"] == {"gpus": [{"id": "0", "slots": 1}]}
    given = json.loads(moorage("checkin", taken["transaction"], "--json").stdout)
    assert given == {"transaction": taken["transaction"], "checked_in": True}
    whole = json.loads(moorage("checkout", "gpus=2x2", "--json").stdout)
    refused = moorage("checkout", "gpus", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "no_capacity"
    moorage("checkin", whole["transaction"])


def test_a_checkout_without_a_process_is_shown_with_its_deadline(moorage):
    taken = json.loads(moorage("checkout", "gpus", "--pid", "0", "--ttl", "60", "--json").stdout)
    (holding,) = json.loads(moorage("show", "--json").stdout)["holdings"]
    assert holding["pid"] is None
    assert holding["expires_at"] == pytest.approx(holding["since"] + 60, abs=1)
    moorage("checkin", taken["transaction"])


@pytest.mark.parametrize(
    ("wanted", "exit_code", "said"),
    [
        ("gpus=3x2", 3, "requested 6, available 4"),
        ("apples", 3, "'apples'"),
        ("gpus --ttl nan", 3, "cannot be sent"),
        ("gpus=", 2, "expected TYPE"),
        ("gpus=1x", 2, "expected TYPE"),
        ("=3", 2, "expected TYPE"),
        ("gpus=99999999999", 2, "COUNT up to 10000"),
    ],
)
def test_each_kind_of_refused_checkout_has_its_own_exit_code(moorage, wanted, exit_code, said):
    done = moorage("checkout", *wanted.split())
    assert done.returncode == exit_code
    assert said in done.stdout + done.stderr


def test_the_end_of_a_shell_releases_its_slots(address):
    """The holder is the caller of the command, not the command itself."""
    script = f'"{MOORAGE}" pool checkout gpus=2x2 >&2; "{MOORAGE}" pool show --json; true'
    environment = {**os.environ, "MOORAGE_POOL_ADDRESS": address}
    ran = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    seen = json.loads(ran.stdout)
    assert [row["slots"] for row in seen["resources"]["gpus"]] == [0, 0]
    assert comes_back(ResourcePoolAdapter(address), 4)


def test_the_error_for_an_address_without_a_server_names_a_remedy(shell, tmp_path):
    done = shell("pool", "show", "--address", f"uds:{tmp_path}/none")
    assert done.returncode == 4
    assert "moorage pool serve" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--address nowhere", "expected uds:PATH"),
        ("--address tcp:10.1.2.3:80", "loopback"),
        ("--resource-pool-file missing.yaml", "missing.yaml"),
        ("-r gpus", "TYPE=N"),
        ("--oversubscribe apples=2", "apples"),
        ("--ttl 0", "--ttl"),
    ],
)
def test_a_pool_server_that_cannot_start_says_why(options, said):
    assert said in refusal(*options.split())

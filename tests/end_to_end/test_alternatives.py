"""Requests that would do with less, or with something else, from the socket to the lease."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from served import FIRST_FIT, ask_message, cluster, until
from websockets.sync.client import connect

from moorage.benchmarks.daemon_process import child, serve_command, serve_variables
from moorage.model import Demand
from moorage_client import BlockingClient, NeverFits
from moorage_policies import catalog


@pytest.fixture(scope="module")
def fleet(server):
    server.register(cluster("pair", nodes=2, gpus=4, model="L40"))
    yield server
    server.http.delete("/clusters/pair")


def asked(server, *sizes: int, **more) -> dict:
    first, *others = ({"gpus": number, "models": ["L40"]} for number in sizes)
    lease = {"ttl_seconds": 60, **more.pop("lease", {})}
    reply = server.ask(FIRST_FIT, resources=first, alternatives=others, lease=lease, **more)
    if "lease" in reply:
        server.leases = [*getattr(server, "leases", []), reply["lease"]]
    return reply


def test_the_reply_says_which_it_is(fleet):
    leases = [asked(fleet, 8, 4, 3, 1)["lease"] for _ in range(2)]
    assert [lease["choice"] for lease in leases] == [1, 1]
    error = asked(fleet, 8, 4, 3)["error"]
    assert error["code"] == "no_capacity"
    assert error["reason"].startswith("None of 3 alternatives will do: It does not fit now")
    (status,) = fleet.say({"op": "status", "lease": leases[0]["id"]})
    assert status["lease"]["choice"] == 1
    never = asked(fleet, 16, 9, lease={"wait_seconds": 50})["error"]
    assert (never["code"], never["verdict"]) == ("never_fits", "never")
    assert "choice" not in asked(fleet, 1, lease={"wait_seconds": 0}).get("lease", {})


def test_the_policy_is_asked_about_the_one_that_is_decided(fleet):
    reply = asked(fleet, 8, 3, explain=True, dry_run=True)
    assert reply["data"]["gpus"] == ["0", "1", "2"]


def test_what_is_wrong_is_named(fleet):
    (reply,) = fleet.say(
        {
            "adhoc": True,
            "policy_rule_uri": FIRST_FIT,
            "inputs": {},
            "alternatives": [{"gpus": 1}],
        },
    )
    assert reply["error"]["code"] == "bad_message"
    assert "`resources` beside `alternatives`" in reply["error"]["reason"]
    error = fleet.ask(resources={"gpus": 2}, alternatives=[{"gpus": 1}, {"gpus": -1}])["error"]
    assert error["field"] == "alternatives[1].gpus"
    error = fleet.ask(resources={"gpus": 2}, alternatives=[{"gpus": 1}] * 8)["error"]
    assert (error["field"], "at most 7" in error["reason"]) == ("alternatives", True)


def test_the_command_line_and_over_http(fleet, tmp_path):
    variables = {
        **os.environ,
        "MOORAGE_URL": fleet.running.ws,
        "MOORAGE_HTTP_URL": fleet.running.http,
        "MOORAGE_STATE": str(tmp_path / "leases.json"),
    }
    program = [Path(sys.executable).with_name("moorage"), "ask", FIRST_FIT, "--lease"]
    flags = ["--gpus", "8", "--model", "L40", "--or", '{"gpus": 2}', "--or", '{"gpus": 1}']
    done = subprocess.run(
        [*program, *flags],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "pair/pair-0 gpus 0,1" in done.stdout
    assert "alternative 1 of those given with --or" in done.stderr
    with pytest.raises(subprocess.CalledProcessError) as wrong:
        subprocess.run(
            [*program, "--or", "4"], env=variables, capture_output=True, check=True, timeout=60
        )
    assert wrong.value.returncode == 2
    assert b"--or: expected a JSON object" in wrong.value.stderr
    body = {"policy_rule_uri": FIRST_FIT, "inputs": {}, "lease": {"ttl_seconds": 60}}
    body |= {"resources": {"gpus": 8, "models": ["L40"]}, "alternatives": [{"gpus": 1}]}
    lease = httpx.post(f"{fleet.running.http}/allocate", json=body, timeout=60).json()["lease"]
    assert lease["choice"] == 1


@pytest.mark.heavy
def test_a_waiter_with_alternatives_outlasts_a_kill(tmp_path: Path) -> None:
    command, log = serve_command(tmp_path / "data"), tmp_path / "stderr.log"
    terms = {"ttl_seconds": 300.0, "wait_seconds": 300.0, "idempotency_key": "elastic"}
    wants = {"resources": {"gpus": 4}, "alternatives": [{"gpus": 3}, {"gpus": 2}], "lease": terms}
    with child(command, log, serve_variables()) as (process, ready):
        document = cluster("one", nodes=1, gpus=4)
        httpx.post(f"{ready['http']}/clusters", json=document, timeout=60).raise_for_status()
        rule = catalog.document("first_fit")
        httpx.post(f"{ready['http']}/policy", json=rule, timeout=60).raise_for_status()
        with BlockingClient(ready["ws"]) as client, connect(ready["ws"]) as waiting:
            big = client.ask(FIRST_FIT, resources={"gpus": 3}, lease={"ttl_seconds": 300.0}).lease
            assert big is not None
            some = [Demand(gpus=9), {"gpus": 8}]
            with pytest.raises(NeverFits):
                client.ask(FIRST_FIT, resources=some[0], alternatives=some[1:])
            waiting.send(json.dumps(ask_message(FIRST_FIT, **wants)))
            until(client.queue)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with (
        child(command, log, serve_variables()) as (_, ready),
        BlockingClient(ready["ws"]) as client,
    ):
        (row,) = client.queue()
        assert [each["gpus"] for each in row["alternatives"]] == [4, 3, 2]
        client.release(big.id, big.token)
        lease = client.ask(FIRST_FIT, **wants).lease
        assert lease is not None
        assert lease.choice == 0

"""Starting, stopping, being killed: what was acknowledged stays, whatever happens."""

import ipaddress
import json
import os
import random
import resource
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from served import Server, ask_message, cluster, heard, moored, ran, serving, tell, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import child, daemon, serve_command

pytestmark = pytest.mark.heavy  # Many daemons.

LEASE = {"ttl_seconds": 3_600}
KILLS = 12


def leases(server: Server) -> list[dict]:
    found, after = [], ""
    while True:
        page = server.say({"op": "leases", "after": after, "limit": 1000})[0]["data"]
        found += page["leases"]
        if page["next"] is None:
            return found
        after = page["next"]


def test_a_clean_stop_closes_with_1012_and_says_nothing(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=40, gpus=8))
        kept = server.ask(resources={"gpus": 1}, lease=LEASE)["lease"]
        with connect(server.running.ws) as socket:
            socket.send(json.dumps(ask_message(resources={"gpus": 1})))
            socket.recv(30)
            os.kill(server.pid, signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(30)
        assert closed.value.rcvd.code == 1012
    # The block above fails where the exit code is not 0.
    with serving(tmp_path) as server:
        assert [lease["id"] for lease in leases(server)] == [kept["id"]]
        renewed = server.say({"op": "renew", "lease": kept["id"], "token": kept["token"]})[0]
        assert renewed["lease"]["expires_at"] >= kept["expires_at"]
        assert server.log() == ""


def test_a_stop_answers_what_waits_over_http(tmp_path):
    with daemon(tmp_path) as running, Server(running).http as http:
        server = Server(running)
        server.fill(cluster("east", nodes=1, gpus=1))
        wait = ask_message(
            resources={"gpus": 1}, lease={"ttl_seconds": 60, "wait_seconds": 60}, id=7
        )
        server.ask(resources={"gpus": 1}, lease=LEASE)
        replies: list[dict] = []
        caller = threading.Thread(
            target=lambda: replies.append(http.post("/allocate", json=wait).json())
        )
        caller.start()
        until(server.waiting)
        os.kill(running.pid, signal.SIGTERM)
        caller.join(30)
        assert replies[0]["error"]["code"] == "shutting_down"
        assert replies[0]["id"] == 7
        server.close()


def test_a_second_daemon_on_the_same_data_is_told_who_has_it(tmp_path):
    with (
        daemon(tmp_path) as running,
        pytest.raises(CommandError, match=rf"process {running.pid}"),
        daemon(tmp_path),
    ):
        pass


def test_a_damaged_catalog_is_named_and_nothing_is_served(tmp_path):
    (tmp_path / "catalog.db").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(CommandError, match=r"cannot start: .*catalog\.db"), daemon(tmp_path):
        pass


def test_a_ledger_that_fails_while_the_daemon_starts_ends_it(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=40, gpus=8))
        ask = ask_message(resources={"gpus": 1, "gpu_milli": 10}, lease={"ttl_seconds": 10})
        for _ in range(8):
            assert all(reply["success"] for reply in server.say(*[ask] * 100))
    # The restart wants to give 800 leases their grace, and there is room for its first pages only.
    command = ["/bin/sh", "-c", 'ulimit -f 128; exec "$@"', "sh", *serve_command(tmp_path)]
    done = ran(*command)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "moored: cannot start: the ledger" in done.stderr


def test_a_daemon_may_open_more_files_than_a_shell_allows(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1] - 1, usual[1]))
    try:
        with daemon(tmp_path) as running:
            limits = Path(f"/proc/{running.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(usual[1])] * 2


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_daemon_without_standard_streams_serves_and_stops(tmp_path, closed):
    command = f'"$@" {closed} & echo $! >"{tmp_path}/pid"; wait $!; echo $? >"{tmp_path}/code"'
    words = ["/bin/sh", "-c", command, "sh", *serve_command(tmp_path / "data")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shell:
        ledger = tmp_path / "data" / "ledger.db-wal"
        until(ledger.exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        shell.wait(30)
    assert (tmp_path / "code").read_text() == "0\n"


def test_an_open_address_needs_tokens(tmp_path):
    everywhere = str(ipaddress.IPv4Address(0))
    done = moored("serve", "--host", everywhere, "--data", tmp_path)
    assert done.returncode == 2
    assert "moored token create" in done.stderr


def hammer(url: str, acknowledged: list[dict], stop: threading.Event, number: int) -> None:
    """Ask and release as fast as answers come, until the server dies."""
    rng = random.Random(number)
    mine: list[dict] = []
    try:
        with connect(url, compression=None) as socket:
            while not stop.is_set():
                if mine and rng.random() < 0.4:
                    lease = mine.pop(rng.randrange(len(mine)))
                    release = {"op": "release", "lease": lease["id"], "token": lease["token"]}
                    lease["maybe_over"] = True
                    socket.send(json.dumps(release))
                    if heard(socket)["success"]:
                        lease["over"] = True
                else:
                    reply = tell(socket, ask_message(resources={"gpus": 1}, lease=LEASE))
                    if reply["success"]:
                        acknowledged.append(reply["lease"])
                        mine.append(reply["lease"])
    except (ConnectionClosed, OSError, TimeoutError):
        return


def test_kill_9_loses_no_acknowledged_lease(tmp_path):
    rng = random.Random(12)
    acknowledged: list[dict] = []
    environment = {**os.environ, "MOORAGE_CHECKPOINT_EVERY_FACTS": "200"}
    for turn in range(KILLS + 1):
        log = tmp_path / f"{turn}.log"
        with child(serve_command(tmp_path / "data"), log, environment) as (process, ready):
            server = Server(type("Running", (), ready))
            if not turn:
                server.fill(
                    cluster("east", nodes=200, gpus=8)
                )  # Room for all, also where a kill keeps all of them.
            check(leases(server), acknowledged)
            stop = threading.Event()
            threads = [
                threading.Thread(target=hammer, args=(ready["ws"], acknowledged, stop, number))
                for number in range(6)
            ]
            for thread in threads:
                thread.start()
            moment = len(acknowledged) + rng.randint(20, 200)
            until(lambda moment=moment: len(acknowledged) >= moment)
            process.kill()
            process.wait()
            stop.set()
            for thread in threads:
                thread.join()
            server.close()


def check(found: list[dict], acknowledged: list[dict]) -> None:
    by_id = {lease["id"]: lease for lease in found}
    for lease in acknowledged:
        if lease.get("over"):
            assert lease["id"] not in by_id, "a released lease came back"
        elif not lease.get("maybe_over"):
            assert by_id[lease["id"]]["placement"] == lease["placement"], "a lease was lost"
            assert by_id[lease["id"]]["fencing"] == lease["fencing"]
    held = [
        (share["node_id"], gpu)
        for lease in found
        for share in lease["placement"]
        for gpu in share["gpus"]
    ]
    assert len(held) == len(set(held)), "a GPU is promised twice"
    numbers = [lease["fencing"] for lease in acknowledged]
    assert len(numbers) == len(set(numbers)), "a fencing number came twice"


def test_a_killed_zygote_costs_no_answer(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=40, gpus=8))
        assert server.ask(resources={"gpus": 1})["success"]
        (zygote,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(zygote), signal.SIGKILL)
        assert server.ask(resources={"gpus": 1})["success"]
        # A warm cell may have answered while the next zygote still starts.
        until(lambda: server.http.get("/readyz").status_code == 200)


@pytest.mark.skipif(os.getuid() == 0, reason="root may look into every process")
def test_no_other_looks_into_a_daemon(tmp_path):
    with daemon(tmp_path) as running, pytest.raises(PermissionError):
        Path(f"/proc/{running.pid}/environ").read_bytes()

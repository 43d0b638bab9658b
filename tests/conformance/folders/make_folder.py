"""Make a small data folder with objects of each kind, with the installed release.

    python tests/conformance/folders/make_folder.py NAME     # writes NAME.tar.gz and NAME.json

Run it with the code of a release: later releases are tested with this release's folder.
"""

import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "end_to_end"), str(HERE.parents[1] / "web")]

from served import Server, cluster, policy, until  # noqa: E402  # After the line above.

from moorage.testing.daemon_process import (  # noqa: E402  # After the line above.
    child,
    daemon,
    serve_command,
    serve_variables,
)
from moorage_policies import catalog  # noqa: E402  # After the line above.

WEEK = 604_800
COUNTS = "context['asked'] = context.get('asked', 0) + 1\nreturn {'declined': True}"
VARIABLES = {
    "MOORAGE_CHECKPOINT_EVERY_FACTS": "100",
    "MOORAGE_TOKENS": "ann:ann-secret,bob:bob-secret,ops:ops-secret",
    "MOORAGE_OPERATORS": "ops",
    "MOORAGE_BACKENDS": "memory",
    "MOORAGE_LEASE_TTL_SECONDS_MAX": str(WEEK),
    "MOORAGE_KEEP_WARM_SECONDS_MAX": str(WEEK),
}
ANN, BOB, OPS = ({"Authorization": f"Bearer {name}-secret"} for name in ("ann", "bob", "ops"))


def say(server: Server, who: dict[str, str], **message: Any) -> dict[str, Any]:
    with server.socket(who) as socket:
        socket.send(json.dumps(message))
        reply = json.loads(socket.recv(30))
    assert reply["success"], reply
    return reply


def ask(server: Server, who: dict[str, str], gpus: int, **more: Any) -> dict[str, Any]:
    lease = {"ttl_seconds": WEEK, **more.pop("lease", {})}
    message = {"adhoc": True, "policy_rule_uri": "first_fit", "inputs": {}}
    return say(server, who, **message, resources={"gpus": gpus}, lease=lease, **more)["lease"]


def end_lease(server: Server, who: dict[str, str], lease: dict[str, Any], **more: Any) -> None:
    say(server, who, op="release", lease=lease["id"], token=lease["token"], **more)


def fill(server: Server) -> None:
    server.http.headers.update(OPS)
    server.register(cluster("east", nodes=3), cluster("west", model="H100"), cluster("gone"))
    server.http.delete("/clusters/gone").raise_for_status()
    document = catalog.document("first_fit")
    server.publish(
        document, policy(COUNTS, "counts:1.0-stable"), policy("return {}", "counts:2.0-stable")
    )
    for alias, uri in (
        ("first_fit", document["policy_rule_uri"]),
        ("counts", "counts:1.0-stable"),
        ("counts", "counts:2.0-stable"),
        ("counts", "counts:1.0-stable"),
    ):
        body = {"policy_rule_uri": uri}
        server.http.post(f"/policy-alias/{alias}/activate", json=body).raise_for_status()
    observed = {"clusterId": "east", "load": 0.5}
    server.http.post("/cluster", json=observed).raise_for_status()
    server.http.post("/blocks", json={"id": "block-1", "cluster_id": "east"}).raise_for_status()
    say(server, OPS, op="set_quota", tenant="ann", weight=2.0, nominal={"gpu_milli": 12_000})
    say(server, OPS, op="set_quota", tenant="*", nominal={"gpu_milli": 16_000})
    say(server, OPS, op="cordon", cluster="west", node="west-1", reason="a fan is broken")
    start = time.time() + WEEK
    reserved = {"resources": {"gpus": 4}, "starts_at": start, "ends_at": start + WEEK}
    say(server, OPS, op="reserve", tenant="bob", **reserved)
    for _ in range(20):  # Enough for a checkpoint, and history before it.
        end_lease(server, ANN, ask(server, ANN, 1))


def hold(server: Server) -> None:
    started = {"provision": {"backend": "memory", "spec": {}, "keep_warm_seconds": WEEK}}
    for who in (ANN, BOB):
        ask(server, who, 1)
        ask(server, who, 2, **started)
    with server.socket(ANN) as socket:
        socket.send(json.dumps({"adhoc": True, "policy_rule_uri": "counts", "inputs": {}}))
        socket.recv(30)
    warm = ask(server, BOB, 1, **started)
    until(lambda: state_of(server, BOB, warm) == "active")
    end_lease(server, BOB, warm)
    until(lambda: state_of(server, BOB, warm) == "warm")
    end_lease(server, ANN, ask(server, ANN, 1))


def state_of(server: Server, who: dict[str, str], lease: dict[str, Any]) -> str:
    return say(server, who, op="status", lease=lease["id"])["lease"]["state"]


def describe(server: Server) -> dict[str, Any]:
    """Return the leases, waiters, policies and clusters that the server reports."""
    wanted = ("id", "state", "tenant", "fencing", "placement", "policy_rule_uri")
    leases = say(server, OPS, op="leases", limit=1000)["data"]["leases"]
    policies = server.http.get("/policy").json()["data"]
    aliases = server.http.get("/policy-alias").json()["data"]
    clusters = server.http.post("/clusters/query", json={}).json()
    return {
        "leases": [{name: each[name] for name in wanted} for each in leases],
        "waiters": {
            each["request"]: each["tenant"]
            for each in say(server, OPS, op="queue")["data"]["waiting"]
        },
        "clusters": clusters,
        "policies": {each["policy_rule_uri"]: each["digest"] for each in policies},
        "aliases": {each["alias"]: each["policy_rule_uri"] for each in aliases},
        "quotas": {
            each["tenant"]: each["quota"]
            for each in say(server, OPS, op="quotas")["data"]["quotas"]
        },
        "reservations": say(server, OPS, op="reservations")["data"]["reservations"],
        "cordons": {"west/west-1": "a fan is broken"},
    }


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with daemon(data, environment=VARIABLES) as running:
            server = Server(running)
            fill(server)
            server.close()
        variables = {**serve_variables(), **VARIABLES}
        with child(serve_command(data), Path(folder) / "log", variables) as (process, ready):
            server = Server(type("Running", (), ready))
            server.http.headers.update(OPS)
            hold(server)
            with server.socket(ANN) as one, server.socket(BOB) as other:
                for socket in (one, other):
                    wanted = {"resources": {"gpus": 4, "nodes": 3}, "policy_rule_uri": "first_fit"}
                    terms = {"ttl_seconds": WEEK, "wait_seconds": WEEK}
                    socket.send(json.dumps({"adhoc": True, "inputs": {}, **wanted, "lease": terms}))
                until(lambda: len(say(server, OPS, op="queue")["data"]["waiting"]) > 1)
                time.sleep(2)  # Contexts are stored once a second.
                held = describe(server)
            os.kill(process.pid, signal.SIGKILL)  # Leaves both files' logs in use.
            process.wait()
            server.close()
        (HERE / f"{name}.json").write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
        with tarfile.open(HERE / f"{name}.tar.gz", "w:gz") as packed:
            for file in sorted(data.iterdir()):
                if file.suffix not in {".lock", ".reserve"} and file.is_file():
                    packed.add(file, file.name)


if __name__ == "__main__":
    main(sys.argv[1])

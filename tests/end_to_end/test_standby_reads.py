"""A standby gives the same answers as the leader to requests that only read."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import FIRST_FIT, Server, ask_message, cluster, read_message, tell, until
from test_takeover import HOUR, One, grant, leadership, one, read, two, wait_exit, wait_sync

from moorage_client import Client, Services
from moorage_policies import catalog

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

STAMPS = ("revision", "as_of", "leader")


@pytest.fixture(scope="module")
def storage(postgres) -> str:
    return postgres.database()


@pytest.fixture(scope="module")
def servers(storage: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[One, One]]:
    with two(tmp_path_factory.mktemp("servers"), storage) as servers:
        yield servers


@pytest.fixture
def pair(servers: tuple[One, One]) -> Iterator[tuple[One, One]]:
    """A leader, and a standby that has applied all its facts."""
    first = servers[0].server
    wait_sync(servers)
    yield servers
    for lease in first.leases:
        first.release(lease)
    first.leases.clear()


def bare(reply: dict) -> dict:
    return {name: value for name, value in reply.items() if name not in STAMPS}


def test_standby_and_leader_answer_reads_equally_at_one_revision(pair: tuple[One, One]):
    (first, _, ready), (second, *_) = pair
    held = [grant(first) for _ in range(14)]
    first.release(held.pop())
    with first.socket() as waiting:
        for number in (1, 2):
            terms = {"resources": {"gpus": 8}, "lease": {**HOUR, "wait_seconds": 300}}
            waiting.send(json.dumps(ask_message(id=number, **terms)))
        until(lambda: len(first.waiting()) == 2)
        revision = wait_sync(pair)
        questions: list[dict[str, Any]] = [
            {"op": "fleet"},
            {"op": "fleet", "cluster": "east"},
            {"op": "leases"},
            {"op": "leases", "state": "ended"},
            {"op": "leases", "sort": "-granted_at", "limit": 5},
            {"op": "quotas"},
            {"op": "reservations"},
            {"op": "status", "lease": held[0]["id"]},
            {"op": "status", "lease": "none"},
            {"op": "decisions"},
        ]
        for question in questions:
            ours, theirs = read(first, **question), read(second, **question)
            assert bare(ours) == bare(theirs), question
            assert ours["revision"] == theirs["revision"] == revision, question
            assert "as_of" not in ours
            assert theirs["leader"] == ready["ws"]
            assert theirs["as_of"] > 0
        (*rows,) = (read(each, op="queue")["data"]["waiting"] for each in (first, second))
        for ours, theirs in zip(*rows, strict=True):
            assert ours.pop("expected_at") == pytest.approx(theirs.pop("expected_at"), abs=5)
            assert ours == theirs
        why = [read(each, op="why", lease=held[0]["id"])["data"] for each in (first, second)]
        assert why[1].items() <= why[0].items()
        assert read(second, op="why", request=rows[1][0]["request"])["success"]
        for row in rows[0]:
            assert read(first, op="cancel", request=row["request"])["success"]


def test_the_refusal_of_a_standby_names_the_leader(pair: tuple[One, One]):
    (first, _, ready), (second, _, standing) = pair
    assert "role" not in ready
    assert standing["role"] == "standby"
    lease = grant(first)
    leader = {"leader": ready["ws"], "leader_http": ready["http"]}
    refusal = leader | {"code": "not_leader"}
    for message in (
        ask_message(resources={"gpus": 1}, lease=HOUR),
        {"op": "release", "lease": lease["id"], "token": lease["token"]},
        {"op": "cordon", "cluster": "east"},
        {"op": "set_quota", "tenant": "ann"},
    ):
        error = read(second, **message)["error"]
        assert error | refusal == error, message
    for method, path in (
        ("POST", "/policy"),
        ("POST", "/clusters"),
        ("DELETE", "/clusters/east"),
        ("POST", "/allocate"),
        ("PUT", "/quotas/ann"),
        ("GET", "/policy/first_fit:1.0-stable/logs"),
    ):
        answer = second.http.request(method, path, json={} if method != "GET" else None)
        assert answer.status_code == 421, (path, answer.text)
        assert ready["http"] in answer.text, path
    error = second.http.post("/policy", json={}).json()["error"]
    assert error | refusal == error
    assert [each["id"] for each in first.held()] == [lease["id"]]
    assert second.http.get("/healthz").status_code == 200
    readiness = second.http.get("/readyz")
    assert readiness.status_code == 503
    details = readiness.json()["details"]
    assert details | {"role": "standby", **leader} == details


def test_a_read_from_a_standby_waits_for_the_callers_own_writes(pair: tuple[One, One]):
    (first, *_), (second, *_) = pair
    with second.socket() as asking, first.socket() as writing:
        for _ in range(10):
            granted = tell(writing, ask_message(resources={"gpus": 1}, lease=HOUR))
            least, name = granted["revision"], granted["lease"]["id"]
            status = tell(asking, {"op": "status", "lease": name, "min_revision": least})
            assert status["lease"]["id"] == name
            assert status["revision"] >= least
            assert tell(writing, {"op": "release", "lease": name})["revision"] > least
    posted = first.http.post("/allocate", json=ask_message(resources={"gpus": 1}, lease=HOUR))
    assert posted.json()["revision"] > granted["revision"]
    first.release(posted.json()["lease"])
    # The wait is bounded; after it the leader must answer, which knows all facts.
    ahead = {"op": "leases", "min_revision": granted["revision"] + 1_000}
    refused = read(second, **ahead)
    assert refused["error"]["code"] == "not_leader"
    assert "did not arrive within 5 s" in refused["message"]
    assert read(first, **ahead)["success"]


def test_a_standby_follows_changes_of_documents(pair: tuple[One, One]):
    (first, _, ready), (second, *_) = pair
    first.publish(catalog.document("best_fit"))
    first.http.put("/clusters/east", json={"tags": ["big"]}).raise_for_status()
    first.http.post("/cluster", json={"clusterId": "east", "load": 1}).raise_for_status()
    first.http.post("/blocks", json={"id": "b", "cluster": {"id": "east"}}).raise_for_status()
    history = "/policy/first_fit:1.0-stable/history"
    for path in ("/clusters/east", "/cluster/east", "/policy", "/blocks", history, "/quotas"):
        until(lambda path=path: body(second, path) == body(first, path))
    there = second.http.get("/policy")
    assert float(there.headers["moorage-as-of"]) > 0
    assert there.headers["moorage-leader"] == ready["http"]
    assert "moorage-as-of" not in first.http.get("/policy").headers
    ours, theirs = (each.http.post("/clusters/query", json={}) for each in (first, second))
    assert theirs.json() == ours.json()
    for path in ("/policy/best_fit:1.0-stable", "/blocks/b"):
        first.http.delete(path).raise_for_status()
        until(lambda path=path: second.http.get(path).status_code == 404)


def body(server: Server, path: str) -> Any:
    """Return the answer at a path, without the header that dates the answer."""
    answer = server.http.get(path).json()
    return bare(answer) if isinstance(answer, dict) else answer


def test_the_console_shows_data_of_a_standby(pair: tuple[One, One]):
    (first, *_), (second, *_) = pair
    page = second.http.get("/console")
    assert page.status_code == 200
    assert "<script" in page.text
    assert second.http.get("/console/session").status_code == 200
    history = [each.http.get("/history").json()["data"]["now"] for each in (first, second)]
    for name in ("models", "nodes", "leases", "tenants"):
        assert history[1][name] == history[0][name]
    metrics = second.http.get("/metrics").text
    assert "moorage_gpu_milli_total 16000.0" in metrics
    assert 'moorage_server_role{role="standby"} 1.0' in metrics
    assert 'moorage_server_role{role="writer"} 1.0' in first.http.get("/metrics").text
    revision = second.http.get("/readyz").json()["details"]["revision"]
    assert f"moorage_standby_revision {revision}.0" in second.http.get("/metrics").text
    with second.watching("map", "leases") as watching:
        assert read_message(watching)["event"] == "snapshot"
        lease = grant(first)
        seen = {read_message(watching)["event"] for _ in range(2)}
        assert seen == {"granted", "delta"}
        assert second.status(lease)["id"] == lease["id"]


def test_a_standby_survives_the_end_of_its_database_sessions(
    pair: tuple[One, One], postgres, storage: str
):
    (first, *_), (second, *_) = pair
    sessions = postgres.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = %s AND application_name LIKE %s",
        values=(storage.rpartition("/")[2], "moored%follower%"),
    )
    assert sessions[0][0] >= 2
    lease = grant(first)
    first.register(cluster("west", nodes=1, gpus=4))
    wait_sync(pair)
    assert second.status(lease)["id"] == lease["id"]
    until(lambda: second.http.get("/clusters/west").status_code == 200)
    first.http.delete("/clusters/west").raise_for_status()


def test_a_standby_stops_at_once(pair: tuple[One, One], storage: str, tmp_path: Path):
    def standbys() -> list[str]:
        return [each["ws"] for each in leadership(storage)["standbys"]]

    second = pair[1].ready["ws"]
    with one(tmp_path / "c", storage) as (third, process, ready):
        assert read(third, op="fleet")["success"], "it has loaded the state when it is ready"
        until(lambda: sorted(standbys()) == sorted([second, ready["ws"]]))
        process.send_signal(signal.SIGTERM)
        assert wait_exit(process) == 0
    assert standbys() == [second]


async def test_a_client_with_the_address_of_a_standby_reads_from_the_leader(pair: tuple[One, One]):
    (first, _, ready), (_, _, standing) = pair
    lease = grant(first)
    wait_sync(pair)
    async with Client(standing["ws"]) as client:
        assert [each.id async for each in client.leases()] == [lease["id"]]
        assert client.url == ready["ws"]
    with Services(standing["http"]) as documents:
        assert [each["policy_rule_uri"] for each in documents.policies()] == [FIRST_FIT]
        assert documents.url == ready["http"]


def test_a_command_with_the_address_of_a_standby_reads_from_the_leader(pair: tuple[One, One]):
    (first, *_), (second, *_) = pair
    lease = grant(first)
    wait_sync(pair)
    for words in (("fleet",), ("policy", "list"), ("status", lease["id"])):
        done = second.moorage(*words)
        assert done.returncode == 0, done.stderr

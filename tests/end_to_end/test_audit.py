"""The audit log of a server has caller, action and address of changes over both ports."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from served import FIRST_FIT, Server, bearing, cluster, invoke, kill, policy, serve_and_kill

from moorage.daemon.access.audit_files import AuditFiles
from moorage.records.audit import AuditEntry
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

TERMS = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 60}}
TOKENS = {"MOORAGE_TOKENS": "ann:a1-secret,ops:o1-secret", "MOORAGE_OPERATORS": "ops"}


def read(folder: Path, *options: str) -> list[dict]:
    lines = invoke("audit", "--json", *options, "--data", folder).stdout.splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The entries after actions of ann, who has no right to cordon, and of the operator ops."""
    folder = tmp_path_factory.mktemp("data")
    with daemon(folder, environment=TOKENS) as running:
        ann, ops = (Server(running, f"{each}1-secret") for each in "ao")
        ops.register(cluster("east"))
        ann.publish(catalog.document("first_fit"))
        for version in ("1.0", "1.1"):
            ann.publish(policy("return None", f"mine:{version}-stable"))
            means = {"policy_rule_uri": f"mine:{version}-stable"}
            ann.http.post("/policy-alias/mine:stable/activate", json=means).raise_for_status()
        canary = {"policy_rule_uri": "mine:1.0-stable", "percent": 10}
        ann.http.post("/policy-alias/mine:stable/canary", json=canary).raise_for_status()
        ann.http.put("/policy/mine:1.1-stable", json={"description": "new"}).raise_for_status()
        ann.http.delete("/policy-alias/mine:stable").raise_for_status()
        ops.http.put("/clusters/east", json={"reputation": 7}).raise_for_status()
        lease = ann.ask(FIRST_FIT, resources={"gpus": 2}, lease={"ttl_seconds": 60})["lease"]
        ann.release(lease)
        over_http = {"policy_rule_uri": FIRST_FIT, "inputs": {}, **TERMS}
        ann.http.post("/allocate", json=over_http).raise_for_status()
        ops.http.put("/quotas/bob", json={"weight": 2}).raise_for_status()
        ann.say({"op": "cordon", "cluster": "east"})
        ops.say({"op": "cordon", "cluster": "east", "reason": "new fans"})
        ops.say({"op": "uncordon", "cluster": "east"})
        ops.say({"op": "set_quota", "tenant": "ann", "nominal": {"gpu_milli": 1000}})
        ops.say({"op": "set_quota", "tenant": "ann", "nominal": {"gpu_milli": 3000}})
        big = ann.ask(FIRST_FIT, resources={"gpus": 4}, lease={"ttl_seconds": 60})
        assert big["error"]["code"] == "quota_exceeded"
        ann.http.put("/quotas/ann", json={"weight": 2})
        httpx.get(f"{running.http}/policy", headers=bearing("wrong"))
        page = {"Origin": running.http}
        httpx.post(f"{running.http}/console/session", json={"token": "wrong"}, headers=page)
        with pytest.raises(Exception, match="401"):
            ann.socket(bearer="wrong")
        ann.close()
        ops.close()
    assert invoke("audit", "verify", "--data", folder).returncode == 0
    return read(folder)


def entries_about(entries: list[dict], what: str) -> list[dict]:
    return [each for each in entries if each["what"] == what]


def test_starts_and_ends_of_servers_and_leases_are_logged(entries: list[dict]) -> None:
    (granted, over_http), (ended,) = (
        entries_about(entries, "lease.granted"),
        entries_about(entries, "lease.ended"),
    )
    assert over_http["remote"].startswith("127.0.0.1:")
    assert (granted["who"], granted["role"]) == ("ann", "author")
    assert granted["remote"].startswith("127.0.0.1:")
    assert granted["why"] == FIRST_FIT
    assert granted["after"] == [["east", "east-0", ["0", "1"], 1000]]
    assert ended["about"] == {"lease": granted["about"]["lease"], "tenant": "ann"}
    assert ended["who"] == "ann"
    assert ended["before"] == granted["after"]
    assert ended["number"] > granted["number"]
    assert [entries[0]["what"], entries[-1]["what"]] == ["server.started", "server.stopped"]


def test_changes_are_logged_with_their_operator(entries: list[dict]) -> None:
    (cordoned,), (back,) = (
        entries_about(entries, "fleet.cordoned"),
        entries_about(entries, "fleet.uncordoned"),
    )
    assert back["before"] == cordoned["after"]
    assert (back["before"]["reason"], back["before"]["who"]) == ("new fans", "ops")
    assert (cordoned["who"], cordoned["why"]) == ("ops", "new fans")
    assert cordoned["about"]["cluster"] == "east"
    over_http, first, second = entries_about(entries, "quota.set")
    assert over_http["remote"].startswith("127.0.0.1:")
    assert (over_http["who"], over_http["role"]) == ("ops", "admin")
    assert not any("/quotas" in each["what"] for each in entries), "one entry for each change"
    assert first["who"] == second["who"] == "ops"
    assert first.get("before") is None
    assert (second["before"], second["after"]["nominal"]["gpu_milli"]) == (first["after"], 3000)


def test_changes_over_http_are_logged(entries: list[dict]) -> None:
    assert [each["who"] for each in entries_about(entries, "POST /clusters")] == ["ops"]
    published = entries_about(entries, "POST /policy")
    assert [each["who"] for each in published] == ["ann"] * 3
    activated, again = entries_about(entries, "POST /policy-alias/{alias}/activate")
    assert activated["about"]["alias"] == "mine:stable"
    first, second = ({"version": f"mine:{each}-stable"} for each in ("1.0", "1.1"))
    assert (activated["after"], again["before"], again["after"]) == (first, first, second)
    (canary,) = entries_about(entries, "POST /policy-alias/{alias}/canary")
    assert canary["before"] == {}
    assert canary["after"]["canary"]["percent"] == 10
    (removed,) = entries_about(entries, "DELETE /policy-alias/{alias}")
    assert removed["before"] == second | canary["after"]
    assert "after" not in removed
    (described,) = entries_about(entries, "PUT /policy/{uri}")
    assert described["after"]["description"] == "new"
    (made,), (rated,) = (
        entries_about(entries, "POST /clusters"),
        entries_about(entries, "PUT /clusters/{cluster_id}"),
    )
    assert "before" not in made
    assert made["after"]["id"] == "east"
    assert rated["after"] == {"reputation": 7}
    for each in (*published, made):
        assert len(json.dumps(each)) < 20_000


def test_refusals_and_failed_logins_are_logged(entries: list[dict]) -> None:
    refused = [
        (each["who"], each["about"]["what"]) for each in entries_about(entries, "right.refused")
    ]
    assert refused == [("ann", "cordon"), ("ann", "quota"), ("ann", "set_quota")]
    failed = entries_about(entries, "login.failed")
    assert sorted(each["about"]["door"] for each in failed) == ["console", "http", "websocket"]
    assert {each["remote"] for each in failed} == {"127.0.0.1"}
    assert {each["why"] for each in failed} <= {"no token", "the token is unknown"}
    assert "wrong" not in json.dumps(failed)


def test_the_command_filters_entries_and_refuses_invalid_filters(tmp_path: Path) -> None:
    at = ("--data", tmp_path)
    made = invoke("token", "create", "ci", "--role", "client", "--tenant", "ann", *at)
    assert made.returncode == 0
    invoke("token", "revoke", "ci", *at)
    for option, text, lines in [
        ("--what", "token.r*", 1),
        ("--since", "1h", 2),
        ("--since", "2000-01-01", 2),
        ("--who", "none", 0),
    ]:
        assert invoke("audit", option, text, *at).stdout.count("\n") == lines
    wrong = invoke("audit", "--since", "yesterday", *at)
    assert (wrong.returncode, "--since: expected" in wrong.stderr) == (2, True)
    (path,) = (tmp_path / "audit").glob("*.jsonl")
    path.write_text(path.read_text().replace("ann", "bob"))
    broken = invoke("audit", "verify", *at)
    assert (broken.returncode, "was changed" in broken.stderr) == (1, True)


def test_verify_names_missing_entries_and_says_what_it_cannot_check(tmp_path: Path) -> None:
    AuditFiles(tmp_path, 1e9, 1 << 20).append([AuditEntry(1e9, "x", "ann")] * 5, 0)
    (path,) = (tmp_path / "audit").glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    for left, missing in (
        (lines[2:], "begins at entry 3: entries 1 to 2 are missing"),
        ([], "entries 1 to 5 are missing"),
    ):
        path.write_bytes(b"".join(left))
        broken = invoke("audit", "verify", "--data", tmp_path)
        assert (broken.returncode, missing in broken.stderr) == (1, True), broken.stderr
    path.write_bytes(b"".join(lines[2:]))
    (tmp_path / "audit.mark").unlink()  # As an older release leaves a log.
    whole = invoke("audit", "verify", "--data", tmp_path)
    assert whole.returncode == 0
    assert "entries 3 to 5 are unchanged" in whole.stdout
    assert "whether entries before 3 were removed cannot be checked" in whole.stdout
    shown = json.loads(invoke("audit", "verify", "--json", "--data", tmp_path).stdout)
    assert (shown["first"], shown["begin_known"]) == (3, False)


def test_kills_lose_no_entry_of_an_acknowledged_change(tmp_path: Path) -> None:
    granted, published = list[str](), list[str]()
    for number in range(4):
        with serve_and_kill(tmp_path) as server:
            if not number:
                server.fill(cluster("east"))
            for _ in range(10 + number):
                lease = server.ask(**TERMS)["lease"]
                server.release(lease)
                granted.append(lease["id"])
            if number % 2:
                server.publish(policy("return None", f"mine:1.{number}-stable"))
                published.append(f"mine:1.{number}-stable")
            kill(server)
        assert invoke("audit", "verify", "--data", tmp_path).returncode == 0
    with serve_and_kill(tmp_path) as server:
        kill(server)
    entries = read(tmp_path)
    for what in ("lease.granted", "lease.ended"):
        assert sorted(each["about"]["lease"] for each in entries_about(entries, what)) == sorted(
            granted
        )
    again = [each for each in entries if each.get("recovered")]
    assert again
    assert {each["who"] for each in entries_about(again, "lease.granted")} <= {"local"}
    seqs = [each["seq"] for each in entries if each["what"].startswith("lease.")]
    assert seqs == sorted(set(seqs))
    named = [json.dumps(each["about"]) for each in entries_about(entries, "POST /policy")]
    assert all(any(each in about for about in named) for each in published)


def test_moorage_and_moored_print_the_same_audit_log(tmp_path: Path) -> None:
    AuditFiles(tmp_path, 1e9, 1 << 20).append([AuditEntry(1e9, "x", "ann")] * 3, 0)
    program = Path(sys.executable).with_name("moorage")
    for words in (["--json"], ["--who", "ann"], ["--who", "bob"], ["verify", "--json"]):
        command = [program, "audit", *words, "--data", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == invoke("audit", *words, "--data", tmp_path).stdout

"""Roles, at a real server: each kind of message and endpoint against the table of rights."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import FIRST_FIT, Server, cluster, policy
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moorage.daemon.access.rights import RIGHT_OF
from moorage.model import Tenant
from moorage.protocol.messages import OPERATIONS
from moorage.records.rights import Caller, Right, Role
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # A daemon.

EVERY_OPERATION = {
    "allocate": {"adhoc": True, "policy_rule_uri": FIRST_FIT, "inputs": {}},
    "block": {"input": {}},
    "release": {"lease": "x"},
    "renew": {"lease": "x", "token": "t"},
    "cancel": {"request": "x"},
    "flush": {},
    "exec": {"lease": "x", "token": "t", "command": ["true"]},
    "manage": {"policy_rule_uri": FIRST_FIT, "action": "x"},
    "cordon": {"cluster": "none"},
    "drain": {"cluster": "none"},
    "uncordon": {"cluster": "none"},
    "reserve": {"resources": {"gpus": 99}, "starts_at": 1e10, "ends_at": 2e10},
    "unreserve": {"reservation": "x"},
    "set_quota": {"tenant": "x"},
    "remove_quota": {"tenant": "x"},
    "status": {"request": "x"},
    "why": {"request": "x"},
    "queue": {},
    "leases": {},
    "fleet": {},
    "reservations": {},
    "quotas": {},
    "decisions": {},
    "decision_fleet": {"request": "x"},
    "past_fleet": {"at": 1e9},
    "whatif": {"change": {"remove_nodes": []}},
    "logs": {"lease": "x", "token": "t"},
    "watch": {"topics": ["leases"]},
    "resume": {"session": "x"},
}
HTTP = [
    ("GET", "/metrics", Right.METRICS),
    ("GET", "/cluster/query", Right.READ),
    ("GET", "/policy", Right.READ),
    ("POST", "/cluster/query", Right.READ),
    ("POST", "/websocket-ticket", Right.READ),
    ("POST", "/allocate", Right.PLACE),
    ("POST", "/policy", Right.POLICY),
    ("POST", "/console/playground", Right.POLICY),
    ("POST", "/policy-alias/none/activate", Right.POLICY),
    ("POST", "/clusters", Right.CLUSTER),
    ("DELETE", "/clusters/none", Right.CLUSTER),
    ("PUT", "/quotas/someone", Right.QUOTA),
]


def moored(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moorage", "token", *words, "--data", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def make(folder: Path, name: str, role: str, *more: str) -> str:
    made = moored(folder, "create", name, "--role", role, "--tenant", "ann", *more)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tokens(folder: Path) -> dict[Role, str]:
    return {role: make(folder, f"{role}-token", role) for role in Role}


@pytest.fixture(scope="module")
def served(folder: Path, tokens: dict[Role, str]) -> Iterator[Server]:
    with daemon(folder) as running:
        server = Server(running, tokens[Role.ADMIN])
        server.register(cluster("east"))
        server.publish(catalog.document("first_fit"))
        yield server
        server.close()


def is_missing_right(code: str, verdict: str | None) -> bool:
    return code == "unauthorized" and verdict == "not_you"


def test_every_operation_is_tried() -> None:
    assert EVERY_OPERATION.keys() == {"allocate", "block", *OPERATIONS}
    assert len(RIGHT_OF) == len(EVERY_OPERATION)


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.METRICS])
def test_each_message_is_answered_as_the_table_says(
    served: Server, tokens: dict[Role, str], role: Role
) -> None:
    rights = {kind.__struct_config__.tag: right for kind, right in RIGHT_OF.items()}
    caller = Caller(Tenant("ann"), role)
    for name, fields in EVERY_OPERATION.items():
        message = fields if name in {"allocate", "block"} else {"op": name, **fields}
        with served.socket({"Authorization": f"Bearer {tokens[role]}"}) as socket:
            socket.send(json.dumps({**message, "id": 1}))
            reply = json.loads(socket.recv(60))
        right = rights.get(name, Right.PLACE)
        error = reply.get("error") or {"code": ""}
        refused = is_missing_right(error["code"], error.get("verdict"))
        assert refused is not caller.may(right), (name, reply)
        assert not refused or right.expected == error["expected"]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("method", "path", "right"), HTTP)
def test_each_endpoint_is_answered_as_the_table_says(
    served: Server, tokens: dict[Role, str], role: Role, method: str, path: str, right: Right
) -> None:
    headers = {"Authorization": f"Bearer {tokens[role]}"}
    body = None if method in {"GET", "DELETE"} else {}
    answer = served.http.request(method, path, json=body, headers=headers)
    missing = answer.status_code == 403
    assert missing is not Caller(Tenant("ann"), role).may(right), answer.text
    if missing:
        assert "not_you" in answer.text


def test_a_metrics_token_opens_no_socket(served: Server, tokens: dict[Role, str]) -> None:
    headers = {"Authorization": f"Bearer {tokens[Role.METRICS]}"}
    with pytest.raises(InvalidStatus) as refused, served.socket(headers):
        pass
    assert refused.value.response.status_code == 403
    assert b"role metrics" in (refused.value.response.body or b"")


def test_the_dry_run_of_a_drain_needs_no_more_than_reading(
    served: Server, tokens: dict[Role, str]
) -> None:
    drain = {"op": "drain", "cluster": "east", "dry_run": True}
    with served.socket({"Authorization": f"Bearer {tokens[Role.VIEWER]}"}) as socket:
        socket.send(json.dumps(drain))
        assert json.loads(socket.recv(30))["success"]


def test_a_lease_is_seen_by_its_tenant_and_by_operators(
    served: Server, folder: Path, tokens: dict[Role, str]
) -> None:
    created = moored(folder, "create", "bob", "--role", "client", "--tenant", "bob")
    callers = {
        "bob": created.stdout.strip(),
        **{role: tokens[role] for role in (Role.CLIENT, Role.VIEWER, Role.OPERATOR)},
    }
    lease = served.ask(resources={"gpus": 1}, lease={"ttl_seconds": 60})["lease"]
    seen = {}
    for name, token in callers.items():
        with served.socket({"Authorization": f"Bearer {token}"}) as socket:
            socket.send(json.dumps({"op": "leases"}))
            seen[name] = [each["id"] for each in json.loads(socket.recv(30))["data"]["leases"]]
    served.release(lease)
    assert seen == {
        "bob": [],
        **{role: [lease["id"]] for role in (Role.CLIENT, Role.VIEWER, Role.OPERATOR)},
    }


@pytest.fixture
def bob(served: Server, folder: Path) -> Iterator[dict[str, str]]:
    """What a request of an author of another tenant brings along."""
    name = f"bob-{time.time_ns()}"
    made = moored(folder, "create", name, "--role", "author", "--tenant", "bob")
    yield {"Authorization": f"Bearer {made.stdout.strip()}"}
    moored(folder, "revoke", name)


def test_policies_and_aliases_of_others_are_read_only(
    served: Server, tokens: dict[Role, str], bob: dict[str, str]
) -> None:
    ann = {"Authorization": f"Bearer {tokens[Role.AUTHOR]}"}
    mine = policy("return None", "mine:1.0-stable")
    assert served.http.post("/policy", json=mine, headers=ann).status_code == 200
    means = {"policy_rule_uri": "mine:1.0-stable"}
    alias = "/policy-alias/mine:stable"
    assert served.http.post(f"{alias}/activate", json=means, headers=ann).status_code == 200
    foreign = [
        ("PUT", "/policy/mine:1.0-stable", {"description": "bob's"}),
        ("DELETE", "/policy/mine:1.0-stable", None),
        ("POST", f"{alias}/activate", means),
        ("POST", f"{alias}/rollback", None),
        ("POST", f"{alias}/canary", {**means, "percent": 50}),
        ("DELETE", f"{alias}/canary", None),
    ]
    for method, path, body in foreign:
        refused = served.http.request(method, path, json=body, headers=bob)
        assert (refused.status_code, "tenant “ann”" in refused.text) == (403, True), refused.text
    assert served.http.delete(alias, headers=bob).status_code == 409
    assert served.http.get("/policy/mine:1.0-stable", headers=bob).status_code == 200
    operator = {"Authorization": f"Bearer {tokens[Role.OPERATOR]}"}
    assert served.http.delete(alias, headers=operator).status_code == 200
    assert served.http.delete("/policy/mine:1.0-stable", headers=operator).status_code == 200


def test_the_console_says_which_role_it_has(served: Server, tokens: dict[Role, str]) -> None:
    page = {"Origin": served.running.http, "Authorization": ""}
    body = {"token": tokens[Role.VIEWER]}
    session = served.http.post("/console/session", json=body, headers=page).json()
    assert (session["data"]["tenant"], session["data"]["role"]) == ("ann", "viewer")
    assert session["data"]["operator"] is False


def test_a_revoked_token_ends_its_sessions_and_lets_none_in(served: Server, folder: Path) -> None:
    token = make(folder, "gone", "client")
    headers = {"Authorization": f"Bearer {token}"}
    with served.socket(headers) as socket:
        socket.send(json.dumps({"op": "leases"}))
        assert json.loads(socket.recv(30))["success"]
        assert moored(folder, "revoke", "gone").returncode == 0
        assert served.http.get("/metrics", headers=headers).status_code == 401
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
    with pytest.raises(InvalidStatus), served.socket(headers):
        pass


def test_an_expired_token_ends_its_sessions(served: Server, folder: Path) -> None:
    token = make(folder, "short", "client", "--expires", "2s")
    with (
        contextlib.suppress(InvalidStatus),
        served.socket({"Authorization": f"Bearer {token}"}) as socket,
    ):
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
    headers = {"Authorization": f"Bearer {token}"}
    assert served.http.get("/metrics", headers=headers).status_code == 401


def test_the_first_token_closes_an_open_server(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        server = Server(running)
        with server.socket() as socket:
            socket.send(json.dumps({"op": "fleet"}))
            assert json.loads(socket.recv(30))["success"]
            token = make(tmp_path, "first", "admin")
            with pytest.raises(ConnectionClosed):
                socket.recv(30)
        assert server.http.get("/cluster/query").status_code == 401
        headers = {"Authorization": f"Bearer {token}"}
        assert server.http.get("/cluster/query", headers=headers).status_code == 200
        server.close()


def test_a_server_with_named_tokens_registers_its_own_machine(tmp_path: Path) -> None:
    token = make(tmp_path, "first", "viewer")
    with daemon(tmp_path, options=["--here"]) as running:
        server = Server(running, token)
        assert len(server.http.post("/clusters/query", json={}).json()) == 1
        assert server.http.get("/policy").json()["data"]
        assert running.log.read_text() == ""
        server.close()


def test_a_named_token_is_enough_beyond_loopback(tmp_path: Path) -> None:
    flags = ["--host", "0.0.0.0", "--port", "0", "--http-port", "0", "--data", str(tmp_path)]  # noqa: S104  # It is refused.
    command = [sys.executable, "-m", "moorage", "serve", *flags]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "moored token create" in refused.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("create", "a b", "--role", "client", "--tenant", "t"), "NAME: expected"),
        (("create", "ab", "--role", "client", "--tenant", "t t"), "--tenant: expected"),
        (("create", "ab", "--role", "client", "--tenant", "*"), "--tenant: expected"),
        (("create", "ab", "--role", "king", "--tenant", "t"), "'king' is not one of"),
        (("create", "ab", "--role", "client", "--tenant", "t", "--expires", "0d"), "--expires"),
        (("create", "ab", "--role", "client", "--tenant", "t", "--expires", "soon"), "--expires"),
        (("revoke", "nothing"), "no token is named “nothing”"),
    ],
)
def test_wrong_words_are_answered_with_what_is_expected(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    refused = moored(tmp_path, *words)
    assert refused.returncode in {1, 2}
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_list_shows_states_and_no_token(tmp_path: Path) -> None:
    assert "No tokens" in moored(tmp_path, "list").stdout
    token = make(tmp_path, "ci", "client", "--expires", "30d")
    make(tmp_path, "old", "viewer")
    moored(tmp_path, "revoke", "old")
    listed = moored(tmp_path, "list").stdout
    assert "ci: valid, role client, tenant “ann”, expires 20" in listed
    assert "old: revoked" in listed
    rows = json.loads(moored(tmp_path, "list", "--json").stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("ci", "valid"), ("old", "revoked")]
    assert 29 * 86_400 < rows[0]["expires_at"] - time.time() <= 30 * 86_400
    assert token not in listed + json.dumps(rows)

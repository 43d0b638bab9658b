"""Roles, at a real server: each kind of message and endpoint against the table of rights."""

import contextlib
import json
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import FIRST_FIT, Server, bearing, cluster, moored, policy, serving, tell, until
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moorage.daemon.access.rights import RIGHT_OF
from moorage.model import Tenant
from moorage.protocol.messages import OPERATIONS
from moorage.records.rights import Caller, Right, Role

pytestmark = pytest.mark.heavy  # A daemon.

EVERY_OPERATION = {
    "allocate": {"adhoc": True, "policy_rule_uri": FIRST_FIT, "inputs": {}},
    "block": {"input": {}},
    "release": {"lease": "x"},
    "renew": {"lease": "x", "token": "t"},
    "cancel": {"request": "x"},
    "flush": {},
    "exec": {"lease": "x", "token": "t", "command": ["true"]},
    "files": {"lease": "x", "token": "t"},
    "manage": {"policy_rule_uri": FIRST_FIT, "action": "x"},
    "cordon": {"cluster": "none"},
    "drain": {"cluster": "none"},
    "uncordon": {"cluster": "none"},
    "forget": {"cluster": "none", "node": "none"},
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


def make(folder: Path, name: str, role: str, *more: str) -> str:
    made = moored(
        "token", "create", name, "--role", role, "--tenant", "ann", *more, "--data", folder
    )
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
    with serving(folder, bearer=tokens[Role.ADMIN]) as server:
        server.fill(cluster("east"))
        yield server


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
        (reply,) = served.say({**message, "id": 1}, bearer=tokens[role])
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
    headers = bearing(tokens[role])
    body = None if method in {"GET", "DELETE"} else {}
    answer = served.http.request(method, path, json=body, headers=headers)
    missing = answer.status_code == 403
    assert missing is not Caller(Tenant("ann"), role).may(right), answer.text
    if missing:
        assert "not_you" in answer.text


def test_a_metrics_token_opens_no_socket(served: Server, tokens: dict[Role, str]) -> None:
    with (
        pytest.raises(InvalidStatus) as refused,
        served.socket(bearer=tokens[Role.METRICS]),
    ):
        pass
    assert refused.value.response.status_code == 403
    assert b"role metrics" in (refused.value.response.body or b"")


def test_the_dry_run_of_a_drain_needs_no_more_than_reading(
    served: Server, tokens: dict[Role, str]
) -> None:
    drain = {"op": "drain", "cluster": "east", "dry_run": True}
    assert served.say(drain, bearer=tokens[Role.VIEWER])[0]["success"]


@pytest.fixture
def bob(served: Server, folder: Path) -> Iterator[dict[str, str]]:
    """What a request of an author of another tenant brings along."""
    name = f"bob-{time.time_ns()}"
    made = moored("token", "create", name, "--role", "author", "--tenant", "bob", "--data", folder)
    yield bearing(made.stdout.strip())
    moored("token", "revoke", name, "--data", folder)


def test_policies_and_aliases_of_others_are_read_only(
    served: Server, tokens: dict[Role, str], bob: dict[str, str]
) -> None:
    ann = bearing(tokens[Role.AUTHOR])
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
    operator = bearing(tokens[Role.OPERATOR])
    assert served.http.delete(alias, headers=operator).status_code == 200
    assert served.http.delete("/policy/mine:1.0-stable", headers=operator).status_code == 200


def test_a_stranger_makes_no_alias_of_a_policy_that_has_none(
    served: Server, tokens: dict[Role, str], bob: dict[str, str]
) -> None:
    """Else the bare name, which clients may send, would lead to the stranger's version."""
    ann = bearing(tokens[Role.AUTHOR])
    for headers, version in ((ann, "ours:1.0-stable"), (bob, "ours:2.0-stable")):
        new = policy("return None", version)
        assert served.http.post("/policy", json=new, headers=headers).status_code == 200
    for name in ("ours", "ours:stable", "ours:prod"):
        means = {"policy_rule_uri": "ours:2.0-stable"}
        path = f"/policy-alias/{name}/activate"
        refused = served.http.post(path, json=means, headers=bob)
        assert (refused.status_code, "tenant “ann”" in refused.text) == (403, True), refused.text
    assert served.http.post(path, json=means, headers=ann).status_code == 200
    operator = bearing(tokens[Role.OPERATOR])
    for gone in ("-alias/ours:prod", "/ours:1.0-stable", "/ours:2.0-stable"):
        assert served.http.delete(f"/policy{gone}", headers=operator).status_code == 200


CHANGES = [
    ("PUT", "/clusters/owned", {"reputation": 3}),
    ("POST", "/clusters/owned/nodes", cluster("owned", nodes=1, gpus=4)),
    ("DELETE", "/clusters/owned", None),
]


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.METRICS])
@pytest.mark.parametrize("tenant", ["ann", "bob"])
def test_a_cluster_is_changed_by_its_owner_and_operators(
    served: Server, folder: Path, tenant: str, role: Role
) -> None:
    """Every role of the owner's tenant and of another one, at each way to change a cluster."""
    name = f"{tenant}-{role}-{time.time_ns()}"
    words = ("token", "create", name, "--role", role, "--tenant", tenant, "--data", folder)
    headers = bearing(moored(*words).stdout.strip())
    owner = bearing(make(folder, f"owner-{time.time_ns()}", "author"))
    caller = Caller(Tenant(tenant), role)
    may = caller.may(Right.CLUSTER_ALL) or (tenant == "ann" and caller.may(Right.CLUSTER))
    for method, path, body in CHANGES:
        served.http.delete("/clusters/owned")
        new = cluster("owned", nodes=1, gpus=4)
        assert served.http.post("/clusters", json=new, headers=owner).status_code == 201
        before = served.http.get("/clusters/owned", headers=headers).json()
        answer = served.http.request(method, path, json=body, headers=headers)
        assert answer.is_success is may, answer.text
        if not may:
            assert answer.status_code == 403
            assert answer.json()["details"]["verdict"] == "not_you"
            assert served.http.get("/clusters/owned", headers=headers).json() == before
        assert "owner" not in before


def test_a_cluster_of_another_tenant_is_refused_on_the_command_line(
    served: Server, tokens: dict[Role, str], bob: dict[str, str], tmp_path: Path
) -> None:
    served.http.delete("/clusters/hers")
    new = cluster("hers", nodes=1, gpus=4)
    ann = bearing(tokens[Role.AUTHOR])
    assert served.http.post("/clusters", json=new, headers=ann).status_code == 201
    (tmp_path / "hers.json").write_text(json.dumps(new | {"reputation": 5}))
    token = bob["Authorization"].removeprefix("Bearer ")
    until(lambda: "hers" in served.moorage("fleet", MOORAGE_TOKEN=token).stdout)
    (row,) = [each for each in served.moorage("fleet").stdout.splitlines() if "hers" in each]
    assert row.split()[-1] == "ann"
    changes = ("import", tmp_path / "hers.json", "--replace"), ("delete", "hers")
    for words in changes:
        refused = served.moorage("fleet", *words, MOORAGE_TOKEN=token)
        assert refused.returncode != 0
        assert "tenant “ann”" in refused.stderr, refused.stderr
    operator = tokens[Role.OPERATOR]
    assert served.moorage("fleet", "delete", "hers", MOORAGE_TOKEN=operator).returncode == 0


def test_a_revoked_token_ends_its_sessions_and_lets_none_in(served: Server, folder: Path) -> None:
    token = make(folder, "gone", "client")
    headers = bearing(token)
    with served.socket(headers) as socket:
        assert tell(socket, {"op": "leases"})["success"]
        assert moored("token", "revoke", "gone", "--data", folder).returncode == 0
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
        served.socket(bearer=token) as socket,
    ):
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
    headers = bearing(token)
    assert served.http.get("/metrics", headers=headers).status_code == 401


def test_the_first_token_closes_an_open_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with server.socket() as socket:
            assert tell(socket, {"op": "fleet"})["success"]
            token = make(tmp_path, "first", "admin")
            with pytest.raises(ConnectionClosed):
                socket.recv(30)
        assert server.http.get("/cluster/query").status_code == 401
        headers = bearing(token)
        assert server.http.get("/cluster/query", headers=headers).status_code == 200


def test_a_server_with_named_tokens_registers_its_own_machine(tmp_path: Path) -> None:
    token = make(tmp_path, "first", "viewer")
    with serving(tmp_path, options=["--here"], bearer=token) as server:
        assert len(server.http.post("/clusters/query", json={}).json()) == 1
        assert server.http.get("/policy").json()["data"]
        assert server.log() == ""


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
    refused = moored("token", *words, "--data", tmp_path)
    assert refused.returncode in {1, 2}
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_list_shows_states_and_no_token(tmp_path: Path) -> None:
    assert "No tokens" in moored("token", "list", "--data", tmp_path).stdout
    token = make(tmp_path, "ci", "client", "--expires", "30d")
    make(tmp_path, "old", "viewer")
    moored("token", "revoke", "old", "--data", tmp_path)
    listed = moored("token", "list", "--data", tmp_path).stdout
    assert "ci: valid, role client, tenant “ann”, expires 20" in listed
    assert "old: revoked" in listed
    rows = json.loads(moored("token", "list", "--json", "--data", tmp_path).stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("ci", "valid"), ("old", "revoked")]
    assert 29 * 86_400 < rows[0]["expires_at"] - time.time() <= 30 * 86_400
    assert token not in listed + json.dumps(rows)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can write in the folder of another user")
@pytest.mark.parametrize("made", [False, True])
def test_root_leaves_no_files_that_the_server_could_not_read(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "catalog.db").touch()
        os.chown(tmp_path / "catalog.db", 1, 1)
    else:
        os.chown(tmp_path, 1, 1)
    words = ("token", "create", "ci", "--role", "client", "--tenant", "ann"), ("agent", "list")
    for command in words:
        refused = moored(*command, "--data", tmp_path)
        assert refused.returncode == 2
        assert (
            f"sudo -u {pwd.getpwuid(1).pw_name} moored {command[0]} {command[1]} " in refused.stderr
        )
    assert list(tmp_path.iterdir()) == ([tmp_path / "catalog.db"] if made else [])

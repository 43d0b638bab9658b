"""A server allows each message and endpoint to the roles that the table of rights names."""

import contextlib
import functools
import json
import os
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import (
    FIRST_FIT,
    MOORAGE,
    Server,
    bearing,
    cluster,
    invoke,
    policy,
    ran,
    serving,
    tell,
    until,
)
from typer.main import get_command
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moorage.daemon.access.rights import RIGHT_OF
from moorage.model import Tenant
from moorage.protocol.messages import OPERATIONS
from moorage.records.rights import Caller, Right, Role
from moorage_client import BlockingClient, Services, SettingRefused, Unauthorized
from moorage_client.cli.program import app

pytestmark = pytest.mark.heavy  # A daemon.

LEASE = {"lease": "x", "token": "t"}
EVERY_OPERATION: dict[str, dict] = {
    **{key: {} for key in ("flush", "queue", "leases", "fleet", "reservations")},
    **{key: {} for key in ("quotas", "decisions")},
    **dict.fromkeys(("release", "renew", "files", "logs"), LEASE),
    **{key: {"cluster": "none"} for key in ("cordon", "drain", "uncordon")},
    **{key: {"request": "x"} for key in ("cancel", "status", "why", "decision_fleet")},
    **{key: {"tenant": "x"} for key in ("set_quota", "remove_quota")},
    "allocate": {"adhoc": True, "policy_rule_uri": FIRST_FIT, "inputs": {}},
    "block": {"input": {}},
    "exec": {**LEASE, "command": ["true"]},
    "manage": {"policy_rule_uri": FIRST_FIT, "action": "x"},
    "forget": {"cluster": "none", "node": "none"},
    "reserve": {"resources": {"gpus": 99}, "starts_at": 1e10, "ends_at": 2e10},
    "unreserve": {"reservation": "x"},
    "past_fleet": {"at": 1e9},
    "whatif": {"change": {"remove_nodes": []}},
    "watch": {"topics": ["leases"]},
    "resume": {"session": "x"},
}
HTTP = [
    ("GET", "/metrics", Right.METRICS),
    ("GET", "/policy", Right.READ),
    ("POST", "/cluster/query", Right.READ),
    ("POST", "/allocate", Right.PLACE),
    ("POST", "/policy", Right.POLICY),
    ("POST", "/policy-alias/none/activate", Right.POLICY),
    ("DELETE", "/clusters/none", Right.CLUSTER),
    ("PUT", "/quotas/ann", Right.QUOTA),
    ("GET", "/tokens", Right.TOKEN),
    ("POST", "/tokens", Right.TOKEN),
    ("DELETE", "/tokens/none", Right.TOKEN),
]

COMMANDS: list[tuple[str, Right]] = [
    *((f"{name} x", Right.READ) for name in ("logs", "status", "why")),
    *((name, Right.READ) for name in ("leases", "queue", "history", "gpus", "watch none")),
    *((f"{name} list", Right.READ) for name in ("policy", "quota", "reservation")),
    *((f"policy {name}", Right.READ) for name in ("show none", "aliases", "logs none")),
    *((f"policy {name} none --report", Right.READ) for name in ("canary", "shadow")),
    *((name, Right.READ) for name in ("whatif --cordon none", "fleet show")),
    ("fleet import MINE --merge --dry-run", Right.READ),
    *((f"{name} LEASE", Right.READ_ALL) for name in ("status", "why")),
    (f"ask {FIRST_FIT} --gpus 1", Right.PLACE),
    ("run --gpus 99 -- true", Right.PLACE),
    *((f"{name} x", Right.LEASE) for name in ("renew --lease-token t", "release", "cancel")),
    ("flush", Right.LEASE),
    ("exec x -- true", Right.EXEC),
    ("policy push RULE.json --no-test", Right.POLICY),
    (f"policy manage {FIRST_FIT} x", Right.POLICY),
    *((f"policy {name} none:1-x", Right.POLICY) for name in ("activate", "delete")),
    *((f"policy {name} none none:1-x", Right.POLICY) for name in ("canary", "shadow")),
    *((f"policy {name}", Right.POLICY) for name in ("rollback none", "aliases none --delete")),
    ("policy activate theirs:1-x --no-test", Right.POLICY_ALL),
    ("fleet import MINE --replace", Right.CLUSTER),
    ("fleet delete none", Right.CLUSTER),
    ("fleet import THEIRS --replace", Right.CLUSTER_ALL),
    *((f"fleet {name} none", Right.CORDON) for name in ("cordon", "drain", "uncordon")),
    ("fleet forget none/none", Right.CORDON),
    ("reservation add --from +1h --to +2h --gpus 99", Right.RESERVE),
    ("reservation cancel none", Right.RESERVE),
    ("quota set none --gpus 1", Right.QUOTA),
    ("quota remove none", Right.QUOTA),
]
"""Commands and the right that each needs; LEASE, THEIRS and `theirs` are those of another tenant.

No command needs the other two rights: only scrapers read metrics, and tokens are created over HTTP,
or by `moored token` with access to the data folder.
"""
LOCAL = {"login", "logout", "version", "audit", "policy new", "policy test", "policy backtest"}
"""Commands that need no right at a server, in addition to those of `moorage pool`."""


def token(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return invoke("token", *words, "--data", folder)


def make(folder: Path, name: str, role: str, tenant: str = "ann", *more: str) -> str:
    made = token(folder, "create", name, "--role", role, "--tenant", tenant, *more)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tokens(folder: Path) -> dict[Role, str]:
    return {role: make(folder, f"{role}-token", role) for role in Role}


@pytest.fixture(scope="module")
def serve_roles(folder: Path, tokens: dict[Role, str]) -> Iterator[Server]:
    with serving(folder, bearer=tokens[Role.ADMIN]) as server:
        server.fill(cluster("east"))
        yield server


def test_each_operation_has_a_test_message_and_a_right() -> None:
    assert EVERY_OPERATION.keys() == {"allocate", "block", *OPERATIONS}
    assert len(RIGHT_OF) == len(EVERY_OPERATION)


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.METRICS])
def test_each_message_is_refused_to_exactly_the_roles_without_its_right(
    serve_roles: Server, tokens: dict[Role, str], role: Role
) -> None:
    rights = {kind.__struct_config__.tag: right for kind, right in RIGHT_OF.items()}
    caller = Caller(Tenant("ann"), role)
    for name, fields in EVERY_OPERATION.items():
        message = fields if name in {"allocate", "block"} else {"op": name, **fields}
        (reply,) = serve_roles.say({**message, "id": 1}, bearer=tokens[role])
        right = rights.get(name, Right.PLACE)
        error = reply.get("error") or {}
        refused = (error.get("code"), error.get("verdict")) == ("unauthorized", "not_you")
        assert refused is not caller.may(right), (name, reply)
        assert not refused or right.expected == error["expected"]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("method", "path", "right"), HTTP)
def test_each_endpoint_refuses_exactly_the_roles_without_its_right(
    serve_roles: Server, tokens: dict[Role, str], role: Role, method: str, path: str, right: Right
) -> None:
    headers = bearing(tokens[role])
    body = None if method in {"GET", "DELETE"} else {}
    answer = serve_roles.http.request(method, path, json=body, headers=headers)
    missing = answer.status_code == 403
    assert missing is not Caller(Tenant("ann"), role).may(right), answer.text
    if missing:
        assert "not_you" in answer.text


def test_each_command_has_a_test_and_a_right() -> None:
    tested = {words for words, _ in COMMANDS}
    for name, group in get_command(app).commands.items():
        for each in getattr(group, "commands", {"": None}):
            words = f"{name} {each}".strip()
            known = words in LOCAL or name == "pool"
            assert known is not any(f"{row} ".startswith(f"{words} ") for row in tested), words
    assert {right for _, right in COMMANDS} == set(Right) - {Right.METRICS, Right.TOKEN}


@pytest.fixture(scope="module")
def theirs(serve_roles: Server, bob: dict[str, str], tmp_path_factory: pytest.TempPathFactory):
    """A folder of documents for commands, and a lease of another tenant, who has a policy too."""
    folder = tmp_path_factory.mktemp("documents")
    for name in ("mine", "theirs"):
        (folder / name.upper()).write_text(json.dumps(cluster(name, nodes=1)))
    (folder / "RULE.json").write_text(json.dumps(policy("return None", "mine:1-x")))
    say = functools.partial(serve_roles.http.post, headers=bob)
    say("/clusters", json=cluster("theirs", nodes=1)).raise_for_status()
    say("/policy", json=policy("return None", "theirs:1-x")).raise_for_status()
    means = {"policy_rule_uri": "theirs:1-x"}
    say("/policy-alias/theirs:stable/activate", json=means).raise_for_status()
    ask = {"policy_rule_uri": FIRST_FIT, "inputs": {}, "lease": {"ttl_seconds": 600}}
    return folder, say("/allocate", json=ask | {"resources": {"gpus": 1}}).json()["lease"]["id"]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("words", "right"), COMMANDS)
def test_each_command_refuses_exactly_the_roles_without_its_right(
    serve_roles: Server,
    tokens: dict[Role, str],
    theirs: tuple[Path, str],
    role: Role,
    words: str,
    right: Right,
) -> None:
    folder, lease = theirs
    given = words.replace("LEASE", lease).split()
    own = {"MOORAGE_TOKEN": tokens[role], "XDG_STATE_HOME": str(folder)}
    done = serve_roles.moorage(*given, folder=folder, **own)
    caller = Caller(Tenant("ann"), role)
    refused = f"“ann” with the role {role} may not" in done.stderr
    hidden = right is Right.READ_ALL and "[unknown_" in done.stderr
    assert (refused or hidden) is not caller.may(right), done.stderr
    if refused:
        assert done.returncode == 5
        lacking = [each for each in Right if not caller.may(each)]
        assert any(f"Use {each.expected} (" in done.stderr for each in lacking), done.stderr


def test_the_command_line_names_the_option_for_the_token(serve_roles: Server) -> None:
    wrong = serve_roles.moorage("--token", "nope", "leases")
    assert wrong.returncode != 0
    assert "--token" in wrong.stderr
    assert "MOORAGE_TOKEN" in wrong.stderr
    without = serve_roles.moorage("policy", "list", MOORAGE_TOKEN="")
    assert without.returncode != 0
    assert "--token" in without.stderr


def test_metrics_name_no_tenant(serve_roles: Server, tokens: dict[Role, str]) -> None:
    text = serve_roles.http.get("/metrics", headers=bearing(tokens[Role.METRICS])).text
    assert "moorage_build_info" in text
    assert "tenant=" not in text


def test_a_metrics_token_opens_no_socket(serve_roles: Server, tokens: dict[Role, str]) -> None:
    with pytest.raises(InvalidStatus) as refused, serve_roles.socket(bearer=tokens[Role.METRICS]):
        pass
    assert refused.value.response.status_code == 403
    assert b"role metrics" in (refused.value.response.body or b"")


def test_a_metrics_token_does_not_log_in_to_the_console(
    serve_roles: Server, tokens: dict[Role, str]
) -> None:
    given = {"token": tokens[Role.METRICS]}
    refused = serve_roles.http.post("/console/session", json=given, headers={"Authorization": ""})
    assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    assert "the role metrics" in refused.json()["message"]


def test_pages_without_data_need_no_token(serve_roles: Server) -> None:
    index = serve_roles.http.get("/console").text
    static = re.findall(r'(?:src|href)="(/console/static/[^"]+)"', index)
    assert static
    open_to_all = ("/console", "/console/queue", *static, "/healthz", "/readyz", "/sign-in")
    for path, status in (*((each, 200) for each in open_to_all), ("/metrics", 401)):
        answer = serve_roles.http.get(path, headers={"Authorization": ""})
        assert answer.status_code == status, path


def test_the_dry_run_of_a_drain_needs_only_the_right_to_read(
    serve_roles: Server, tokens: dict[Role, str]
) -> None:
    drain = {"op": "drain", "cluster": "east", "dry_run": True}
    assert serve_roles.say(drain, bearer=tokens[Role.VIEWER])[0]["success"]


@pytest.fixture(scope="module")
def bob(serve_roles: Server, folder: Path) -> dict[str, str]:
    """The headers of an author of another tenant."""
    return bearing(make(folder, "bob", "author", "bob"))


def test_a_tenant_can_only_read_policies_and_aliases_of_other_tenants(
    serve_roles: Server, tokens: dict[Role, str], bob: dict[str, str]
) -> None:
    ann = bearing(tokens[Role.AUTHOR])
    mine, theirs = "mine:1.0-stable", "mine:2.0-stable"
    for headers, version in ((ann, mine), (bob, theirs)):
        new = policy("return None", version)
        assert serve_roles.http.post("/policy", json=new, headers=headers).status_code == 200

    def refuse(method: str, path: str, body: dict | None = None) -> None:
        refused = serve_roles.http.request(method, path, json=body, headers=bob)
        assert refused.status_code == 403, refused.text
        assert "tenant “ann”" in refused.text

    # Otherwise the bare name, which clients may send, would lead to the other tenant's version.
    for name in ("mine", "mine:stable", "mine:prod"):
        refuse("POST", f"/policy-alias/{name}/activate", {"policy_rule_uri": theirs})
    means, alias = {"policy_rule_uri": mine}, "/policy-alias/mine:stable"
    assert serve_roles.http.post(f"{alias}/activate", json=means, headers=ann).status_code == 200
    refuse("PUT", f"/policy/{mine}", {"description": "bob's"})
    refuse("DELETE", f"/policy/{mine}")
    refuse("POST", f"{alias}/activate", means)
    refuse("POST", f"{alias}/rollback")
    refuse("POST", f"{alias}/canary", {**means, "percent": 50})
    refuse("DELETE", f"{alias}/canary")
    assert serve_roles.http.delete(alias, headers=bob).status_code == 403
    assert serve_roles.http.get(f"/policy/{mine}", headers=bob).status_code == 200
    operator = bearing(tokens[Role.OPERATOR])
    for path in (alias, f"/policy/{mine}", f"/policy/{theirs}"):
        assert serve_roles.http.delete(path, headers=operator).status_code == 200


def test_a_cluster_of_another_tenant_is_refused(
    serve_roles: Server, tokens: dict[Role, str], bob: dict[str, str], tmp_path: Path
) -> None:
    new = cluster("hers", nodes=1)
    ann = bearing(tokens[Role.AUTHOR])
    assert serve_roles.http.post("/clusters", json=new, headers=ann).status_code == 201
    before = serve_roles.http.get("/clusters/hers", headers=bob).json()
    assert "owner" not in before
    for method, path, body in (
        ("PUT", "/clusters/hers", {"reputation": 3}),
        ("POST", "/clusters/hers/nodes", new),
        ("DELETE", "/clusters/hers", None),
    ):
        answer = serve_roles.http.request(method, path, json=body, headers=bob)
        assert (answer.status_code, answer.json()["details"]["verdict"]) == (403, "not_you")
    assert serve_roles.http.get("/clusters/hers", headers=bob).json() == before
    (tmp_path / "hers.json").write_text(json.dumps(new | {"reputation": 5}))
    bobs = bob["Authorization"].removeprefix("Bearer ")
    until(lambda: "hers" in serve_roles.moorage("fleet", MOORAGE_TOKEN=bobs).stdout)
    (row,) = [each for each in serve_roles.moorage("fleet").stdout.splitlines() if "hers" in each]
    assert row.split()[-1] == "ann"
    for words in (("import", tmp_path / "hers.json", "--replace"), ("delete", "hers")):
        refused = serve_roles.moorage("fleet", *words, MOORAGE_TOKEN=bobs)
        assert refused.returncode != 0
        assert "tenant “ann”" in refused.stderr, refused.stderr
    operator = tokens[Role.OPERATOR]
    assert serve_roles.moorage("fleet", "delete", "hers", MOORAGE_TOKEN=operator).returncode == 0


@pytest.mark.parametrize("where", ["machine", "http"])
def test_a_revoked_token_ends_its_sessions_and_is_refused(
    serve_roles: Server, folder: Path, where: str
) -> None:
    name = f"gone-{where}"
    headers = bearing(make(folder, name, "client"))
    with serve_roles.socket(headers) as socket:
        assert tell(socket, {"op": "leases"})["success"]
        if where == "http":
            serve_roles.http.delete(f"/tokens/{name}").raise_for_status()
        else:
            assert token(folder, "revoke", name).returncode == 0
        assert serve_roles.http.get("/metrics", headers=headers).status_code == 401
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
    with pytest.raises(InvalidStatus), serve_roles.socket(headers):
        pass


def test_an_admin_creates_a_token_over_http_which_works_at_once(
    serve_roles: Server, folder: Path
) -> None:
    new = {"name": "made", "role": "author", "tenant": "eve", "lifetime_seconds": 60}
    answer = serve_roles.http.post("/tokens", json=new)
    assert answer.status_code == 201
    made = answer.json()["data"]
    secret = made.pop("token")
    assert (made["role"], made["tenant"], made["state"]) == ("author", "eve", "valid")
    assert made["expires_at"] == pytest.approx(made["created_at"] + 60)
    assert serve_roles.http.get("/policy", headers=bearing(secret)).status_code == 200
    assert serve_roles.http.get("/tokens", headers=bearing(secret)).status_code == 403
    listed = serve_roles.http.get("/tokens")
    assert made in listed.json()["data"]
    assert secret not in listed.text
    assert made in json.loads(token(folder, "list", "--json").stdout)
    for _ in range(2):  # The second one changes nothing.
        revoked = serve_roles.http.delete("/tokens/made").json()["data"]
        assert revoked["state"] == "revoked"
    assert serve_roles.http.get("/policy", headers=bearing(secret)).status_code == 401
    told = invoke("audit", "--data", folder, "--json").stdout.splitlines()
    entries = [each for each in map(json.loads, told) if each["about"] == {"token": "made"}]
    assert [(each["what"], each["who"], each["token"]) for each in entries] == [
        ("token.created", "ann", "admin-token"),
        ("token.revoked", "ann", "admin-token"),
    ]
    terms = {"role": "author", "tenant": "eve", "expires_at": made["expires_at"]}
    assert entries[0]["after"] == entries[1]["before"] == terms
    assert entries[0]["remote"].startswith("127.0.0.1:")
    assert secret not in serve_roles.log() + "".join(told)


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"name": "viewer-token"}, 409, "name"),
        ({"name": "two words"}, 400, "name"),
        ({"role": "root"}, 400, "role"),
        ({"tenant": "moored"}, 400, "tenant"),
        ({"tenant": 5}, 400, "tenant"),
        ({"lifetime_seconds": 0}, 400, "lifetime_seconds"),
        ({"expires": "30d"}, 400, "expires"),
    ],
)
def test_a_wrong_token_request_is_refused_with_its_field(
    serve_roles: Server, change: dict[str, object], status: int, field: str
) -> None:
    body = {"name": "new", "role": "client", "tenant": "ann"} | change
    answer = serve_roles.http.post("/tokens", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (status, field)
    assert "new" not in {each["name"] for each in serve_roles.http.get("/tokens").json()["data"]}


def test_an_unknown_token_is_not_revoked(serve_roles: Server) -> None:
    refused = serve_roles.http.delete("/tokens/none")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "operation", ["POST /tokens", "POST /clusters", "PUT /quotas/ann", "POST /allocate"]
)
def test_a_token_that_ends_before_its_body_arrives_changes_nothing(
    serve_roles: Server, folder: Path, operation: str
) -> None:
    name = f"late-{operation.split('/')[1]}"
    bearer = make(folder, name, "admin")
    body = json.dumps({"name": "stolen", "role": "admin", "tenant": "ann", "weight": 2}).encode()
    there = httpx.URL(serve_roles.running.http)
    head = (
        f"{operation} HTTP/1.1\r\nHost: {there.host}:{there.port}\r\nConnection: close\r\n"
        f"Authorization: Bearer {bearer}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((there.host, there.port), 30) as parked:
        parked.sendall(head.encode() + body[:3])
        assert serve_roles.http.get("/policy", headers=bearing(bearer)).status_code == 200
        serve_roles.http.delete(f"/tokens/{name}").raise_for_status()
        parked.sendall(body[3:])
        answer = b"".join(iter(lambda: parked.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 401 "), answer
    names = {each["name"] for each in serve_roles.http.get("/tokens").json()["data"]}
    assert "stolen" not in names


def test_an_expired_token_ends_its_sessions(serve_roles: Server, folder: Path) -> None:
    headers = bearing(make(folder, "short", "client", "ann", "--expires", "2s"))
    with contextlib.suppress(InvalidStatus), serve_roles.socket(headers) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
    assert serve_roles.http.get("/metrics", headers=headers).status_code == 401


def test_a_client_continues_with_the_new_token_in_its_token_file(
    serve_roles: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revoke(name: str, held: str) -> None:
        """Revoke a token, and wait until the sessions that used it are closed."""
        with serve_roles.socket(bearing(held)) as socket:
            assert token(folder, "revoke", name).returncode == 0
            with pytest.raises(ConnectionClosed):
                socket.recv(30)

    tag, file = tmp_path.name, tmp_path / "token"
    first, second = make(folder, f"one-{tag}", "client"), make(folder, f"two-{tag}", "client")
    file.write_text(first)
    monkeypatch.delenv("MOORAGE_TOKEN", raising=False)
    monkeypatch.setenv("MOORAGE_TOKEN_FILE", str(file))
    with (
        BlockingClient(serve_roles.running.ws) as client,
        Services(serve_roles.running.http) as services,
        client.watch("leases") as news,
    ):
        client.leases()
        file.write_text(f"{second}\n")
        revoke(f"one-{tag}", first)
        assert (event := news.next(30)) is not None
        assert event.event == "reconnected"
        client.leases()
        assert services.policies()
        revoke(f"two-{tag}", second)  # The client has no other token now.
        with pytest.raises(Unauthorized):
            client.leases()
        file.unlink()
        with pytest.raises(SettingRefused, match=f"MOORAGE_TOKEN_FILE: cannot read {file}"):
            services.policies()
    without = {"MOORAGE_TOKEN": "", "MOORAGE_TOKEN_FILE": str(file)}
    done = serve_roles.moorage("leases", **without)
    assert (done.returncode, str(file) in done.stderr) == (2, True), done.stderr
    file.write_text("\n")
    for words in (("leases",), ("policy", "list")):
        done = serve_roles.moorage(*words, **without)
        assert done.returncode == 5
        assert f"MOORAGE_TOKEN_FILE names {file}, which is empty" in done.stderr
    file.write_text(make(folder, f"three-{tag}", "client"))
    assert serve_roles.moorage("leases", **without).returncode == 0


def test_a_server_without_tokens_requires_one_once_it_exists(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with server.socket() as socket:
            assert tell(socket, {"op": "fleet"})["success"]
            headers = bearing(make(tmp_path, "first", "admin"))
            with pytest.raises(ConnectionClosed):
                socket.recv(30)
        assert server.http.get("/cluster/query").status_code == 401
        assert server.http.get("/cluster/query", headers=headers).status_code == 200


def test_a_server_with_named_tokens_registers_its_own_machine(tmp_path: Path) -> None:
    bearer = make(tmp_path, "first", "viewer")
    with serving(tmp_path, options=["--here"], bearer=bearer) as server:
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
def test_the_refusal_of_wrong_arguments_of_moored_token_names_the_expected_arguments(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    refused = token(tmp_path, *words)
    assert refused.returncode in {1, 2}
    assert sentence in refused.stderr


def test_moored_token_list_shows_states_and_no_token(tmp_path: Path) -> None:
    assert "No tokens" in token(tmp_path, "list").stdout
    made = make(tmp_path, "ci", "client", "ann", "--expires", "30d")
    make(tmp_path, "old", "viewer")
    first, again = (json.loads(token(tmp_path, "revoke", "old", "--json").stdout) for _ in "12")
    listed = token(tmp_path, "list").stdout
    assert "ci: valid, role client, tenant “ann”, expires 20" in listed
    assert "old: revoked" in listed
    rows = json.loads(token(tmp_path, "list", "--json").stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("ci", "valid"), ("old", "revoked")]
    assert first == again == rows[1]
    assert 29 * 86_400 < rows[0]["expires_at"] - time.time() <= 30 * 86_400
    assert made not in listed + json.dumps(rows)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can write in the folder of another user")
@pytest.mark.parametrize("made", [False, True])
def test_commands_of_root_leave_no_files_that_the_server_cannot_read(
    tmp_path: Path, made: bool
) -> None:
    if made:
        (tmp_path / "catalog.db").touch()
        os.chown(tmp_path / "catalog.db", 1, 1)
        words = ["agent", "list"]
    else:
        os.chown(tmp_path, 1, 1)
        words = ["token", "create", "ci", "--role", "client", "--tenant", "ann"]
    refused = ran(MOORAGE.with_name("moored"), *words, "--data", tmp_path)
    assert refused.returncode == 2
    hint = f"sudo -u {pwd.getpwuid(1).pw_name} moored {' '.join(words[:2])} "
    assert hint in refused.stderr
    assert list(tmp_path.iterdir()) == ([tmp_path / "catalog.db"] if made else [])

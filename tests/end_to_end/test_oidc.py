"""Callers of an OpenID Connect issuer, at a real server and a real issuer."""

import base64
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import (
    FIRST_FIT,
    MOORAGE,
    Server,
    ask_message,
    bearing,
    cluster,
    heard,
    ran,
    serving,
    tell,
    until,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog
from tests.oidc_provider import Provider, provider

pytestmark = pytest.mark.heavy  # A daemon, and a program of Node.


def settings(issuer: str) -> dict[str, str]:
    return {
        "MOORAGE_OIDC_ISSUER": issuer,
        "MOORAGE_OIDC_AUDIENCE": "moorage",
        "MOORAGE_OIDC_CLIENT_ID": "moorage",
    }


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with provider(tmp_path_factory.mktemp("issuer")) as issuer:
        yield issuer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def served(issuer: Provider, folder: Path) -> Iterator[Server]:
    with serving(
        folder, environment=settings(issuer.issuer), bearer=issuer.token("admin")
    ) as server:
        server.fill(cluster("east"))
        yield server


def closed_with(socket) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(30)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def test_claims_say_tenant_and_role_at_both_doors(issuer: Provider, served: Server) -> None:
    client, viewer = (bearing(issuer.token(each)) for each in ("client", "viewer"))
    with served.socket(client) as socket:
        message = ask_message(FIRST_FIT, resources={"gpus": 1}, lease={"ttl_seconds": 60})
        socket.send(json.dumps(message))
        lease = heard(socket)["lease"]
        socket.send(json.dumps({"op": "leases"}))
        (row,) = heard(socket)["data"]["leases"]
        assert (row["id"], row["tenant"]) == (lease["id"], "research")
        assert tell(socket, {"op": "release", "lease": lease["id"], "token": lease["token"]})[
            "success"
        ]
    refused = served.http.post("/policy", json=catalog.document("first_fit"), headers=client)
    assert (refused.status_code, "role client" in refused.text) == (403, True)
    assert served.http.get("/policy", headers=viewer).status_code == 200
    assert served.http.get("/policy", headers={"Authorization": ""}).status_code == 401


def test_a_token_of_the_issuer_logs_in_to_the_console(issuer: Provider, served: Server) -> None:
    page = {"Origin": served.running.http, "Authorization": ""}
    body = {"token": issuer.token("viewer")}
    session = served.http.post("/console/session", json=body, headers=page).json()["data"]
    assert (session["tenant"], session["role"]) == ("research", "viewer")
    assert session["expires_at"] < time.time() + 3_600  # Its token lasts for minutes.


def test_a_forged_token_is_refused_and_audited(
    issuer: Provider, served: Server, folder: Path
) -> None:
    head, body, signature = issuer.token("client").split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    raised = json.dumps({**claims, "moorage_role": "admin"}).encode()
    forged = ".".join((head, base64.urlsafe_b64encode(raised).rstrip(b"=").decode(), signature))
    assert served.http.get("/policy", headers=bearing(forged)).status_code == 401
    with pytest.raises(InvalidStatus) as refused, served.socket(bearing(forged)):
        pass
    assert refused.value.response.status_code == 401

    def audited() -> bool:
        lines = "".join(each.read_text() for each in (folder / "audit").iterdir())
        doors = re.findall(r'"login.failed".*?"door":"(\w+)"', lines)
        return {"http", "websocket"} <= set(doors)

    until(audited)


def test_a_rotated_key_is_taken_at_once_and_a_withdrawn_one_ends_sessions(
    issuer: Provider, served: Server
) -> None:
    before = bearing(issuer.token("client"))
    with served.socket(before) as socket:
        assert tell(socket, {"op": "fleet"})["success"]
        issuer.rotate()
        with served.socket(bearing(issuer.token("client"))) as other:
            assert tell(other, {"op": "fleet"})["success"]
        assert served.http.get("/policy", headers=before).status_code == 200
        issuer.rotate()
        now = bearing(issuer.token("client"))
        assert served.http.get("/policy", headers=now).status_code == 200
        assert closed_with(socket) == 4401
    assert served.http.get("/policy", headers=before).status_code == 401
    served.http.headers.update(bearing(issuer.token("admin")))


def test_a_session_ends_with_its_token_though_the_issuers_clock_is_late(tmp_path: Path) -> None:
    # Its tokens ended before they came, within the minute by which clocks may differ.
    with (
        provider(tmp_path, SECONDS_LATE="60", TTL="6") as late,
        daemon(environment=settings(late.issuer)) as running,
    ):
        server = Server(running, late.token("client"))
        with server.socket() as socket:
            assert tell(socket, {"op": "fleet"})["success"]
            assert closed_with(socket) == 4401
        assert server.http.get("/policy").status_code == 401
        server.close()


def test_while_the_issuer_is_away_callers_are_to_come_again(tmp_path: Path) -> None:
    with provider(tmp_path) as gone:
        token = gone.token("client")
    environment = {**settings(gone.issuer), "MOORAGE_TOKENS": "ann:s3cret-s3cret"}
    with serving(environment=environment, bearer=token) as server:
        answer = server.http.get("/policy")
        assert (answer.status_code, "does not answer" in answer.text) == (503, True)
        with pytest.raises(InvalidStatus) as refused, server.socket():
            pass
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"]
        known = bearing("s3cret-s3cret")
        assert server.http.get("/policy", headers=known).status_code == 200


def environment_of(running: Running, state: Path) -> dict[str, str]:
    urls = {"MOORAGE_URL": running.ws, "MOORAGE_HTTP_URL": running.http}
    own = dict.fromkeys(("MOORAGE_TOKEN", "MOORAGE_STATE"), "")
    return {**os.environ, **own, **urls, "XDG_STATE_HOME": str(state)}


def moorage(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return ran(MOORAGE, *words, **environment)


def test_login_by_device_code_serves_commands_until_logout(
    issuer: Provider, served: Server, tmp_path: Path
) -> None:
    environment = environment_of(served.running, tmp_path)
    assert "moorage login" in moorage(environment, "leases").stderr
    command = [MOORAGE, "login", "--json"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as login:
        assert login.stdout is not None
        assert login.stderr is not None
        assert "enter the code" in login.stderr.readline()
        (url,) = re.findall(r"http://\S+", login.stderr.readline())
        issuer.confirm(url, "team.author")
        said = json.loads(login.stdout.read())
        assert login.wait(60) == 0
    assert said["data"]["servers"] == ["http://127.0.0.1"]
    file = tmp_path / "moorage" / "logins.json"
    assert file.stat().st_mode & 0o777 == 0o600
    for words in (["leases"], ["policy", "list"]):
        done = moorage(environment, *words)
        assert done.returncode == 0, done.stderr

    document = json.loads(file.read_text())
    entry = document["logins"]["http://127.0.0.1"]
    entry["expires_at"] = time.time()
    file.write_text(json.dumps(document))
    assert moorage(environment, "leases").returncode == 0
    fresh = json.loads(file.read_text())["logins"]["http://127.0.0.1"]
    assert fresh["token"] != entry["token"]
    assert fresh["refresh_token"] != entry["refresh_token"]
    assert fresh["expires_at"] > time.time() + 60
    assert file.stat().st_mode & 0o777 == 0o600

    assert moorage(environment, "logout").returncode == 0
    assert "moorage login" in moorage(environment, "leases").stderr


def test_a_person_without_a_role_is_not_signed_in(
    issuer: Provider, served: Server, tmp_path: Path
) -> None:
    environment = environment_of(served.running, tmp_path)
    command = [MOORAGE, "login"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as login:
        assert login.stderr is not None
        login.stderr.readline()
        (url,) = re.findall(r"http://\S+", login.stderr.readline())
        issuer.confirm(url, "team.king")
        assert "no valid token" in login.stderr.read()
        assert login.wait(60) != 0
    assert not (tmp_path / "moorage" / "logins.json").exists()


def test_a_server_without_an_issuer_says_how_to_get_a_token(tmp_path: Path) -> None:
    with daemon() as running:
        done = moorage(environment_of(running, tmp_path), "login")
    assert done.returncode != 0
    assert "moored token create" in done.stderr

"""Tests of callers with tokens of an OpenID Connect issuer, at a real server and issuer."""

import base64
import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from httpx import HTTPError
from served import MOORAGE, Server, ask_message, bearing, cluster, serving, tell
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from moorage_policies import catalog
from tests.oidc_provider import Provider, provider

pytestmark = pytest.mark.heavy  # A daemon, and a program of Node.

WITHOUT_TOKEN = {"MOORAGE_TOKEN": "", "MOORAGE_STATE": ""}


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
def serve_issuer(issuer: Provider) -> Iterator[Server]:
    with serving(environment=settings(issuer.issuer), bearer=issuer.token("admin")) as server:
        server.fill(cluster("east"))
        yield server


def close_code(socket) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(30)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def test_claims_of_a_token_set_tenant_and_role_at_both_ports(
    issuer: Provider, serve_issuer: Server
) -> None:
    client, viewer = (bearing(issuer.token(each)) for each in ("client", "viewer"))
    with serve_issuer.socket(client) as socket:
        message = ask_message(resources={"gpus": 1}, lease={"ttl_seconds": 60})
        lease = tell(socket, message)["lease"]
        (row,) = tell(socket, {"op": "leases"})["data"]["leases"]
        assert (row["id"], row["tenant"]) == (lease["id"], "research")
    assert serve_issuer.release(lease)["success"]
    refused = serve_issuer.http.post("/policy", json=catalog.document("first_fit"), headers=client)
    assert (refused.status_code, "role client" in refused.text) == (403, True)
    assert serve_issuer.http.get("/policy", headers=viewer).status_code == 200
    assert serve_issuer.http.get("/policy", headers={"Authorization": ""}).status_code == 401


def test_a_token_of_the_issuer_logs_in_to_the_console(
    issuer: Provider, serve_issuer: Server
) -> None:
    page = {"Origin": serve_issuer.running.http, "Authorization": ""}
    body = {"token": issuer.token("viewer")}
    session = serve_issuer.http.post("/console/session", json=body, headers=page).json()["data"]
    assert (session["tenant"], session["role"]) == ("research", "viewer")
    assert session["expires_at"] < time.time() + 3_600  # The token is valid for minutes.


def test_a_rotated_key_is_accepted_at_once_and_a_withdrawn_one_ends_sessions(
    issuer: Provider, serve_issuer: Server
) -> None:
    before = bearing(issuer.token("client"))
    with serve_issuer.socket(before) as socket:
        assert tell(socket, {"op": "fleet"})["success"]
        issuer.rotate()
        with serve_issuer.socket(bearing(issuer.token("client"))) as other:
            assert tell(other, {"op": "fleet"})["success"]
        assert serve_issuer.http.get("/policy", headers=before).status_code == 200
        issuer.rotate()
        now = bearing(issuer.token("client"))
        assert serve_issuer.http.get("/policy", headers=now).status_code == 200
        assert close_code(socket) == 4401
    assert serve_issuer.http.get("/policy", headers=before).status_code == 401
    serve_issuer.http.headers.update(bearing(issuer.token("admin")))


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Provider, Server]]:
    """An issuer with a late clock and tokens and codes that last for seconds, and a server."""
    seconds = {"SECONDS_LATE": "60", "TTL": "3", "DEVICE_CODE_TTL": "5"}
    with (
        provider(tmp_path_factory.mktemp("hasty"), **seconds) as issuer,
        serving(environment=settings(issuer.issuer)) as server,
    ):
        yield issuer, server


def test_a_session_ends_with_its_token_although_the_issuers_clock_is_late(
    hasty: tuple[Provider, Server],
) -> None:
    # Its tokens ended before they came, within the minute by which clocks may differ.
    late, server = hasty
    token = late.token("client")
    with server.socket(bearer=token) as socket:
        assert tell(socket, {"op": "fleet"})["success"]
        assert close_code(socket) == 4401
    assert server.http.get("/policy", headers=bearing(token)).status_code == 401


def pack(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def unpack(part: str) -> dict:
    found: dict = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


def jwt_of(issuer: str) -> str:
    """Return a token with a false signature, which only the issuer's keys can reveal."""
    claims = {"iss": issuer, "aud": "moorage", "exp": time.time() + 600}
    return f"{pack({'alg': 'RS256', 'kid': 'one'})}.{pack(claims)}.c2lnbmVk"


def test_altered_tokens_are_refused(issuer: Provider, serve_issuer: Server) -> None:
    good = issuer.token("client")
    head, body, signature = good.split(".")
    header, claims = unpack(head), unpack(body)

    def with_claims(**changed: object) -> str:
        return f"{head}.{pack(claims | changed)}.{signature}"

    made = {
        "alg none": f"{pack(header | {'alg': 'none'})}.{body}.",
        "alg none, signed": f"{pack(header | {'alg': 'none'})}.{body}.{signature}",
        "alg HS256": f"{pack(header | {'alg': 'HS256'})}.{body}.{signature}",
        "own keys": f"{pack(header | {'jwk': {'kty': 'oct', 'k': 'AA'}})}.{body}.{signature}",
        "role": with_claims(moorage_role="admin"),
        "tenant": with_claims(moorage_tenant="rival"),
        "audience": with_claims(aud="another"),
        "issuer": with_claims(iss="https://evil.example"),
        "end": with_claims(exp=claims["exp"] + 9_999),
        "no signature": f"{head}.{body}.",
        "cut": good[:-1],
        "long": f"{head}.{body}{'A' * 20_000}.{signature}",
        "longer than a header": f"{head}.{'A' * 200_000}.{signature}",
    }
    for what, token in made.items():
        shown = bearing(token)
        with contextlib.suppress(OSError, HTTPError):  # The server cuts a long header off.
            status = serve_issuer.http.get("/policy", headers=shown).status_code
            assert status == (400 if what == "longer than a header" else 401), what
        with (
            pytest.raises((InvalidStatus, OSError, WebSocketException)),
            serve_issuer.socket(shown),
        ):
            pass
    assert serve_issuer.http.get("/policy", headers=bearing(good)).status_code == 200


def test_a_hanging_issuer_delays_no_token_with_a_known_key(issuer: Provider) -> None:
    known, unknown = bearing(issuer.token("client")), bearing(jwt_of(issuer.issuer))
    # A server of its own: after a fetch in vain, another server asks for no unknown key for 10 s.
    with serving(environment=settings(issuer.issuer)) as server:
        assert server.http.get("/policy", headers=known).status_code == 200
        issuer.stop()
        try:
            with ThreadPoolExecutor() as pool:
                waiting = [
                    pool.submit(server.http.get, "/policy", headers=unknown) for _ in range(5)
                ]
                assert server.http.get("/policy", headers=known).status_code == 200
                assert not all(each.done() for each in waiting)
                assert {each.result(60).status_code for each in waiting} == {503}
        finally:
            issuer.go_on()
        assert server.http.get("/policy", headers=unknown).status_code == 401


def test_while_the_issuer_is_away_the_server_tells_callers_to_retry() -> None:
    away = "http://127.0.0.1:1"
    environment = {**settings(away), "MOORAGE_TOKENS": "ann:s3cret-s3cret"}
    with serving(environment=environment, bearer=jwt_of(away)) as server:
        answer = server.http.get("/policy")
        assert (answer.status_code, "does not answer" in answer.text) == (503, True), answer.text
        with pytest.raises(InvalidStatus) as refused, server.socket():
            pass
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"]
        known = bearing("s3cret-s3cret")
        assert server.http.get("/policy", headers=known).status_code == 200


@contextlib.contextmanager
def logging_in(server: Server, state: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `moorage login`; yield the process and the page that it names."""
    urls = {"MOORAGE_URL": server.running.ws, "MOORAGE_HTTP_URL": server.running.http}
    with subprocess.Popen(
        [MOORAGE, "login", "--json"],
        env={**os.environ, **WITHOUT_TOKEN, **urls, "XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as login:
        assert login.stderr is not None
        assert "enter the code" in login.stderr.readline()
        (url,) = re.findall(r"http://\S+", login.stderr.readline())
        yield login, url


def test_commands_use_a_login_by_device_code_until_logout(
    issuer: Provider, serve_issuer: Server, tmp_path: Path
) -> None:
    def moorage(*words: str) -> subprocess.CompletedProcess[str]:
        return serve_issuer.moorage(*words, **WITHOUT_TOKEN, XDG_STATE_HOME=str(tmp_path))

    assert "moorage login" in moorage("leases").stderr
    with logging_in(serve_issuer, tmp_path) as (login, url):
        issuer.confirm(url, "team.author")
        out, _ = login.communicate(timeout=60)
        assert login.returncode == 0
    assert json.loads(out)["data"]["servers"] == ["http://127.0.0.1"]
    file = tmp_path / "moorage" / "logins.json"
    for words in (["leases"], ["policy", "list"]):
        done = moorage(*words)
        assert done.returncode == 0, done.stderr

    document = json.loads(file.read_text())
    entry = document["logins"]["http://127.0.0.1"]
    entry["expires_at"] = time.time()
    file.write_text(json.dumps(document))
    assert moorage("leases").returncode == 0
    fresh = json.loads(file.read_text())["logins"]["http://127.0.0.1"]
    assert fresh["token"] != entry["token"]
    assert fresh["refresh_token"] != entry["refresh_token"]
    assert fresh["expires_at"] > time.time() + 60
    assert file.stat().st_mode & 0o777 == 0o600

    assert moorage("logout").returncode == 0
    assert "moorage login" in moorage("leases").stderr


def test_moorage_login_waits_for_a_silent_issuer_and_a_new_login_names_the_issuer(
    issuer: Provider, serve_issuer: Server, tmp_path: Path
) -> None:
    with logging_in(serve_issuer, tmp_path) as (login, url):
        issuer.stop()
        try:
            # It gives up after 10 s, and so does a poll, which takes a second to begin.
            other = str(tmp_path / "other")
            done = serve_issuer.moorage("login", **WITHOUT_TOKEN, XDG_STATE_HOME=other)
            with pytest.raises(subprocess.TimeoutExpired):
                login.wait(3)
        finally:
            issuer.go_on()
        issuer.confirm(url, "team.author")
        login.communicate(timeout=60)
        assert login.returncode == 0
    assert done.returncode == 4
    assert "the issuer of this server's tokens" in done.stderr
    assert "--http-url" not in done.stderr


def test_a_device_code_that_is_not_confirmed_or_is_refused_gives_no_login(
    hasty: tuple[Provider, Server], tmp_path: Path
) -> None:
    issuer, server = hasty
    with logging_in(server, tmp_path) as (login, url):
        issuer.refuse(url)
        out, _ = login.communicate(timeout=60)
        assert (login.returncode, "access_denied" in out) == (5, True), out
    with logging_in(server, tmp_path) as (login, _):
        out, _ = login.communicate(timeout=60)
        assert (login.returncode, "code" in out) == (5, True), out


def test_a_person_without_a_role_gets_no_login(
    issuer: Provider, serve_issuer: Server, tmp_path: Path
) -> None:
    with logging_in(serve_issuer, tmp_path) as (login, url):
        issuer.confirm(url, "team.king")
        out, _ = login.communicate(timeout=60)
        assert "its token is not valid" in out
        assert login.returncode != 0
    assert not (tmp_path / "moorage" / "logins.json").exists()

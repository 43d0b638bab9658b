"""Tests of the console's files and logins, and of the refusal of other sites' pages.

Also: actions of pages without lease tokens, and dry runs of each operation.
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from urllib.parse import urlsplit

import httpx
import pytest
from served import ask_message, bearing, cluster, invoke, read_message, serving, tell, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from moorage.web.console import FAILING_LOGINS_MAX

pytestmark = pytest.mark.heavy

TOKENS = {"MOORAGE_TOKENS": "ann:of-ann,bob:of-bob,carl:of-carl"}
TERMS = {"ttl_seconds": 600}
FOREIGN = "https://evil.example"


@pytest.fixture(scope="module")
def server():
    with serving(environment={**TOKENS, "MOORAGE_OPERATORS": "ann"}, bearer="of-bob") as found:
        found.fill(cluster("east", nodes=2, gpus=4))
        yield found


class Page:
    """A page of the server, in a browser without a cookie."""

    def __init__(self, server):
        self.server = server
        self.headers = {"Origin": server.running.http}
        self.http = httpx.Client(base_url=server.running.http, timeout=30)
        self.csrf = ""

    def log_in(self, token):
        answer = self.http.post("/console/session", json={"token": token}, headers=self.headers)
        if answer.is_success:
            self.csrf = answer.json()["data"]["csrf"]
            self.headers = {**self.headers, "X-Console-Token": self.csrf}
        return answer

    def cookies(self):
        return "; ".join(f"{name}={value}" for name, value in self.http.cookies.items())

    def socket(self, **headers):
        sent = {"Cookie": self.cookies(), **self.headers, **headers}
        sent = {name: value for name, value in sent.items() if value}
        return connect(self.server.running.ws, additional_headers=sent, compression=None)


@pytest.fixture
def page(server):
    page = Page(server)
    yield page
    page.http.close()


def leases(socket):
    return tell(socket, {"op": "leases"})


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/why/a.b-1"])
def test_every_address_of_the_console_shows_its_page(server, path):
    answer = server.http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "<!doctype html>" in answer.text
    policy = answer.headers["content-security-policy"]
    port = urlsplit(server.running.ws).port
    connects = f"connect-src 'self' ws://127.0.0.1:{port} wss://127.0.0.1:{port};"
    for part in ("default-src 'self'; ", "frame-ancestors 'none'", connects):
        assert part in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_browsers_cache_files_of_the_console_by_their_hash(server):
    answer = server.http.get("/console/static/index.html")
    again = {"If-None-Match": f'"other", {answer.headers["etag"]}'}
    cached = server.http.get("/console/static/index.html", headers=again)
    assert (cached.status_code, cached.content) == (304, b"")
    for name in ("missing.js", "../__init__.py", "%2e%2e/__init__.py", ""):
        answer = server.http.get(f"/console/static/{name}")
        assert answer.status_code in {404, 200}
        assert b"web.console" not in answer.content


def test_a_login_exchanges_a_token_for_a_cookie_that_pages_cannot_read(page):
    assert page.http.get("/console/session").status_code == 401
    answer = page.log_in("of-ann")
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert part in cookie
    assert "of-ann" not in cookie
    session = page.http.get("/console/session").json()["data"]
    expected = {"tenant": "ann", "operator": True, "login": True, "csrf": page.csrf}
    assert session == session | expected | {"websocket": page.server.running.ws}
    assert page.http.get("/policy").status_code == 200
    with page.socket() as socket:
        assert leases(socket)["success"]


def test_the_session_of_the_console_says_whether_its_caller_is_an_operator(page):
    assert page.log_in("of-bob").json()["data"]["operator"] is False


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"token": "of-none"}, 401, "unauthorized"),
        ({"token": ""}, 401, "unauthorized"),
        ({}, 400, "bad_message"),
        ({"token": 3}, 400, "bad_message"),
        ({"token": "of-ann", "more": 1}, 400, "bad_message"),
        ([], 400, "bad_message"),
    ],
)
def test_a_wrong_login_gets_no_cookie(page, body, status, code):
    answer = page.http.post("/console/session", json=body, headers=page.headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("tokens", [["guess"], ["", "of-an"], ["of-bobb"]])
def test_failed_logins_from_one_address_are_delayed(server, tokens):
    """A few attempts wait for their answer; further attempts are refused at once."""
    token, statuses = cycle(tokens), Counter()

    def fail(_):
        body, headers = {"token": next(token)}, {"Origin": server.running.http}
        return http.post("/console/session", json=body, headers=headers).status_code

    with (
        httpx.Client(base_url=server.running.http, timeout=60) as http,
        ThreadPoolExecutor(4 * FAILING_LOGINS_MAX) as pool,
    ):
        for _ in range(20):  # On a busy machine, attempts arrive one by one.
            statuses.update(pool.map(fail, range(4 * FAILING_LOGINS_MAX)))
            if statuses[429]:
                break
    assert statuses.keys() == {401, 429}


def test_a_large_login_request_is_refused(page):
    answer = page.http.post("/console/session", json={"token": "x" * 10_000})
    assert answer.status_code == 413
    answer = page.http.post("/console/session", content=iter([b'{"token": "of-ann"}']))
    assert answer.status_code == 413


def test_a_cookie_without_origin_and_csrf_token_changes_nothing(page):
    page.log_in("of-ann")
    changes = [
        ("POST", "/clusters", cluster("west")),
        ("DELETE", "/clusters/west", None),
        ("DELETE", "/console/session", None),
    ]
    full = page.headers
    lacking = [{}, {"Origin": full["Origin"]}, {"X-Console-Token": page.csrf}]
    lacking.append({**full, "X-Console-Token": "x" + page.csrf})
    for method, path, body in changes:
        for headers in lacking:
            answer = page.http.request(method, path, json=body, headers=headers)
            failure = answer.json()
            code = failure.get("details", failure.get("error"))["code"]
            assert (answer.status_code, code) == (403, "forbidden")
    assert page.http.post("/clusters", json=cluster("west"), headers=full).status_code == 201
    assert page.http.delete("/clusters/west", headers=full).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": ""}, 401),
        ({"Origin": FOREIGN}, 403),
        ({"Cookie": ""}, 401),
        ({"Cookie": "moorage-console-1=guessed"}, 401),
        ({"Authorization": "Bearer guessed"}, 401),
    ],
)
def test_a_socket_of_the_console_needs_the_cookie_and_the_origin(page, headers, status):
    page.log_in("of-ann")
    with pytest.raises(InvalidStatus) as refused, page.socket(**headers):
        pass
    assert refused.value.response.status_code == status


def test_a_logout_ends_all_pages_of_the_login(page):
    page.log_in("of-bob")
    other = Page(page.server)
    other.log_in("of-bob")
    cookies = page.cookies()
    with page.socket() as socket, other.socket() as stays:
        assert leases(socket)["success"]
        answer = page.http.delete("/console/session", headers=page.headers)
        assert answer.status_code == 200
        assert "max-age=0" in answer.headers["set-cookie"].lower()
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd.code == 4401
        assert leases(stays)["success"]
    assert page.http.get("/policy", headers={"Cookie": cookies}).status_code == 401
    other.http.close()


def test_a_logout_without_a_login_is_refused(page):
    assert page.http.delete("/console/session", headers=page.headers).status_code == 401
    page.log_in("of-ann")
    page.http.cookies = {name: f"{value}x" for name, value in page.http.cookies.items()}
    answer = page.http.delete("/console/session", headers=page.headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")


def test_a_socket_of_the_console_ends_with_its_login():
    with serving(environment={**TOKENS, "MOORAGE_CONSOLE_LOGIN_SECONDS": "2"}) as server:
        page = Page(server)
        page.log_in("of-ann")
        with page.socket() as socket, server.socket(bearer="of-ann") as program:
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(60)
            assert closed.value.rcvd.code == 4401
            assert closed.value.rcvd.reason == "the login has ended; log in again"
            assert leases(program)["success"]
        assert page.http.get("/console/session").status_code == 401
        page.http.close()


def test_without_tokens_there_is_no_login_but_origins_are_checked(tmp_path):
    with serving(tmp_path, environment={"MOORAGE_LOG_LEVEL": "info"}) as server:
        page = Page(server)
        session = page.http.get("/console/session").json()["data"]
        expected = {"tenant": "local", "operator": True, "login": False, "csrf": ""}
        assert session == session | expected
        assert "set-cookie" not in page.log_in("any").headers
        assert page.http.delete("/console/session", headers=page.headers).json()["data"] == {}
        assert "changed" not in server.log()
        noted = invoke("audit", "--json", "--data", tmp_path).stdout.splitlines()
        assert [json.loads(each)["what"] for each in noted] == ["server.started"]
        with page.socket() as socket:
            assert leases(socket)["success"]
        for headers in ({"Origin": FOREIGN}, {"Host": "evil.example"}):
            assert page.http.get("/console/session", headers=headers).status_code == 403
            assert page.http.post("/clusters", json={}, headers=headers).status_code == 403
        with pytest.raises(InvalidStatus, match="403"), page.socket(Origin=FOREIGN):
            pass
        page.http.close()


def test_a_disabled_console_answers_404():
    with serving(environment={**TOKENS, "MOORAGE_CONSOLE": "false"}) as server:
        for method, path in (("GET", "/console"), ("POST", "/console/session")):
            answer = server.http.request(method, path, headers=bearing("of-ann"))
            assert answer.status_code == 404


def say(server, *messages, who="of-bob", page=False):
    origin = {"Origin": server.running.http} if page else {}
    with server.socket(bearing(who) | origin) as socket:
        return [tell(socket, message) for message in messages]


def lease(server):
    held = server.ask(resources={"gpus": 1}, lease=TERMS)["lease"]
    server.leases.append(held)
    return held


@pytest.mark.parametrize("page", [True, False])
def test_a_tenant_releases_its_own_leases_and_no_others(server, page):
    held = lease(server)
    release = {"op": "release", "lease": held["id"]}
    (other,) = say(server, release, who="of-carl", page=page)
    (stolen,) = say(server, {**release, "token": "guessed"}, page=page)
    no = f"No lease of yours has the id {held['id']}, or the token is not its own."
    for refused in (other, stolen):
        assert (refused["error"]["code"], refused["message"]) == ("wrong_token", no)
    assert server.status(held)["state"] == "granted"
    dry, done = say(server, {**release, "dry_run": True}, release, page=page)
    assert (dry["lease"]["id"], dry["lease"]["state"]) == (held["id"], "ended")
    assert dry["data"]["gpus"] == held["placement"][0]["gpus"]
    assert "token" not in dry["lease"]
    assert done["success"]
    assert server.status(held)["state"] == "ended"


def test_the_command_line_releases_a_lease_that_it_did_not_request(server, tmp_path):
    held = lease(server)

    def release(token):
        variables = {"MOORAGE_TOKEN": token, "MOORAGE_STATE": str(tmp_path / "none.json")}
        return json.loads(server.moorage("release", held["id"], "--json", **variables).stdout)

    assert release("of-carl")["error"]["code"] == "wrong_token"
    assert server.status(held)["state"] == "granted"
    assert release("of-bob")["state"] == "ended"


def test_a_dry_run_from_the_console_changes_nothing(server):
    held = lease(server)
    place, dry = {"cluster": "east", "node": "east-0"}, {"dry_run": True}
    released, *others = say(
        server,
        {"op": "release", "lease": held["id"], "token": held["token"], **dry},
        {"op": "flush", **dry},
        {"op": "cordon", **place, "reason": "fans", **dry},
        {"op": "drain", **place, **dry},
        {"op": "uncordon", **place, **dry},
    )
    assert released["lease"]["state"] == "ended"
    assert all(each["data"]["dry_run"] for each in others)
    flushed, cordoned, drained, put_back = (each["data"] for each in others)
    assert flushed["flushed"] == []
    assert (cordoned["leases"], cordoned["unavailable"]) == ([held["id"]], "cordoned by bob: fans")
    assert drained["unavailable"] == "drained by bob"
    assert put_back["unavailable"] is None
    assert server.status(held)["state"] == "granted"
    (nodes,) = server.say({"op": "fleet", "cluster": "east"})
    assert not any("unavailable" in node for node in nodes["data"]["nodes"])


def test_a_waiting_request_still_waits_after_a_dry_run(server):
    waits = {"resources": {"gpus": 4, "nodes": 2}, "lease": {**TERMS, "wait_seconds": 60}}
    lease(server)
    with server.socket() as socket:
        socket.send(json.dumps(ask_message(id=1, **waits)))
        until(server.waiting)
        (row,) = server.waiting()
        cancel = {"op": "cancel", "request": row["request"]}
        (dry,) = server.say({**cancel, "dry_run": True})
        assert (dry["data"]["state"], dry["data"]["priority"]) == ("cancelled", 0)
        (other,) = server.say({**cancel, "dry_run": True}, bearer="of-carl")
        assert other["error"]["code"] == "unknown_request"
        assert server.waiting()
        server.say(cancel)
        assert read_message(socket)["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"op": "release", "lease": "none", "token": "x"}, "unknown_lease"),
        ({"op": "cordon", "cluster": "none"}, "unknown_clusters"),
        ({"op": "drain", "cluster": "east", "node": "none"}, "not_found"),
        ({"op": "cancel", "request": "none"}, "unknown_request"),
    ],
)
def test_a_dry_run_refuses_each_message_that_would_be_refused_without_dry_run(
    server, message, code
):
    wet, dry = say(server, message, {**message, "dry_run": True}, who="of-ann")
    assert wet["error"]["code"] == dry["error"]["code"] == code

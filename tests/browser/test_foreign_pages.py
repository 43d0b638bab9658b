"""Servers refuse pages of other sites, pages without origin and rebound pages, in a real browser.

Each test checks that the attack reaches the server: if the browser blocks it, that proves nothing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from moorage.testing.daemon_process import Running, child, daemon
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # A browser, and a daemon for each way to configure it.

FETCH = """async ([url, options]) => {
    try {
        const answer = await fetch(url, options);
        return [answer.status, await answer.text()];
    } catch (error) { return [0, String(error)]; }
}"""
SOCKET = """url => new Promise(done => {
    const socket = new WebSocket(url);
    socket.onopen = () => socket.send(JSON.stringify({op: "fleet"}));
    socket.onmessage = event => { done(JSON.parse(event.data).success); socket.close(); };
    socket.onerror = () => done("refused");
})"""
# A form cannot send JSON, but its fields can look like JSON.
FORM = """([url, text]) => {
    const [name, value] = text.split("=");
    const form = document.createElement("form");
    Object.assign(form, {method: "POST", action: url, enctype: "text/plain"});
    const field = document.createElement("input");
    Object.assign(field, {name, value});
    form.append(field);
    document.body.append(form);
    form.submit();
}"""


@pytest.fixture(scope="module", params=["open", "tokens"])
def server(request) -> Iterator[tuple[Running, dict[str, str]]]:
    """A `moored serve` with the defaults, and the headers that a program must send to it."""
    tokens = {"MOORAGE_TOKENS": "ann:key"} if request.param == "tokens" else {}
    with daemon(environment=tokens) as running:
        yield running, {"Authorization": "Bearer key"} if tokens else {}
        assert running.log.read_text() == ""


def show(page, url: str) -> list[tuple[str, int]]:
    """Show a page, and return a list that receives the answers to its requests."""
    answers: list[tuple[str, int]] = []
    page.on("response", lambda answer: answers.append((answer.request.method, answer.status)))
    if urlsplit(url).path == "/page":  # As if the server there had sent this page.
        page.route(url, lambda route: route.fulfill(content_type="text/html", body="<title>x"))
    page.goto(url)
    answers.clear()
    return answers


def port(url: str) -> int:
    found = urlsplit(url).port
    assert found is not None
    return found


def start_of_a_process(file: Path) -> list[tuple[str, str]]:
    """Return the three requests that run a command, in a form that a page can send."""
    here = {"id": "localhost", "gpus": {"count": 0, "gpus": []}, "vcpus": {"count": 4}}
    nodes = {"count": 1, "nodeData": [{**here, "memory": 4096}]}
    command = {"command": ["touch", str(file)], "stop_seconds": 1}
    request = {
        "policy_rule_uri": "first_fit:1.0-stable",
        "inputs": {"cluster_ids": ["mine"]},
        "resources": {"cpu_milli": 100},
        "lease": {"ttl_seconds": 60},
        "provision": {"backend": "local", "spec": command},
    }
    first_fit = catalog.document("first_fit")
    documents = {"/clusters": {"id": "mine", "nodes": nodes}, "/policy": first_fit}
    sent = {**documents, "/allocate": request}
    return [(path, f'{json.dumps(each)[:-1]}, "x=": 1}}') for path, each in sent.items()]


def test_the_attack_of_the_foreign_page_works_from_a_program(tmp_path):
    """The attack itself must work; otherwise the refusals of pages would prove nothing."""
    file = tmp_path / "ran"
    with daemon() as running, httpx.Client(base_url=running.http, timeout=30) as http:
        for path, text in start_of_a_process(file):
            answer = http.post(path, content=text, headers={"Content-Type": "text/plain"})
            assert answer.json().get("success", True), answer.text
        subprocess.run(
            ["timeout", "20", "sh", "-c", f"until [ -e {file} ]; do :; done"], check=True
        )


@pytest.mark.parametrize("way", ["form", "fetch"])
def test_a_page_of_another_site_starts_no_process(page, server, site_port, tmp_path, way):
    running, token = server
    file = tmp_path / "ran"
    for path, text in start_of_a_process(file):
        answers = show(page, f"http://evil.example:{site_port}/")
        if way == "form":
            with page.expect_navigation(url=running.http + path):
                page.evaluate(FORM, [running.http + path, text])
            assert json.loads(page.inner_text("body"))["success"] is False
        else:
            options = {"method": "POST", "mode": "no-cors", "body": text}
            page.evaluate(FETCH, [running.http + path, options])
        assert answers == [("POST", 403)]
    assert not file.exists()
    with httpx.Client(base_url=running.http, headers=token) as http:
        assert http.post("/clusters/query", json={}).json() == []
        assert http.get("/policy").json()["data"] == []


@pytest.mark.parametrize("site", ["evil.example", "localhost", "127.0.0.1"])
def test_pages_of_other_sites_and_ports_are_refused(page, server, site_port, site):
    """Pages of this machine's other ports are refused, too: `localhost` is the same site."""
    running, token = server
    answers = show(page, f"http://{site}:{site_port}/")
    for url in (running.http, f"http://localhost:{port(running.http)}"):
        for path in ("/healthz", "/metrics"):
            status, _ = page.evaluate(FETCH, [url + path, {"mode": "no-cors"}])
            assert status == 0  # An opaque answer has no status.
        page.evaluate(FETCH, [url + "/policy", {"method": "POST", "body": "{}"}])
        page.evaluate(FETCH, [url + "/policy", {"headers": token | {"X-Own": "asks first"}}])
    assert {status for _, status in answers} == {403}
    for url in (running.ws, f"ws://localhost:{port(running.ws)}"):
        assert page.evaluate(SOCKET, url) == "refused"


def test_links_to_the_ports_and_frames_with_the_ports_are_refused(page, server, site_port):
    running, _ = server
    answers = show(page, f"http://evil.example:{site_port}/")
    with page.expect_response(f"{running.http}/metrics?frame"):
        page.evaluate(
            "src => document.body.append(Object.assign(document.createElement('iframe'), {src}))",
            f"{running.http}/metrics?frame",
        )
    with page.expect_navigation(url=f"{running.http}/metrics"):
        page.evaluate("url => { location.href = url; }", f"{running.http}/metrics")
    assert answers == [("GET", 403)] * 2


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1"])
def test_a_page_that_hides_its_origin_is_refused(page, server, site_port, host):
    """A sandboxed frame sends the origin `null`, even on our own page."""
    running, _ = server
    at = port(running.http) if host == "127.0.0.1" else site_port
    answers = show(page, f"http://{host}:{at}/page")
    page.evaluate(
        "() => document.body.append(Object.assign(document.createElement('iframe'),"
        " {sandbox: 'allow-scripts', srcdoc: '<title>hidden</title>'}))"
    )
    frame = page.frames[-1]
    frame.wait_for_load_state()
    assert frame.evaluate("() => origin") == "null"
    options = {"method": "POST", "mode": "no-cors", "body": "{}"}
    frame.evaluate(FETCH, [running.http + "/policy", options])
    frame.evaluate(FETCH, [running.http + "/policy", {"mode": "no-cors"}])
    assert answers == [("POST", 403), ("GET", 403)]
    assert frame.evaluate(SOCKET, running.ws) == "refused"


def test_a_page_with_a_rebound_host_name_reads_nothing_and_changes_nothing(page, server):
    """To the browser, the page has the server's origin; only the host name differs."""
    running, token = server
    here = f"http://evil.example:{port(running.http)}"
    show(page, f"{here}/page")
    for path, options in (
        ("/healthz", {}),
        ("/policy", {}),
        ("/metrics", {}),
        ("/clusters", {"method": "POST", "body": '{"id": "mine"}'}),
        ("/clusters/query", {"method": "POST", "body": "{}"}),
    ):
        status, text = page.evaluate(FETCH, [here + path, {**options, "headers": token}])
        assert status == 403
        assert "evil.example" in text
    assert page.evaluate(SOCKET, f"ws://evil.example:{port(running.ws)}") == "refused"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_request_from_our_own_page_is_answered(page, server, host):
    running, token = server
    here = f"http://{host}:{port(running.http)}"
    show(page, f"{here}/page")
    for path, options in (
        ("/healthz", {}),
        ("/policy", {}),
        ("/clusters/query", {"method": "POST", "body": "{}"}),
    ):
        assert page.evaluate(FETCH, [here + path, {**options, "headers": token}])[0] == 200
    for name in ("127.0.0.1", "localhost"):
        # A page cannot send a token here; a server without tokens needs none.
        expected = "refused" if token else True
        assert page.evaluate(SOCKET, f"ws://{name}:{port(running.ws)}") == expected


def test_pages_of_an_allowed_name_and_an_allowed_site_are_answered(page, site_port):
    allowed = {
        "MOORAGE_ALLOWED_HOSTS": "moored.example",
        "MOORAGE_ALLOWED_ORIGINS": f"http://console.example:{site_port}",
    }
    with daemon(environment=allowed) as running:
        here = f"http://moored.example:{port(running.http)}"
        show(page, f"{here}/page")
        assert page.evaluate(FETCH, [here + "/policy", {}])[0] == 200
        assert page.evaluate(SOCKET, f"ws://moored.example:{port(running.ws)}") is True
        answers = show(page, f"http://console.example:{site_port}/")
        assert page.evaluate(SOCKET, running.ws) is True
        page.evaluate(FETCH, [running.http + "/metrics", {"method": "POST", "mode": "no-cors"}])
        assert answers == [("POST", 405)]


def test_a_served_pool_refuses_pages(page, site_port, tmp_path):
    command = [str(Path(sys.executable).with_name("moorage")), "pool", "serve"]
    command += ["--address", "tcp:127.0.0.1:0", "-r", "gpus=4"]
    with child(command, tmp_path / "log", dict(os.environ)) as (_, ready):
        at = ready["address"].rpartition(":")[2]
        rebound = f"http://evil.example:{at}"
        answers = show(page, f"{rebound}/page")
        for path in ("/state", "/types"):
            assert page.evaluate(FETCH, [rebound + path, {}])[0] == 403
        body = {"method": "POST", "body": "[]", "headers": {"Content-Type": "application/json"}}
        assert page.evaluate(FETCH, [rebound + "/checkout", body])[0] == 403
        answers = show(page, f"http://evil.example:{site_port}/")
        options = {"mode": "no-cors", "method": "POST", "body": "[]"}
        page.evaluate(FETCH, [f"http://127.0.0.1:{at}/checkout", options])
        page.evaluate(FETCH, [f"http://127.0.0.1:{at}/state", {"mode": "no-cors"}])
        assert answers == [("POST", 403), ("GET", 403)]

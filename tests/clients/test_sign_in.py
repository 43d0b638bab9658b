"""Stored logins: which servers get a token, and which of an issuer's tokens is used."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from moorage_client.endpoint import Endpoint
from moorage_client.sign_in import SignInFailed, bearer_of, entry_of, logins, origin_of

LOGIN = {"token": "of-ann", "expires_at": time.time() + 300}


def jwt(**claims: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{body}.e30"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MOORAGE_TOKEN", raising=False)
    return tmp_path / "moorage"


def test_a_token_is_sent_to_both_ports_of_its_host_and_to_no_other(folder: Path) -> None:
    logins().change(lambda _: {origin_of("https://gpu.example:8080"): LOGIN})
    for url in ("https://gpu.example", "https://GPU.example:9"):
        assert bearer_of(Endpoint.of_http(url, None, None)[0]) == "of-ann"
    assert bearer_of(Endpoint.of_socket("wss://gpu.example:8765", None, None)[0]) == "of-ann"
    others = ("http://gpu.example", "https://gpu.example.evil", "https://gpu.example@x")
    for url in (*others, "https://x", "https://", "http://["):
        assert bearer_of(Endpoint.of_http(url, None, None)[0]) is None, url
    assert bearer_of(Endpoint("https://gpu.example", None)) is None, "this endpoint uses no login"
    assert (folder / "logins.json").stat().st_mode & 0o777 == 0o600


def test_a_given_token_overrides_the_stored_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins().change(lambda _: {"https://gpu.example": LOGIN})
    assert bearer_of(Endpoint.of_http("https://gpu.example", "given", None)[0]) == "given"
    monkeypatch.setenv("MOORAGE_TOKEN", "of-environment")
    assert bearer_of(Endpoint.of_http("https://gpu.example", None, None)[0]) == "of-environment"


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"logins": 5}', '{"logins": {"a": 5}}'])
def test_a_file_that_cannot_be_read_is_no_login(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "logins.json").write_text(content)
    assert bearer_of(Endpoint.of_http("https://gpu.example", None, None)[0]) is None


def test_an_expired_token_is_sent_if_the_issuer_does_not_answer(folder: Path) -> None:
    of_issuer = {"refresh_token": "r", "client_id": "c", "audience": "moorage", "ca_file": ""}
    due = {**LOGIN, **of_issuer, "expires_at": time.time()}
    for endpoint, refresh in (("http://127.0.0.1:9", "r"), ("http://evil.example", "")):
        entry = {**due, "token_endpoint": f"{endpoint}/token"}
        logins().change(lambda _, entry=entry: {"https://gpu.example": entry})
        assert bearer_of(Endpoint.of_http("https://gpu.example", None, None)[0]) == "of-ann"
        assert logins().read()["https://gpu.example"]["refresh_token"] == refresh


class _Refusing(BaseHTTPRequestHandler):
    """An issuer that answers with the HTTP status in the path."""

    def do_POST(self) -> None:
        self.send_response(int(self.path[1:]))
        body = b'{"error": "invalid_grant"}' if self.path == "/400" else b"<h1>Bad gateway</h1>"
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


def test_only_a_refusal_of_the_issuer_ends_a_login(folder: Path) -> None:
    issuer = HTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=issuer.serve_forever, args=(0.01,))
    thread.start()
    due = {**LOGIN, "client_id": "c", "audience": "moorage", "ca_file": "", "expires_at": 0.0}
    try:
        for status, left in ((502, "r"), (503, "r"), (429, "r"), (400, "")):
            place = f"http://127.0.0.1:{issuer.server_port}/{status}"
            entry = {**due, "refresh_token": "r", "token_endpoint": place}
            logins().change(lambda _, entry=entry: {"https://gpu.example": entry})
            assert bearer_of(Endpoint.of_http("https://gpu.example", None, None)[0]) == "of-ann"
            assert logins().read()["https://gpu.example"]["refresh_token"] == left, status
    finally:
        issuer.shutdown()
        thread.join()
        issuer.server_close()


def test_the_token_for_the_server_is_chosen() -> None:
    access, identity = jwt(aud=["x", "moorage"], exp=7), jwt(aud="moorage", exp=8)
    both = {"access_token": access, "id_token": identity, "refresh_token": "r"}
    assert entry_of(both, "moorage") == {"token": access, "expires_at": 7.0, "refresh_token": "r"}
    opaque = {"access_token": "opaque", "id_token": identity}
    assert entry_of(opaque, "moorage") == {"token": identity, "expires_at": 8.0}
    for wrong in ({}, {"access_token": jwt(aud="x", exp=7)}, {"access_token": jwt(aud="moorage")}):
        with pytest.raises(SignInFailed, match="moorage"):
            entry_of(wrong, "moorage")

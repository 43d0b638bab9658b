"""Tests of stored logins: which servers get a token, and which token of an issuer is sent."""

import base64
import json
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from moorage_client.endpoint import Endpoint
from moorage_client.sign_in import SignInFailed, bearer_of, entry_of, logins, origin_of
from tests.sites import Answer, Site

LOGIN = {"token": "of-ann", "expires_at": time.time() + 300}


def jwt(**claims: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{body}.e30"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MOORAGE_TOKEN", raising=False)
    return tmp_path / "moorage"


def test_a_token_is_sent_to_both_ports_of_its_host_and_to_no_other_host(folder: Path) -> None:
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
def test_a_file_that_cannot_be_read_is_not_a_login(folder: Path, content: str) -> None:
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


class _Refusing(Site):
    """An issuer that answers with the HTTP status in the path."""

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        refused = request.path == "/400"
        said = {"error": "invalid_grant"} if refused else b"<h1>Bad gateway</h1>"
        return int(request.path[1:]), said


def test_only_a_refusal_of_the_issuer_ends_a_login(folder: Path) -> None:
    due = {**LOGIN, "client_id": "c", "audience": "moorage", "ca_file": "", "expires_at": 0.0}
    with _Refusing() as issuer:
        for status, left in ((502, "r"), (503, "r"), (429, "r"), (400, "")):
            place = f"{issuer.url}/{status}"
            entry = {**due, "refresh_token": "r", "token_endpoint": place}
            logins().change(lambda _, entry=entry: {"https://gpu.example": entry})
            assert bearer_of(Endpoint.of_http("https://gpu.example", None, None)[0]) == "of-ann"
            assert logins().read()["https://gpu.example"]["refresh_token"] == left, status


def test_the_token_with_the_audience_of_the_server_is_chosen() -> None:
    access, identity = jwt(aud=["x", "moorage"], exp=7), jwt(aud="moorage", exp=8)
    both = {"access_token": access, "id_token": identity, "refresh_token": "r"}
    assert entry_of(both, "moorage") == {"token": access, "expires_at": 7.0, "refresh_token": "r"}
    opaque = {"access_token": "opaque", "id_token": identity}
    assert entry_of(opaque, "moorage") == {"token": identity, "expires_at": 8.0}
    for wrong in ({}, {"access_token": jwt(aud="x", exp=7)}, {"access_token": jwt(aud="moorage")}):
        with pytest.raises(SignInFailed, match="moorage"):
            entry_of(wrong, "moorage")

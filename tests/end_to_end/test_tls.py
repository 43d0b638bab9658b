"""Tests of TLS at both ports of a server: certificates of server and clients, and renewals."""

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from served import FIRST_FIT, Server, ask_message, cluster, ran, read_message, until
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from moorage.config.settings import Config, ConfigError
from moorage.daemon.access.tls import ServerTls
from moorage.testing.daemon_process import Running, daemon, serve_command
from moorage_client import BlockingClient, ConnectionFailed, ProtocolViolated, Services
from moorage_policies import catalog
from tests.certificates import certificate, pem_of

pytestmark = pytest.mark.heavy  # A daemon.


class Authority:
    """An authority and its certificates, as files of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._signer = certificate("an authority")
        self.file = folder / "ca.pem"
        self.file.write_bytes(pem_of(*self._signer)[0])

    def sign(self, name: str, days: int = 1) -> tuple[Path, Path]:
        """Write a certificate and its key; return the files."""
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        for file, text in zip(files, pem_of(*certificate(name, self._signer, days)), strict=True):
            file.write_bytes(text)
        return files

    def context(self, client: str = "", by: "Authority | None" = None) -> ssl.SSLContext:
        """Return the TLS context of a client, with a certificate if one is given.

        Args:
            client: Name in the certificate; empty: no certificate.
            by: The authority that signs the certificate; None: this one.
        """
        context = ssl.create_default_context(cafile=self.file)
        if client:
            context.load_cert_chain(*(by or self).sign(client))
        return context


def variables(files: tuple[Path, Path], authority: Path | None = None) -> dict[str, str]:
    named = {"MOORAGE_TLS_CERT": str(files[0]), "MOORAGE_TLS_KEY": str(files[1])}
    return named if authority is None else {**named, "MOORAGE_TLS_CLIENT_CA": str(authority)}


def ask(running: Running, context: ssl.SSLContext, **message: object) -> dict:
    with connect(running.ws, ssl=context, open_timeout=60) as connection:
        connection.send(json.dumps(message))
        reply: dict = read_message(connection)
        return reply


def status(running: Running, context: ssl.SSLContext, path: str = "/policy") -> int:
    return httpx.get(f"{running.http}{path}", verify=context, timeout=30).status_code


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def running(ours: Authority) -> Iterator[Running]:
    with daemon(environment=variables(ours.sign("server"))) as running:
        yield running


@pytest.fixture(scope="module")
def strict(ours: Authority) -> Iterator[Running]:
    """A server that demands certificates of clients, and registers this machine."""
    environment = variables(ours.sign("strict"), ours.file)
    with daemon(options=["--here"], environment=environment) as running:
        yield running


class Bundle(NamedTuple):
    """A server that demands certificates of clients, whose authorities are in a bundle."""

    running: Running
    file: Path
    leaving: Authority

    def logged(self, event: str) -> list[str]:
        return [each for each in self.running.log.read_text().splitlines() if event in each]


@pytest.fixture(scope="module")
def bundle_server(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("bundle")
    leaving, file = Authority(folder / "leaving"), folder / "clients.pem"
    file.write_text(ours.file.read_text())
    environment = variables(ours.sign("served"), file) | {"MOORAGE_LOG_LEVEL": "info"}
    with daemon(environment=environment) as running:
        yield Bundle(running, file, leaving)


@pytest.fixture
def bundle(ours: Authority, bundle_server: Bundle) -> Bundle:
    """The server, as soon as it accepts certificates of both authorities."""
    running, file, leaving = bundle_server
    file.write_text(ours.file.read_text() + leaving.file.read_text())
    until(lambda: not is_refused(running, ours.context("goes", by=leaving)))
    until(lambda: len(bundle_server.logged("certificate_renewed")) % 2)  # Tests remove one.
    return bundle_server


def test_both_ports_speak_tls_and_grant_leases(running: Running, ours: Authority) -> None:
    assert (running.ws[:6], running.http[:8]) == ("wss://", "https://")
    context = ours.context()
    with httpx.Client(base_url=running.http, verify=context) as client:
        client.post("/clusters", json=cluster("east")).raise_for_status()
        client.post("/policy", json=catalog.document("first_fit")).raise_for_status()
        session = client.get("/console/session").json()["data"]
        assert session["websocket"].startswith("wss://")
    message = ask_message(FIRST_FIT, resources={"gpus": 1}, lease={"ttl_seconds": 60})
    assert ask(running, context, **message)["lease"]["placement"]


def test_the_command_line_reaches_both_ports_with_the_authority(
    running: Running, ours: Authority
) -> None:
    with contextlib.closing(Server(running)) as server:
        for words in (["leases"], ["policy", "list"]):
            done = server.moorage(*words, MOORAGE_CA_FILE=str(ours.file))
            assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_foreign_certificates_old_versions_and_plain_text_are_refused(
    running: Running, ours: Authority
) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(running.http)
    old = ours.context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((httpx.ConnectError, ssl.SSLError)):
        status(running, old)
    for url in (running.ws, running.http):
        port = int(url.rpartition(":")[2])
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), 30)) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said = plain.recv(1000)
            assert said.startswith(b"HTTP/1.1 426 ")
            assert b"This port speaks TLS: use https://, or wss://" in said


def test_error_messages_say_which_side_uses_tls(running: Running, ours: Authority) -> None:
    ws, http = running.ws.replace("wss:", "ws:"), running.http.replace("https:", "http:")
    tls = "This port speaks TLS: use https://, or wss://"
    for read, url in ((leases_of, ws), (clusters_of, http)):
        with pytest.raises(ProtocolViolated, match=f"^[^ ]*: {tls}") as caught:
            read(url, ours)
        assert caught.value.other_port


def leases_of(url: str, authority: Authority) -> None:
    with BlockingClient(url, ca_file=str(authority.file)) as client:
        client.leases()


def clusters_of(url: str, authority: Authority) -> None:
    with Services(url, ca_file=str(authority.file)) as services:
        services.clusters({})


def test_with_an_authority_of_clients_both_ports_demand_a_certificate(
    strict: Running, ours: Authority
) -> None:
    assert status(strict, ours.context("ann")) == 200
    assert ask(strict, ours.context("ann"), op="fleet")["success"]
    for door in (status, ask):
        with pytest.raises((httpx.HTTPError, OSError, WebSocketException)):
            door(strict, ours.context())


def test_clients_show_the_certificate_in_their_files_at_the_connection(
    tmp_path: Path, strict: Running, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = ours.sign("a client")
    both = tmp_path / "both.pem"
    both.write_bytes(Authority(tmp_path / "others").sign("a client")[0].read_bytes())
    monkeypatch.setenv("MOORAGE_CA_FILE", str(ours.file))
    with contextlib.closing(Server(strict)) as server:
        for words in (["leases"], ["policy", "list"]):
            files = {"MOORAGE_CLIENT_CERT": str(certificate), "MOORAGE_CLIENT_KEY": str(key)}
            done = server.moorage(*words, **files)
            assert done.returncode == 0, done.stderr
            done = server.moorage(*words, MOORAGE_CLIENT_CERT=str(both))
            assert f"{both}: expected a certificate and its key" in done.stderr
        assert "MOORAGE_CLIENT_CERT" in server.moorage("leases").stderr
    monkeypatch.setenv("MOORAGE_CLIENT_CERT", str(both))
    client = BlockingClient(strict.ws, ca_file=str(ours.file))
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    with client:
        assert client.leases() == []


def test_an_http_client_shows_a_certificate_that_was_renewed(
    tmp_path: Path, bundle: Bundle, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tmp_path / "both.pem"

    def renew(by: Authority) -> None:
        certificate, key = by.sign("a client")
        both.write_bytes(certificate.read_bytes() + key.read_bytes())

    renew(bundle.leaving)
    monkeypatch.setenv("MOORAGE_CLIENT_CERT", str(both))
    with Services(bundle.running.http, ca_file=str(ours.file)) as services:
        assert services.policies() == []
        renew(ours)
        bundle.file.write_text(ours.file.read_text())
        until(lambda: is_refused(bundle.running, ours.context("goes", by=bundle.leaving)))
        with contextlib.suppress(ConnectionFailed):  # Its old connection ends.
            services.policies()
        assert services.policies() == []


def test_a_certificate_and_a_token_are_both_required(tmp_path: Path, ours: Authority) -> None:
    stranger = Authority(tmp_path / "stranger")
    old = ours.context()
    old.load_cert_chain(*ours.sign("old", days=-1))
    known = {"Authorization": "Bearer s3cret-s3cret"}
    environment = variables(ours.sign("both"), ours.file) | {"MOORAGE_TOKENS": "ann:s3cret-s3cret"}
    with daemon(environment=environment) as running:

        def shows(context: ssl.SSLContext, headers: dict[str, str]) -> set[object]:
            """Return the answers of both ports: a status, or that the connection failed."""
            said = set[object]()
            try:
                at = f"{running.http}/policy"
                said.add(httpx.get(at, verify=context, headers=headers, timeout=30).status_code)
            except (httpx.HTTPError, OSError):
                said.add("no connection")
            try:
                with connect(running.ws, ssl=context, additional_headers=headers) as socket:
                    socket.send(json.dumps({"op": "fleet"}))
                    said.add(200 if read_message(socket)["success"] else read_message(socket))
            except InvalidStatus as refused:
                said.add(refused.response.status_code)
            except (OSError, WebSocketException):
                said.add("no connection")
            return said

        assert shows(ours.context("ann"), known) == {200}
        assert shows(ours.context("ann"), {}) == {401}, "a certificate does not replace a token"
        assert shows(ours.context("admin"), {}) == {401}, "the name in a certificate gives no role"
        for context in (ours.context(), old, ours.context("ann", by=stranger)):
            assert shows(context, known) == {"no connection"}


def is_refused(running: Running, context: ssl.SSLContext) -> bool:
    try:
        status(running, context)
    except (httpx.HTTPError, OSError):
        return True
    return False


def test_the_removal_of_an_authority_ends_connections_with_its_certificates_at_once(
    bundle: Bundle, ours: Authority
) -> None:
    running, file, leaving = bundle
    goes, stays = ours.context("goes", by=leaving), ours.context("stays")
    before = len(bundle.logged("certificate_renewed"))
    with (
        connect(running.ws, ssl=goes) as ended,
        connect(running.ws, ssl=stays) as open_still,
        httpx.Client(base_url=running.http, verify=goes, timeout=30) as pages,
    ):
        assert pages.get("/policy").status_code == 200
        for socket in (ended, open_still):
            socket.send(json.dumps({"op": "fleet"}))
            assert read_message(socket)["success"]
        file.write_text("no certificate")
        until(lambda: bundle.logged("certificate_not_renewed"))
        assert status(running, goes) == status(running, stays) == 200
        file.write_text(ours.file.read_text())
        until(lambda: is_refused(running, goes))
        until(lambda: bundle.logged("certificate_renewed")[before:])
        (line,) = bundle.logged("certificate_renewed")[before:]
        assert json.loads(line)["file"] == str(file)
        ended.send(json.dumps({"op": "fleet"}))
        with pytest.raises((OSError, WebSocketException)):
            read_message(ended)
        with pytest.raises((httpx.HTTPError, OSError)):  # Also on an older connection.
            pages.get("/policy")
        open_still.send(json.dumps({"op": "fleet"}))
        assert read_message(open_still)["success"]
    assert status(running, stays) == 200


def test_a_server_with_tls_registers_this_machine(strict: Running, ours: Authority) -> None:
    context = ours.context("ann")
    fleet = ask(strict, context, op="fleet")
    assert len(fleet["data"]["clusters"]) == 1
    published = httpx.get(f"{strict.http}/policy", verify=context, timeout=30).json()["data"]
    assert FIRST_FIT in [each["policy_rule_uri"] for each in published]


def test_the_server_uses_a_renewed_certificate_and_ignores_a_bad_certificate(
    running: Running, ours: Authority
) -> None:
    def served_certificate() -> str:
        return ssl.get_server_certificate(("127.0.0.1", int(running.http.rpartition(":")[2])))

    before, renewed = served_certificate(), ours.sign("renewed")
    certificate, key = ours.file.with_name("server.pem"), ours.file.with_name("server.key")
    with connect(running.ws, ssl=ours.context()) as connection:
        key.write_bytes(b"no key")
        until(lambda: "certificate_not_renewed" in running.log.read_text())
        assert served_certificate() == before
        assert status(running, ours.context()) == 200
        for file, new in zip((certificate, key), renewed, strict=True):
            new.replace(file)
        until(lambda: served_certificate() != before)
        assert served_certificate() == certificate.read_text()
        connection.send(json.dumps({"op": "fleet"}))  # Open connections continue.
        assert read_message(connection)["success"]
    assert ask(running, ours.context(), op="fleet")["success"]


@pytest.mark.parametrize("change", [{"TLS_KEY": ""}, {"TLS_CERT": "", "TLS_KEY": ""}])
def test_incomplete_tls_settings_are_refused(change: dict[str, str]) -> None:
    named = variables((Path("c.pem"), Path("k.pem")), Path("a.pem"))
    named |= {f"MOORAGE_{name}": text for name, text in change.items()}
    with pytest.raises(ConfigError, match="tls_key"):
        Config.load({}, {"HOME": "/home/ann", **named})


@pytest.mark.parametrize(
    ("place", "name", "sentence"),
    [
        (1, "other", "expected a certificate and its key"),
        (1, "locked", "passphrase"),
        (2, "empty", "expected certificates as PEM"),
    ],
)
def test_the_error_names_a_wrong_certificate_file(
    tmp_path: Path, place: int, name: str, sentence: str
) -> None:
    authority = Authority(tmp_path / "ours")
    files = [*authority.sign("server"), authority.file]
    (tmp_path / "empty").write_text("")
    (tmp_path / "other").write_bytes(authority.sign("other")[1].read_bytes())
    locked = certificate("locked")[0].private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked").write_bytes(locked)
    files[place] = tmp_path / name
    with pytest.raises(OSError, match=sentence):
        ServerTls(*files)


def test_the_time_when_the_served_certificate_expires_is_known(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    certificate, key = authority.sign("server", 5)
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes() + authority.file.read_bytes())
    for files in ((certificate, key), (both, both)):
        tls = ServerTls(*files, None)
        assert tls.expires_at - time.time() == pytest.approx(5 * 86_400, abs=60)
        assert tls.lifetime == 7 * 86_400


def test_the_error_of_a_start_names_a_missing_file_for_tls(tmp_path: Path, ours: Authority) -> None:
    named = variables((Path("/nowhere.pem"), ours.sign("missing")[1]))
    done = ran(*serve_command(tmp_path / "data"), **named)
    assert (done.returncode, "/nowhere.pem" in done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr

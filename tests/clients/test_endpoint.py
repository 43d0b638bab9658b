"""Proxies, certificates and tokens of clients work alike for WebSocket and HTTP."""

import asyncio
import contextlib
import json
import socket
import socketserver
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from websockets.asyncio.server import serve

from moorage_client import BlockingClient, Client, ClusterClient, Services
from moorage_client.endpoint import Endpoint
from moorage_client.errors import (
    CertificateRefused,
    ConnectionFailed,
    ProxyFailed,
    SettingRefused,
    Timeout,
)
from moorage_client.inventory.ray import dashboard_inventory
from moorage_client.loops import LoopThread
from moorage_client.sign_in import bearer_of
from tests.certificates import certificate
from tests.sites import Served, Site

DEAD_PROXY = "http://user:hidden@127.0.0.1:9"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
CA_FILES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "MOORAGE_CA_FILE", "CURL_CA_BUNDLE")
LEFT_OUT = ("NO_PROXY", "no_proxy", *CA_FILES)
SECRET = "a-secret-of-32-characters-or-more"  # noqa: S105  # For a server of one test.
SIDES = [["policy", "list"], ["leases"]]
"""Two commands: one uses HTTP, the other the WebSocket."""
each_side = pytest.mark.parametrize("command", SIDES)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Remove this machine's settings of proxies and authorities from the environment."""
    for name in (*PROXIES, *LEFT_OUT, "MOORAGE_TOKEN", "MOORAGE_URL", "MOORAGE_HTTP_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site():
    with Site() as site:
        yield site


@pytest.fixture(params=[DEAD_PROXY, "socks5://127.0.0.1:9"])
def proxy_url(request, monkeypatch):
    for name in PROXIES:
        monkeypatch.setenv(name, request.param)
    return request.param


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST.", "a.localhost", "ip6-localhost")),
        *((name, True) for name in ("127.0.0.1", "127.8.8.8", "[::1]", "[::]")),
        ("[::ffff:127.0.0.1]", True),
        *((name, False) for name in ("10.0.0.1", "localhost.example", "[2001:db8::1]", "host")),
    ],
)
def test_addresses_of_this_machine_are_recognized(host, here):
    assert Endpoint(f"ws://{host}:1", None).is_here is here


@pytest.mark.usefixtures("proxy_url")
def test_clients_reach_this_machine_without_a_proxy(site, shell, harbour, monkeypatch):
    with Services(site.url.replace("127.0.0.1", "localhost")) as services:
        assert services.policies() == []
    monkeypatch.setenv("CLUSTER_SERVICE_URL", site.url)
    assert ClusterClient().read_cluster("c0")[0]
    with BlockingClient(harbour.url) as client:
        assert client.leases() == []
    shell.environment["MOORAGE_HTTP_URL"] = site.url
    assert shell("policy", "list").returncode == 0
    with pytest.raises(ValueError, match="Ray's answer to GET"):  # An answer, so no proxy.
        dashboard_inventory("ray", site.url, "")


def test_the_error_names_a_proxy_that_fails(shell, proxy_url):
    shell.environment |= {
        "MOORAGE_HTTP_URL": "http://moorage.example:8080",
        "MOORAGE_URL": "ws://moorage.example:8765",
    }
    for command in SIDES:
        done = shell(*command)
        assert done.returncode == 4
        assert "through the proxy" in done.stderr
        assert proxy_url.rpartition("@")[2].removeprefix("socks5://") in done.stderr
        assert "NO_PROXY=moorage.example" in done.stderr
        assert "Start a server" not in done.stderr
        assert "hidden" not in done.stderr
    with Services("http://moorage.example") as services, pytest.raises((ProxyFailed, Timeout)):
        services.policies()


class Tunnel(socketserver.StreamRequestHandler):
    """A proxy that forwards HTTP CONNECT, SOCKS5 and plain requests to one port of this machine."""

    server: "Proxy"

    def handle(self) -> None:
        first = self.rfile.read(1)
        if first == b"\x05":
            self.rfile.read(self.rfile.read(1)[0])
            self.wfile.write(b"\x05\x00")
            kind = self.rfile.read(4)[3]
            self.rfile.read({1: 4, 4: 16}.get(kind) or self.rfile.read(1)[0])
            self.rfile.read(2)
            self.wfile.write(b"\x05\x00\x00\x01" + bytes(6))
            first = b""
        elif (line := first + self.rfile.readline()).startswith(b"CONNECT"):
            while self.rfile.readline().strip():
                pass
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            first = b""
        else:
            first = line.replace(b"http://moorage.example:1", b"")
        self.server.passed += 1
        with socket.create_connection(("127.0.0.1", self.server.port)) as inner:
            inner.sendall(first + (self.rfile.read1() if first else b""))
            back = threading.Thread(target=pump, args=(inner, self.connection))
            back.start()
            pump(self.connection, inner)
            back.join()


def pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


class Proxy(Served, socketserver.ThreadingTCPServer):
    """A running proxy on the way to one port, with the number of requests that it passed."""

    def __init__(self, port: int) -> None:
        self.port, self.passed = port, 0
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.serve()


@pytest.mark.parametrize("scheme", ["", "http://", "socks5://", "socks5h://"])
def test_http_and_socks_proxies_are_used_with_and_without_a_scheme(scheme, site, harbour, shell):
    if scheme.startswith("socks"):
        pytest.importorskip("socks", reason="the extra `socks` is not installed")
        pytest.importorskip("python_socks", reason="as above")
    host = "10.9.9.9" if scheme == "socks5://" else "moorage.example"  # It sends no names.
    ports = {"MOORAGE_HTTP_URL": site.server_port, "MOORAGE_URL": harbour.url.rpartition(":")[2]}
    for (name, port), kind in zip(ports.items(), ("http", "ws"), strict=True):
        with Proxy(int(port)) as proxy:
            shell.environment[name] = f"{kind}://{host}:1"
            shell.environment["HTTP_PROXY"] = f"{scheme}127.0.0.1:{proxy.server_address[1]}"
            done = shell(*(["policy", "list"] if kind == "http" else ["leases"]))
            assert (done.returncode, proxy.passed) == (0, 1), done.stderr


@each_side
def test_the_refusal_of_an_unknown_kind_of_proxy_names_its_variable(command, shell):
    shell.environment |= {"MOORAGE_HTTP_URL": "http://a.example", "MOORAGE_URL": "ws://a.example"}
    shell.environment["ALL_PROXY"] = "ftp://proxy:3128"
    done = shell(*command)
    assert done.returncode == 2
    assert "ALL_PROXY: expected a proxy, such as http://proxy:3128 or socks5h://" in done.stderr


@pytest.mark.parametrize(
    ("variable", "socket", "http"),
    [("HTTP_PROXY", "ws", "http"), ("https_proxy", "wss", "https"), ("ALL_PROXY", "ws", "https")],
)
def test_websocket_and_http_use_the_same_proxy(variable, socket, http, monkeypatch):
    monkeypatch.setenv(variable, DEAD_PROXY)
    for scheme in (socket, http):
        assert Endpoint(f"{scheme}://10.1.2.3:1", None).proxy == DEAD_PROXY
    other = {"ws": "wss", "wss": "ws"}[socket]
    assert (Endpoint(f"{other}://10.1.2.3:1", None).proxy is None) is (variable != "ALL_PROXY")
    monkeypatch.setenv("NO_PROXY", "10.1.0.0/16")
    assert Endpoint(f"{socket}://10.1.2.3:1", None).proxy is None


@pytest.mark.parametrize(
    ("variable", "command", "schemes"),
    [
        ("MOORAGE_URL", ["leases"], "ws:// or wss://"),
        ("MOORAGE_HTTP_URL", ["policy", "list"], "http:// or https://"),
    ],
)
@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8765", "'ws://127.0.0.1'"])
def test_a_url_with_a_wrong_scheme_is_refused(variable, command, schemes, url, shell):
    shell.environment[variable] = url
    done = shell(*command)
    assert done.returncode == 2
    assert f"{variable}: expected a URL that begins with {schemes}" in done.stderr
    with Services(url) as services, pytest.raises(ConnectionFailed, match="is not an http:// or"):
        services.policies()


def test_a_password_of_netrc_does_not_replace_a_token(site, tmp_path, monkeypatch):
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOORAGE_TOKEN", SECRET)
    monkeypatch.setenv("CLUSTER_SERVICE_URL", site.url)
    for url in (site.url, site.url.replace("//", "//u:p@")):
        with Services(url) as services:
            services.policies()
    ClusterClient().read_cluster("c0")
    assert set(site.shown) == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("around", ["{}\n", " {}\r\n", "\t{}"])
def test_white_space_around_settings_is_ignored(around, site, shell, harbour):
    shell.environment |= {
        "MOORAGE_TOKEN": around.format(SECRET),
        "MOORAGE_URL": around.format(harbour.url),
        "MOORAGE_HTTP_URL": around.format(f"{site.url}/"),
    }
    for command in SIDES:
        done = shell(*command)
        assert done.returncode == 0, done.stderr
    assert {site.shown[-1], harbour.headers[-1]} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("wrong", [f"{SECRET}\nmore", f"{SECRET}\r\nX: y", f"{SECRET}\0", "ключ"])
@each_side
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(wrong, command, shell, monkeypatch):
    shell.environment["MOORAGE_HTTP_URL"] = "http://127.0.0.1:9"
    given = shell(*command, "--token", wrong)
    assert (given.returncode, given.stderr.startswith("moorage: --token: expected")) == (2, True)
    assert wrong[:6] not in given.stderr
    with pytest.raises(SettingRefused) as caught:
        Services(token=wrong)
    assert wrong[:6] not in str(caught.value)
    if "\0" not in wrong:
        monkeypatch.setenv("RAY_AUTH_TOKEN", wrong)
        with pytest.raises(SettingRefused, match="RAY_AUTH_TOKEN") as caught:
            dashboard_inventory("ray", "http://127.0.0.1:9", "")
        monkeypatch.setenv("MOORAGE_TOKEN", wrong)
        with pytest.raises(SettingRefused, match="MOORAGE_TOKEN"):
            Client()


def context_of(folder, key, built):
    file = folder / "server.pem"
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, kind, plain)
    file.write_bytes(private + built.public_bytes(serialization.Encoding.PEM))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Make an authority; return its file, its key and its certificate."""
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    key, built = certificate("an authority")
    file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    return file, key, built


async def answer(socket):
    async for text in socket:
        data = {"leases": [], "next": None}
        await socket.send(json.dumps({"id": json.loads(text)["id"], "success": True, "data": data}))


@pytest.fixture(scope="module")
def secure(authority, tmp_path_factory):
    """Serve WebSocket and HTTP with a certificate that the authority signed."""
    _, key, built = authority
    context = context_of(tmp_path_factory.mktemp("server"), *certificate("server", (key, built)))
    thread = LoopThread("secure")

    async def begin():
        return await serve(answer, "127.0.0.1", 0, ssl=context)

    async def end(server):
        server.close()
        await server.wait_closed()

    server = thread.run(begin())
    port = next(iter(server.sockets)).getsockname()[1]
    with Site(context) as site:
        yield {
            "MOORAGE_URL": f"wss://127.0.0.1:{port}",
            "MOORAGE_HTTP_URL": f"https://localhost:{site.server_port}",
        }
    thread.run(end(server))
    thread.stop()


@pytest.fixture
def secure_shell(shell, secure):
    """The command line, pointed at the servers of the fixture `secure`."""
    shell.environment |= secure
    return shell


@each_side
def test_an_error_about_an_unknown_authority_names_the_option_for_its_file(secure_shell, command):
    done = secure_shell(*command)
    assert done.returncode == 4
    assert "signed by an authority that is not known here" in done.stderr
    assert "--ca-file or MOORAGE_CA_FILE" in done.stderr
    assert "ca_file=" not in done.stderr
    assert "--ca-file or" in secure_shell("--json", *command).stdout
    assert "Start a server" not in done.stderr


@each_side
def test_the_error_names_a_file_that_lacks_the_authority_of_the_server(
    secure_shell, command, tmp_path
):
    file = tmp_path / "other.pem"
    file.write_bytes(certificate("another")[1].public_bytes(serialization.Encoding.PEM))
    given = secure_shell("--ca-file", str(file), *command).stderr
    assert f"signed by an authority that is not in {file} (" in given
    assert "--ca-file names that file" in given
    secure_shell.environment["SSL_CERT_FILE"] = str(file)
    said = secure_shell(*command).stderr
    assert f"not in {file} (" in said
    assert "SSL_CERT_FILE names that file" in said
    assert "MOORAGE_CA_FILE overrides SSL_CERT_FILE" in said


def test_a_folder_of_authorities_works_once_it_is_prepared_by_openssl(
    secure_shell, authority, tmp_path
):
    (tmp_path / "authority.pem").write_bytes(authority[0].read_bytes())
    for command in SIDES:
        said = secure_shell("--ca-file", str(tmp_path), *command).stderr
        assert "--ca-file names that folder; name a file, or prepare it with `openssl" in said
    subprocess.run(["openssl", "rehash", tmp_path], check=True)
    for command in SIDES:
        done = secure_shell("--ca-file", str(tmp_path), *command)
        assert done.returncode == 0, done.stderr


def test_an_error_in_a_program_names_the_parameter_for_the_authority(secure):
    named = r"set `ca_file=` or MOORAGE_CA_FILE"
    services = Services(secure["MOORAGE_HTTP_URL"])
    with services, pytest.raises(CertificateRefused, match=named):
        services.policies()
    with pytest.raises(CertificateRefused, match=named):
        asyncio.run(Client(secure["MOORAGE_URL"]).__aenter__())


@pytest.mark.parametrize("named", ["MOORAGE_CA_FILE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_an_authority_from_the_environment_holds_for_both_ports(secure_shell, authority, named):
    secure_shell.environment[named] = f"{authority[0]}\n"
    for command in SIDES:
        done = secure_shell(*command)
        assert done.returncode == 0, done.stderr


def test_an_authority_from_the_option_overrides_the_environment(
    secure_shell, authority, monkeypatch, tmp_path
):
    file, (socket_url, http_url) = (
        str(authority[0]),
        (secure_shell.environment[name] for name in ("MOORAGE_URL", "MOORAGE_HTTP_URL")),
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    for command in SIDES:
        for words in (["--ca-file", file, *command], [*command, "--ca-file", file]):
            done = secure_shell(*words)
            assert done.returncode == 0, done.stderr
    with Services(http_url, ca_file=file) as services:
        assert services.policies() == []
    with BlockingClient(socket_url, ca_file=file) as client:
        assert client.leases() == []
    monkeypatch.setenv("CLUSTER_SERVICE_URL", http_url)
    monkeypatch.setenv("MOORAGE_CA_FILE", file)
    assert ClusterClient().read_cluster("c0")[0]


@each_side
@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "MOORAGE_CA_FILE: cannot read"), ("nothing\n", "no certificate in PEM format")],
)
def test_the_error_says_why_a_file_of_authorities_cannot_be_used(
    secure_shell, tmp_path, command, content, reason
):
    file = tmp_path / "ca.pem"
    if content:
        file.write_text(content)
    secure_shell.environment["MOORAGE_CA_FILE"] = str(file)
    done = secure_shell(*command)
    assert (done.returncode, reason in done.stderr) == (2, True)


def test_the_refusal_of_a_certificate_names_the_fault(authority, tmp_path):
    file, key, built = authority
    with Site(context_of(tmp_path, *certificate("late", (key, built), days=-1))) as site:
        expired = f"https://127.0.0.1:{site.server_port}"
        with (
            Services(expired, ca_file=str(file)) as services,
            pytest.raises(CertificateRefused, match="refused: certificate has expired"),
        ):
            services.policies()
    plain = "this port speaks no TLS: use http://"
    with Site() as site:
        services = Services(site.url.replace("http", "https"))
        with services, pytest.raises(CertificateRefused, match=plain):
            services.policies()
        with pytest.raises(CertificateRefused, match=plain):
            asyncio.run(Client(site.url.replace("http", "wss")).__aenter__())


def test_an_address_with_a_wrong_certificate_is_skipped(secure, authority, shell, tmp_path):
    wrong = context_of(tmp_path, *certificate("server", certificate("another authority")))
    with Site(wrong) as site:
        for scheme, variable in (("wss", "MOORAGE_URL"), ("https", "MOORAGE_HTTP_URL")):
            shell.environment[variable] = f"{scheme}://127.0.0.1:{site.server_port},"
            shell.environment[variable] += secure[variable]
        shell.environment |= {"MOORAGE_CA_FILE": str(authority[0]), "MOORAGE_TOKEN": SECRET}
        for command in SIDES:
            done = shell(*command)
            assert done.returncode == 0, done.stderr
        assert site.shown == []
        shell.environment["MOORAGE_URL"] = f"wss://127.0.0.1:{site.server_port},wss://127.0.0.1:9"
        done = shell("leases")
    assert done.returncode == 4
    assert "none of 2 addresses serves: wss://127.0.0.1:" in done.stderr
    assert "signed by an authority that is not in" in done.stderr
    assert "Connection refused" in done.stderr


def test_a_token_file_is_read_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    monkeypatch.delenv("MOORAGE_TOKEN", raising=False)
    monkeypatch.setenv("MOORAGE_TOKEN_FILE", f" {file} ")
    (endpoint,) = Endpoint.of_socket("ws://a.example", None, None)
    for text, token in (("one\n", "one"), (" two ", "two"), ("\n", None)):
        file.write_text(text)
        assert bearer_of(endpoint) == token
    wrong = {"a\nb": "expected one token", "x" * 70_000: "longer than any token"}
    for text, sentence in wrong.items():
        file.write_text(text)
        with pytest.raises(SettingRefused, match=f"^MOORAGE_TOKEN_FILE: .*{sentence}"):
            bearer_of(endpoint)
    file.write_text("marked\r\n", encoding="utf-8-sig")
    assert bearer_of(endpoint) == "marked"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingRefused, match="it is not text"):
        bearer_of(endpoint)
    file.unlink()
    with pytest.raises(SettingRefused, match="No such file"):
        bearer_of(endpoint)
    (given,) = Endpoint.of_socket("ws://a.example", "given", None)
    assert bearer_of(given) == "given"

"""Tests of the sources of a policy's code: text, archives in text, paths, and real HTTP."""

import asyncio
import base64
import contextlib
import datetime as dt
import http.server
import io
import os
import socket
import ssl
import tarfile
import threading
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moorage.catalog.documents.sources import CODE_BYTES_MAX, CodeSources
from moorage.model import Code
from moorage.protocol.faults import ServiceError

POLICY = "class AIOSv1PolicyRule:\n    pass\n"
FILES = {"function.py": POLICY.encode()}


def archive():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("code/function.py")
        info.size = len(POLICY)
        tar.addfile(info, io.BytesIO(POLICY.encode()))
    return packed.getvalue()


def refusal(function, *arguments):
    with pytest.raises(ServiceError) as caught:
        function(*arguments)
    assert caught.value.field == "code"
    return caught.value


@pytest.mark.parametrize(
    "code",
    [
        POLICY,
        "class AIOSv1PolicyRule: pass",
        base64.b64encode(archive()).decode(),
        base64.encodebytes(archive()).decode(),
        "data:application/gzip;base64," + base64.b64encode(archive()).decode(),
        "data:text/x-python," + quote(POLICY),
        "data:text/x-python;base64," + base64.b64encode(POLICY.encode()).decode(),
    ],
    ids=["source", "one line", "base64", "wrapped base64", "data archive", "data text", "data b64"],
)
def test_code_may_be_in_the_document_itself(code):
    (name,) = CodeSources().files(code, None)
    assert name == "function.py"


@pytest.mark.parametrize(
    "code",
    [
        "H4sIAAAA!",
        "data:text/plain;base64",
        "data:;base64,%%%",
        "data:;base64,/////w==",
        "data:,",
        "x\n\0",
        "class AIOSv1PolicyRule: '\ud800'",
    ],
)
def test_damaged_code_is_refused(code):
    assert refusal(CodeSources().files, code, None).code is Code.BAD_POLICY


def test_a_path_to_code_is_refused_if_no_folder_of_code_is_configured():
    fault = refusal(CodeSources().files, "/etc/passwd", None)
    assert "has no `policy_code_root`" in fault.reason


@pytest.mark.parametrize("text", ["x = = 1", "# hi", "x=1", "<html>", '{"a": 1}', "import os"])
def test_a_single_line_of_code_counts_as_source_text_even_if_its_syntax_is_wrong(text):
    assert CodeSources().files(text, None) == {"function.py": text.encode()}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/rule.py", "s3://bucket/rule.py"])
def test_urls_of_code_with_another_scheme_than_http_and_https_are_refused(url):
    fault = refusal(CodeSources().files, url, None)
    assert f"code cannot be read from {url.partition(':')[0]}:// URLs" in fault.reason


def test_files_under_the_configured_folder_are_read(tmp_path):
    root = tmp_path / "rules"
    (root / "rule" / "code").mkdir(parents=True)
    (root / "rule" / "code" / "function.py").write_text(POLICY)
    (root / "flat").mkdir()
    (root / "flat" / "function.py").write_text(POLICY)
    (root / "one.py").write_text(POLICY)
    (root / "rule.tar.gz").write_bytes(archive())
    for code in ("rule", "flat", "one.py", "rule.tar.gz", str(root / "rule")):
        assert CodeSources(root=root).files(code, None) == FILES


def test_links_and_paths_that_lead_out_of_the_folder_are_refused(tmp_path):
    root = tmp_path / "rules"
    (root / "linked").mkdir(parents=True)
    (tmp_path / "secret.py").write_text(POLICY)
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    (root / "linked" / "function.py").symlink_to(tmp_path / "secret.py")
    os.mkfifo(root / "pipe")
    reasons = [
        refusal(CodeSources(root=root).files, code, None).reason
        for code in ("../secret.py", "link.py", str(tmp_path / "secret.py"), "linked", "pipe")
    ]
    assert [("leads out" in r, "special file" in r) for r in reasons] == [
        (True, False),
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "cannot be read" in refusal(CodeSources(root=root).files, "missing.py", None).reason


LOGIN = "Basic " + base64.b64encode(b"user:p@w").decode()


BODIES = {
    "/rule.tar.gz": archive(),
    "/large": bytes(CODE_BYTES_MAX + 1),
    "/secret": b"aws_secret_access_key = wJalrXUtnFEMI\n",
    "/secret.zip": b"PK\x03\x04 wJalrXUtnFEMI",
    "/secret.bin": b"\xff wJalrXUtnFEMI",
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, self.headers["host"]))
        body = BODIES.get(self.path)
        if self.path == "/private" and self.headers["authorization"] == LOGIN:
            body = archive()
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to"))
        else:
            self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        with contextlib.suppress(OSError):  # The client may have stopped reading.
            self.wfile.write(body or b"")

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(tls=None):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def host(server):
    return f"http://127.0.0.1:{server.server_port}"


HERE = frozenset({"127.0.0.1"})
"""A setting that allows downloads of code from this machine."""


async def fetch_refusal(code, **options):
    with pytest.raises(ServiceError) as caught:
        await CodeSources(**options).fetch(code)
    return caught.value


async def test_code_is_downloaded_from_a_url(host):
    fetcher = CodeSources(hosts=HERE)
    for path in ("/rule.tar.gz", "/to/rule.tar.gz", "/to/to/to/rule.tar.gz"):
        fetched = await fetcher.fetch(host + path)
        assert fetcher.files(host + path, fetched) == FILES
    assert await fetcher.fetch(POLICY) is None


async def test_code_may_always_come_from_the_policy_stores_host(host):
    code = host + "/rule.tar.gz"
    assert (await fetch_refusal(code)).code is Code.BAD_POLICY
    for hosts in (None, frozenset({"code.example"})):
        sources = CodeSources(hosts=hosts, store="127.0.0.1")
        assert sources.files(code, await sources.fetch(code)) == FILES
    assert (await fetch_refusal(code, store="policies.example")).code is Code.BAD_POLICY


async def test_credentials_of_a_url_are_sent_and_never_shown(host, caplog):
    url = host.replace("://", "://user:p%40w@")
    fetcher = CodeSources(hosts=HERE)
    with caplog.at_level("DEBUG"):
        for path in ("/private", "/to/private"):
            assert fetcher.files("", await fetcher.fetch(url + path)) == FILES
        for bad in (
            url + "/nothing",
            url + "/to/to/to/to/x",
            "http://user:p%40w@127.0.0.1:1/x",
            "http://user:p%40w@[::bad/x",
            "http://user:p%40w@/x",
        ):
            fault = await fetch_refusal(bad, hosts=HERE)
            assert "p%40w" not in repr((fault.reason, fault.expected, fault.details))
            assert "p@w" not in fault.reason
    assert caplog.records
    assert "p%40w" not in caplog.text
    assert LOGIN.split()[1] not in caplog.text
    assert "p@w" not in caplog.text


async def test_a_url_of_code_that_answers_without_code_is_refused(host):
    async def fault(code):
        return await fetch_refusal(code, hosts=HERE)

    assert "answered 404" in (await fault(host + "/nothing")).reason
    assert "redirects" in (await fault(host + "/to/to/to/to/rule.tar.gz")).reason
    large = await fault(host + "/large")
    assert large.code is Code.TOO_LARGE
    assert str(CODE_BYTES_MAX) in large.reason
    assert (await fault("http://127.0.0.1:1/x")).code is Code.UNAVAILABLE
    assert (await fault("http://[::bad/x")).code is Code.UNAVAILABLE
    assert (await fault("http:///x")).code is Code.BAD_POLICY


async def test_no_request_goes_to_a_host_that_is_not_allowed(host, server):
    fault = await fetch_refusal(host + "/rule.tar.gz", hosts=frozenset({"code.example"}))
    assert "127.0.0.1 is not allowed" in fault.reason
    assert "code.example" in fault.expected
    assert not server.requests
    away = f"/to//127.0.0.1:{server.server_port}/rule.tar.gz"
    for hosts in ({"localhost"}, {"localhost", "code.example"}):
        redirected = await fetch_refusal(
            f"http://localhost:{server.server_port}{away}",
            hosts=frozenset(hosts),
        )
        assert "127.0.0.1 is not allowed" in redirected.reason
    assert [path for path, _ in server.requests] == [away] * 2


THIS_MACHINE = (
    "127.0.0.1",
    "127.1",
    "2130706433",
    "0x7f.1",
    "0x7f000001",
    "017700000001",
    "0",
    "0.0.0.0",  # noqa: S104  # An address of this machine, without a listener.
    "localhost",
    "user:word@localhost",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[2002:7f00:1::]",
)


@pytest.mark.parametrize("name", [*THIS_MACHINE, "169.254.169.254", "100.100.100.200"])
async def test_hosts_that_are_not_public_get_no_request(server, name):
    fault = await fetch_refusal(f"http://{name}:{server.server_port}/secret")
    assert (fault.code, "is not public" in fault.reason) == (Code.BAD_POLICY, True)
    assert "`policy_code_hosts`" in fault.expected
    assert not server.requests


class Resolver:
    """A stand-in for name servers, with prepared answers."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, host, port, *arguments, **options):
        assert host == "code.example"
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in self.answers.pop(0)]


async def test_a_host_is_resolved_once_and_the_download_uses_only_the_resolved_address(
    server, monkeypatch
):
    resolver = Resolver(["127.0.0.2", "127.0.0.1"], ["169.254.169.254"])
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    fetcher = CodeSources(hosts=frozenset({"code.example"}))
    at = f"code.example:{server.server_port}"
    assert await fetcher.fetch(f"http://{at}/rule.tar.gz") == BODIES["/rule.tar.gz"]
    assert server.requests == [("/rule.tar.gz", at)]
    assert resolver.answers == [["169.254.169.254"]]


async def test_a_host_with_one_address_that_is_not_public_is_refused(server, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(["1.1.1.1", "127.0.0.1"]))
    fault = await fetch_refusal(f"http://code.example:{server.server_port}/secret")
    assert "code.example is not public" in fault.reason
    assert "127.0.0.1" not in fault.reason


async def test_no_proxy_of_the_environment_is_used(server, host, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, host)
    fault = await fetch_refusal("http://localhost:1/secret", hosts=frozenset({"localhost"}))
    assert fault.code is Code.UNAVAILABLE
    assert not server.requests


@pytest.mark.parametrize("path", ["/secret", "/secret.zip", "/secret.bin"])
async def test_downloaded_content_that_is_not_a_policy_is_not_quoted(host, path):
    fetcher = CodeSources(hosts=HERE)
    code = host.replace("://", "://user:word@") + path
    fault = refusal(fetcher.files, code, await fetcher.fetch(code))
    assert fault.reason.startswith(f"code: {host}{path} serves no policy; expected ")
    assert "wJalr" not in repr((fault.reason, fault.expected, fault.details))


async def test_an_answer_that_is_not_http_is_not_quoted():
    async def greet(reader, writer):
        writer.write(b"220 wJalrXUtnFEMI\r\n")
        writer.close()

    greeter = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = greeter.sockets[0].getsockname()[1]
    fault = await fetch_refusal(f"http://127.0.0.1:{port}/", hosts=HERE)
    greeter.close()
    await greeter.wait_closed()
    assert "could not be fetched: RemoteProtocolError" in fault.reason
    assert "wJalr" not in repr((fault.reason, fault.expected, fault.details))


@pytest.fixture
def tls(tmp_path, monkeypatch):
    """A certificate for the name `localhost`, which the test trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - dt.timedelta(1))
        .not_valid_after(now + dt.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "trusted.pem").write_bytes(certificate.public_bytes(pem))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "trusted.pem", tmp_path / "key.pem")
    context.named = []
    context.sni_callback = lambda _, named, context: context.named.append(named)
    return context


async def test_the_certificate_must_have_the_name_of_the_host(tls):
    with serving(tls) as server:
        fetcher = CodeSources(hosts=frozenset({"localhost", "127.0.0.1"}))
        at = f"localhost:{server.server_port}"
        assert await fetcher.fetch(f"https://{at}/rule.tar.gz") == BODIES["/rule.tar.gz"]
        assert tls.named == ["localhost"]
        fault = await fetch_refusal(
            f"https://127.0.0.1:{server.server_port}/rule.tar.gz", hosts=fetcher.hosts
        )
        assert "certificate" in fault.reason
        assert server.requests == [("/rule.tar.gz", at)]


def test_code_up_to_the_size_limit_is_accepted():
    padding = "#" * (CODE_BYTES_MAX - len(POLICY))
    assert CodeSources().files(POLICY + padding, None)["function.py"]
    assert refusal(CodeSources().files, POLICY + padding + "#", None).code is Code.TOO_LARGE

"""Where the code of a policy may come from: text, archives in text, paths, and real HTTP."""

import base64
import contextlib
import http.server
import io
import os
import tarfile
import threading
from urllib.parse import quote

import pytest

from moorage.catalog.sources import CODE_BYTES_MAX, CodeSources
from moorage.model import Code
from moorage.protocol.faults import ServiceError

RULE = "class AIOSv1PolicyRule:\n    pass\n"
FILES = {"function.py": RULE.encode()}


def archive():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("code/function.py")
        info.size = len(RULE)
        tar.addfile(info, io.BytesIO(RULE.encode()))
    return packed.getvalue()


def refused(function, *arguments):
    with pytest.raises(ServiceError) as caught:
        function(*arguments)
    assert caught.value.field == "code"
    return caught.value


@pytest.mark.parametrize(
    "code",
    [
        RULE,
        "class AIOSv1PolicyRule: pass",
        base64.b64encode(archive()).decode(),
        base64.encodebytes(archive()).decode(),
        "data:application/gzip;base64," + base64.b64encode(archive()).decode(),
        "data:text/x-python," + quote(RULE),
        "data:text/x-python;base64," + base64.b64encode(RULE.encode()).decode(),
    ],
    ids=["source", "one line", "base64", "wrapped base64", "data archive", "data text", "data b64"],
)
def test_code_in_the_document_itself(code):
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
    assert refused(CodeSources().files, code, None).code is Code.BAD_POLICY


def test_a_path_is_refused_where_no_folder_is_configured():
    fault = refused(CodeSources().files, "/etc/passwd", None)
    assert "has no `policy_code_root`" in fault.reason


@pytest.mark.parametrize("text", ["x = = 1", "# hi", "x=1", "<html>", '{"a": 1}', "import os"])
def test_text_of_one_line_is_source_text_whatever_is_wrong_with_it(text):
    assert CodeSources().files(text, None) == {"function.py": text.encode()}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/rule.py", "s3://bucket/rule.py"])
def test_other_urls_are_named(url):
    fault = refused(CodeSources().files, url, None)
    assert f"{url.partition(':')[0]}:// is nothing that code is read from" in fault.reason


def test_paths_under_the_configured_folder(tmp_path):
    root = tmp_path / "rules"
    (root / "rule" / "code").mkdir(parents=True)
    (root / "rule" / "code" / "function.py").write_text(RULE)
    (root / "flat").mkdir()
    (root / "flat" / "function.py").write_text(RULE)
    (root / "one.py").write_text(RULE)
    (root / "rule.tar.gz").write_bytes(archive())
    for code in ("rule", "flat", "one.py", "rule.tar.gz", str(root / "rule")):
        assert CodeSources(root=root).files(code, None) == FILES


def test_paths_out_of_the_folder_and_links_are_refused(tmp_path):
    root = tmp_path / "rules"
    (root / "linked").mkdir(parents=True)
    (tmp_path / "secret.py").write_text(RULE)
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    (root / "linked" / "function.py").symlink_to(tmp_path / "secret.py")
    os.mkfifo(root / "pipe")
    reasons = [
        refused(CodeSources(root=root).files, code, None).reason
        for code in ("../secret.py", "link.py", str(tmp_path / "secret.py"), "linked", "pipe")
    ]
    assert [("leads out" in r, "special file" in r) for r in reasons] == [
        (True, False),
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "cannot be read" in refused(CodeSources(root=root).files, "missing.py", None).reason


LOGIN = "Basic " + base64.b64encode(b"user:p@w").decode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"/rule.tar.gz": archive(), "/large": bytes(CODE_BYTES_MAX + 1)}.get(self.path)
        if self.path == "/private" and self.headers["authorization"] == LOGIN:
            body = archive()
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to"))
        else:
            self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        with contextlib.suppress(OSError):  # The client may have read enough.
            self.wfile.write(body or b"")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def host():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def fetch_refused(code, **options):
    with pytest.raises(ServiceError) as caught:
        await CodeSources(**options).fetch(code)
    return caught.value


async def test_code_behind_a_url(host):
    fetcher = CodeSources(hosts=frozenset({"127.0.0.1"}))
    for path in ("/rule.tar.gz", "/to/rule.tar.gz", "/to/to/to/rule.tar.gz"):
        fetched = await fetcher.fetch(host + path)
        assert fetcher.files(host + path, fetched) == FILES
    assert await fetcher.fetch(RULE) is None


async def test_credentials_are_sent_and_never_shown(host, caplog):
    url = host.replace("://", "://user:p%40w@")
    fetcher = CodeSources()
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
            fault = await fetch_refused(bad)
            assert "p%40w" not in repr((fault.reason, fault.expected, fault.details))
            assert "p@w" not in fault.reason
    assert caplog.records
    assert "p%40w" not in caplog.text
    assert LOGIN.split()[1] not in caplog.text
    assert "p@w" not in caplog.text


async def test_urls_that_do_not_serve_code(host):
    assert "answered 404" in (await fetch_refused(host + "/nothing")).reason
    assert "redirects" in (await fetch_refused(host + "/to/to/to/to/rule.tar.gz")).reason
    assert (await fetch_refused(host + "/large")).code is Code.TOO_LARGE
    assert (await fetch_refused("http://127.0.0.1:1/x")).code is Code.UNAVAILABLE
    assert (await fetch_refused("http://[::bad/x")).code is Code.UNAVAILABLE
    assert (await fetch_refused("http:///x")).code is Code.BAD_POLICY


async def test_hosts_that_are_not_allowed_are_never_asked(host):
    fault = await fetch_refused(host + "/rule.tar.gz", hosts=frozenset({"code.example"}))
    assert "127.0.0.1 is not allowed" in fault.reason
    assert "code.example" in fault.expected
    redirected = await fetch_refused(
        f"{host}/to//code.example/x".replace("127.0.0.1", "localhost"),
        hosts=frozenset({"localhost"}),
    )
    assert "not allowed" in redirected.reason
    assert "link-local" in (await fetch_refused("http://169.254.169.254/latest/")).reason
    assert "link-local" in (await fetch_refused("http://[::ffff:169.254.169.254]/latest/")).reason


def test_the_largest_code_is_the_stated_one():
    padding = "#" * (CODE_BYTES_MAX - len(RULE))
    assert CodeSources().files(RULE + padding, None)["function.py"]
    assert refused(CodeSources().files, RULE + padding + "#", None).code is Code.TOO_LARGE

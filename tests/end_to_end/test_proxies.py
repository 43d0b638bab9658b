"""The files of deploy/proxies work in a real nginx, Caddy and HAProxy before a real daemon."""

import asyncio
import contextlib
import http.server
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
import pytest
from served import FIRST_FIT, Server, bearing, cluster, invoke, serving, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Origin

from moorage.gateway.settings import GatewaySettings
from moorage.testing.daemon_process import child
from moorage_client import BlockingClient, Services
from moorage_policies import catalog
from tests.certificates import certificate, pem_of
from tests.ports import free_port

pytestmark = pytest.mark.heavy  # A daemon and proxies.

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "proxies"
TOKEN: Final = "a-long-random-secret"  # noqa: S105  # A test's value.
PING_SECONDS: Final = GatewaySettings().ping_interval_seconds
PROTO: Final = "x-forwarded-proto"
IDLE_SECONDS: Final = int(PING_SECONDS) + 5
UPGRADE: Final = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": "bW9vcmFnZS1tb29yYWdlIQ==",
    "Sec-WebSocket-Version": "13",
}
"""Headers with which an HTTP client opens a WebSocket, as WebSocket clients may hang in TLS."""
NGINX: Final = """
daemon off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    include site.conf;
}
"""
"""A stand-in for /etc/nginx/nginx.conf."""
PROXIES: Final = {
    "nginx": ("nginx.conf", "nginx -p . -e stderr -c main.conf"),
    "caddy": ("Caddyfile", "caddy run --config site.conf --adapter caddyfile"),
    "haproxy": ("haproxy.cfg", "haproxy -db -f site.conf"),
}
"""For each program: its file, and its command for a folder."""

Edit = Callable[[str], str]


def demand_certificates(text: str) -> str:
    """Enable the lines for client certificates in a file, as its comments describe."""
    return uncomment(re.sub(r"^ *bind .*\n(?=.*\n *#bind)", "", text, flags=re.MULTILINE))


def uncomment(text: str) -> str:
    """Enable the lines that have no space after `#`."""
    return re.sub(r"^(\s*)#(?=[\t\w}])", r"\1", text, flags=re.MULTILINE)


@dataclass(frozen=True)
class Site:
    """A proxy that serves a daemon.

    Args:
        http: URL of the HTTP services through it.
        ws: URL of the WebSocket through it.
        ca: The authority that signed the certificates of the proxy and of clients.
        client: Files of a client's certificate and of its key.
    """

    http: str
    ws: str
    ca: Path
    client: tuple[Path, Path]

    def context(self, *, certified: bool = False) -> ssl.SSLContext:
        """Return the TLS context of a client, with its certificate or without."""
        context = ssl.create_default_context(cafile=self.ca)
        if certified:
            context.load_cert_chain(*self.client)
        return context

    def status(self, path: str = "/policy", *, certified: bool = False, **headers: str) -> int:
        """Return the status of a page that needs the token."""
        context = self.context(certified=certified)
        url, shown = f"{self.http}{path}", bearing(TOKEN) | headers
        return httpx.get(url, headers=shown, verify=context, timeout=30).status_code

    def connect(self, *, certified: bool = False, origin: str | None = None) -> connect:
        """Open a WebSocket that does not send pings itself.

        Without threads: in TLS, a reading and a writing thread can block each other.
        """
        return connect(
            self.ws,
            ssl=self.context(certified=certified),
            additional_headers=bearing(TOKEN),
            origin=None if origin is None else Origin(origin),
            ping_interval=None,
        )


async def is_answered(connection: ClientConnection) -> bool:
    await connection.send(json.dumps({"op": "leases"}))
    success: bool = json.loads(await connection.recv())["success"]
    return success


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    variables = {
        "MOORAGE_TOKENS": f"team:{TOKEN}",
        "MOORAGE_LOG_LEVEL": "info",
        "MOORAGE_TRUSTED_PROXIES": "127.0.0.1",
    }
    with serving(tmp_path_factory.mktemp("data"), environment=variables) as server:
        yield server


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    return find_program(request.param)


def find_program(name: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here: apt-get install nginx-light caddy haproxy")
    return name


@pytest.fixture(scope="module")
def site(proxy: str, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A running proxy with its unchanged file of deploy/proxies."""
    with serve(proxy, server, tmp_path_factory.mktemp(proxy) / "proxy") as site:
        yield site


@contextlib.contextmanager
def serve(name: str, server: Server, folder: Path, edit: Edit = str) -> Iterator[Site]:
    """Run a proxy with its file of deploy/proxies, for other ports and other certificates."""
    folder.mkdir()
    file, command = PROXIES[name]
    authority = certificate("an authority")
    for who in ("server", "client"):
        pem, key = pem_of(*certificate(who, authority))
        (folder / f"{who}.pem").write_bytes(pem)
        (folder / f"{who}.key").write_bytes(key)
        (folder / f"{who}-and-key.pem").write_bytes(pem + key)
    (folder / "clients-ca.pem").write_bytes(pem_of(*authority)[0])
    port = free_port()
    text = edit((FOLDER / file).read_text())
    for place, here in {
        "/etc/moorage": str(folder),
        "127.0.0.1:8765": server.running.ws.partition("//")[2].rstrip("/"),
        "127.0.0.1:8080": server.running.http.partition("//")[2].rstrip("/"),
        "listen 443": f"listen 127.0.0.1:{port}",
        "bind :443": f"bind 127.0.0.1:{port}",
        "\nmoorage.example {": f"\nlocalhost:{port} {{\n\tbind 127.0.0.1",
        "server_name moorage.example": "server_name localhost",
    }.items():
        text = text.replace(place, here)
    if name == "caddy":  # Otherwise Caddy would also open the ports 80 and 2019.
        text = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text
    (folder / "site.conf").write_text(text)
    (folder / "main.conf").write_text(NGINX)
    site = Site(
        f"https://localhost:{port}",
        f"wss://localhost:{port}/ws",
        folder / "clients-ca.pem",
        (folder / "client.pem", folder / "client.key"),
    )
    own = {key: str(folder) for key in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            command.split(), cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log
        )
    try:
        # Another program may have taken the port, so check for our certificate.
        until(lambda: child.poll() is not None or is_ours(site))
        assert child.poll() is None, (folder / "log").read_text()
        yield site
    finally:
        child.terminate()
        child.wait(30)


def is_ours(site: Site) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return site.status(certified=True) == 200
    return False


def test_a_proxy_serves_both_ports_under_one_name(proxy: str, site: Site, server: Server) -> None:
    given = {"token": TOKEN, "ca_file": str(site.ca)}
    with Services(site.http, **given) as services, BlockingClient(site.ws, **given) as client:
        services.put_cluster(cluster(proxy))
        services.publish_policy(catalog.document("first_fit"))
        answer = client.ask(FIRST_FIT, resources={"gpus": 1}, lease={"ttl_seconds": 60})
        assert answer.lease.placement
        client.release(answer.lease.id, answer.lease.token)
    assert site.status("/console") == 200
    assert site.status(Authorization="") == 401
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(site.http)
    changes = [line for line in server.log().splitlines() if '"changed"' in line]
    assert json.loads(changes[-1])["forwarded_for"] == "127.0.0.1"


def test_the_audit_log_has_the_address_of_a_client_behind_a_proxy(
    proxy: str, site: Site, server: Server
) -> None:
    """The client connects from 127.0.0.2; the address in its own header is forged."""
    assert server.data is not None
    before = len(invoke("audit", "--json", "--data", server.data).stdout.splitlines())
    transport = httpx.HTTPTransport(verify=site.context(), local_address="127.0.0.2")
    headers = bearing("guessed") | {"X-Forwarded-For": "203.0.113.9"}
    with httpx.Client(transport=transport, base_url=site.http, headers=headers) as client:
        assert client.get("/policy").status_code == 401
        assert client.get("/ws", headers=UPGRADE).status_code == 401
        change = client.post("/clusters", json=cluster(f"at-{proxy}"), headers=bearing(TOKEN))
        assert change.status_code == 201, change.text

    def entries() -> list[dict]:
        lines = invoke("audit", "--json", "--data", server.data).stdout.splitlines()
        return [json.loads(line) for line in lines[before:]]

    until(lambda: len(entries()) >= 3)  # Failed logins over the WebSocket are written later.
    found = entries()
    assert {each["what"] for each in found} == {"login.failed", "POST /clusters"}
    assert {each["remote"] for each in found} == {"127.0.0.2"}
    assert {each["about"]["door"] for each in found[:-1]} == {"http", "websocket"}


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the headers of the request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.headers.items()).encode())


def test_proxies_say_that_the_browser_uses_tls(proxy: str, server: Server, tmp_path: Path) -> None:
    """The server sends this scheme to an issuer, and the client's own header is replaced."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.serve_forever)
        thread.start()
        running = replace(server.running, http=f"http://127.0.0.1:{echo.server_port}")
        with serve(proxy, Server(running, ""), tmp_path / "proxy") as site:
            forged = {"X-Forwarded-Proto": "http"}
            answer = httpx.get(f"{site.http}/a", headers=forged, verify=site.context())
            schemes = [value for name, value in answer.json() if name.lower() == PROTO]
        echo.shutdown()
        thread.join()
    assert schemes == ["https"]


async def test_through_a_proxy_a_page_reaches_the_websocket_under_the_name_of_the_page(
    site: Site,
) -> None:
    async with site.connect(origin=site.http) as connection:
        assert await is_answered(connection)
    assert site.status("/ws", **UPGRADE, Origin="https://elsewhere.example") == 403


def test_an_agent_joins_under_the_common_name_of_both_ports(
    proxy: str, site: Site, server: Server, tmp_path: Path
) -> None:
    made = invoke("agent", "token", "--cluster", f"boxes-{proxy}", "--data", server.data)
    place = ["--server", site.ws, "--data", tmp_path / "agent", "--token", made.stdout.strip()]
    command = [sys.executable, "-m", "moorage", "agent", *map(str, place), "--no-machine-id"]
    trusting = {**os.environ, "MOORAGE_CA_FILE": str(site.ca)}
    with child(command, tmp_path / "agent.log", trusting) as (_, ready):
        assert ready["cluster_id"] == f"boxes-{proxy}"


def test_an_upload_of_the_largest_size_passes_each_proxy(site: Site) -> None:
    answer = httpx.post(
        f"{site.http}/policy",
        content=b" " * (24 * 1024 * 1024),
        headers=bearing(TOKEN),
        verify=site.context(),
        timeout=60,
    )
    assert answer.headers["content-type"].startswith("application/json"), answer.text
    assert answer.status_code in {400, 413, 422}


async def test_clients_need_a_certificate_if_the_configuration_of_the_proxy_demands_it(
    proxy: str, server: Server, tmp_path: Path
) -> None:
    with serve(proxy, server, tmp_path / "proxy", demand_certificates) as site:
        assert site.status(certified=True) == 200
        async with site.connect(certified=True) as connection:
            assert await is_answered(connection)
        for path, headers in (("/policy", {}), ("/ws", UPGRADE)):
            if proxy == "nginx":
                assert site.status(path, **headers) == 400
            else:
                with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                    site.status(path, **headers)


def test_haproxy_with_both_lines_for_certificates_refuses_clients_without_a_certificate(
    server: Server, tmp_path: Path
) -> None:
    """Linux spreads connections over both lines; the test connects until it has met both."""
    seen = set()
    with serve(find_program("haproxy"), server, tmp_path / "proxy", uncomment) as site:
        for _ in range(40):
            with contextlib.suppress(httpx.TransportError):
                seen.add(site.status())
    assert seen == {403}


async def test_pings_keep_sockets_open_beyond_the_timeouts_of_the_proxies(
    server: Server, tmp_path: Path
) -> None:
    """All sockets wait at the same time; Caddy cuts none of them."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_socket(name: str, seconds: int) -> ClientConnection:
            def shorten(text: str) -> str:
                return text.replace("75s", f"{seconds}s")

            folder = tmp_path / f"{name}{seconds}"
            site = stack.enter_context(serve(find_program(name), server, folder, shorten))
            return await stack.enter_async_context(site.connect())

        cut = [await open_socket(name, int(PING_SECONDS / 10)) for name in ("nginx", "haproxy")]
        alive = [await open_socket(name, IDLE_SECONDS) for name in PROXIES]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(alive[-1].recv(), IDLE_SECONDS + 3)
        for connection in alive:
            assert await is_answered(connection)
        for connection in cut:
            with pytest.raises(ConnectionClosed):
                await connection.recv()


def test_timeouts_of_the_proxies_are_longer_than_two_pauses_between_pings() -> None:
    for file, _ in PROXIES.values():
        text = (FOLDER / file).read_text()
        found = re.findall(
            r"(?:read_timeout|send_timeout|timeout tunnel|timeout client) (\d+)s", text
        )
        assert all(int(each) > 2 * PING_SECONDS for each in found), file

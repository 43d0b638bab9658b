"""The files of deploy/proxies, in a real nginx, Caddy and HAProxy before a real daemon."""

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from served import FIRST_FIT, cluster, heard, moored, tell, until
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from moorage.gateway.settings import GatewaySettings
from moorage.testing.daemon_process import Running, child, daemon
from moorage_client import BlockingClient, Services
from moorage_policies import catalog
from tests.certificates import certificate, pem_of

pytestmark = pytest.mark.heavy  # A daemon and proxies.

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "proxies"
TOKEN: Final = "a-long-random-secret"  # noqa: S105  # Of these tests.
PING_SECONDS: Final = GatewaySettings().ping_interval_seconds
IDLE_SECONDS: Final = PING_SECONDS * 1.5
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
"""What /etc/nginx/nginx.conf is on a machine."""
PROXIES: Final = {
    "nginx": ("nginx.conf", "nginx -p . -e stderr -c main.conf"),
    "caddy": ("Caddyfile", "caddy run --config site.conf --adapter caddyfile"),
    "haproxy": ("haproxy.cfg", "haproxy -db -f site.conf"),
}
"""Program → its file, and how it is started over a folder."""

Edit = Callable[[str], str]


def demand_certificates(text: str) -> str:
    """Take the lines for certificates of clients into a file, as its comments say."""
    text = re.sub(r"^ *bind .*\n(?= *#bind)", "", text, flags=re.MULTILINE)
    return re.sub(r"^(\s*)#(?=[\t\w}])", r"\1", text, flags=re.MULTILINE)


def cut_idle_sockets(text: str) -> str:
    """Shorten the timeouts of idle WebSockets."""
    return text.replace("75s", "2s")


@dataclass(frozen=True)
class Site:
    """A proxy that serves a daemon.

    Args:
        http: URL of the HTTP services through it.
        ws: URL of the WebSocket through it.
        ca: The authority of its certificate and of clients.
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

    def status(self, *, certified: bool = False) -> int:
        """Return the status of a page that needs the token."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        context = self.context(certified=certified)
        url = f"{self.http}/policy"
        return httpx.get(url, headers=headers, verify=context, timeout=30).status_code

    def connect(self, *, certified: bool = False, origin: str | None = None) -> ClientConnection:
        """Open a WebSocket that sends no pings of its own."""
        return connect(
            self.ws,
            ssl=self.context(certified=certified),
            additional_headers={"Authorization": f"Bearer {TOKEN}"},
            origin=None if origin is None else Origin(origin),
            ping_interval=None,
            open_timeout=60,  # A handshake over TLS that is given up can leave its reader behind.
        )

    def say(
        self, message: dict[str, str], *, certified: bool = False, origin: str | None = None
    ) -> dict[str, Any]:
        """Send one message and return its reply."""
        with self.connect(certified=certified, origin=origin) as connection:
            connection.send(json.dumps(message))
            reply: dict[str, Any] = heard(connection)
            return reply


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def running(data: Path) -> Iterator[Running]:
    variables = {
        "MOORAGE_TOKENS": f"team:{TOKEN}",
        "MOORAGE_LOG_LEVEL": "info",
        "MOORAGE_BACKENDS": "local,memory",  # Agents are of it.
    }
    with daemon(data, environment=variables) as running:
        yield running


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here: apt-get install nginx-light caddy haproxy")
    return name


@contextlib.contextmanager
def serve(name: str, running: Running, folder: Path, edit: Edit = str) -> Iterator[Site]:
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
        "/etc/moored": str(folder),
        "127.0.0.1:8765": running.ws.partition("//")[2].rstrip("/"),
        "127.0.0.1:8080": running.http.partition("//")[2].rstrip("/"),
        "listen 443": f"listen 127.0.0.1:{port}",
        "bind :443": f"bind 127.0.0.1:{port}",
        "\nmoorage.example {": f"\nlocalhost:{port} {{\n\tbind 127.0.0.1",
        "server_name moorage.example": "server_name localhost",
    }.items():
        text = text.replace(place, here)
    if name == "caddy":  # It would open the ports 80 and 2019, too.
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
        # Another program may have taken the port meanwhile: this one has our certificate.
        until(lambda: child.poll() is not None or is_ours(site))
        assert child.poll() is None, (folder / "log").read_text()
        yield site
    finally:
        child.terminate()
        child.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_ours(site: Site) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return site.status(certified=True) == 200
    return False


def test_both_doors_under_one_name(proxy: str, running: Running, tmp_path: Path) -> None:
    with serve(proxy, running, tmp_path / "proxy") as site:
        given = {"token": TOKEN, "ca_file": str(site.ca)}
        with Services(site.http, **given) as services, BlockingClient(site.ws, **given) as client:
            services.put_cluster(cluster(proxy))
            services.publish_policy(catalog.document("first_fit"))
            answer = client.ask(FIRST_FIT, resources={"gpus": 1}, lease={"ttl_seconds": 60})
            assert answer.lease.placement
            client.release(answer.lease.id, answer.lease.token)
        with httpx.Client(verify=site.context(), timeout=30) as page:
            assert page.get(f"{site.http}/console").status_code == 200
            assert page.get(f"{site.http}/policy").status_code == 401
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(site.http)
    changes = [line for line in running.log.read_text().splitlines() if '"changed"' in line]
    assert json.loads(changes[-1])["forwarded_for"] == "127.0.0.1"


def test_a_page_reaches_the_websocket_under_its_own_name(
    proxy: str, running: Running, tmp_path: Path
) -> None:
    with serve(proxy, running, tmp_path / "proxy") as site:
        assert site.say({"op": "leases"}, origin=site.http)["success"]
        with pytest.raises(InvalidStatus, match="403"):
            site.say({"op": "leases"}, origin="https://elsewhere.example")


def test_an_agent_joins_under_the_name_of_both_doors(
    proxy: str, running: Running, data: Path, tmp_path: Path
) -> None:
    token = moored("agent", "token", "--cluster", f"boxes-{proxy}", "--data", data).stdout.strip()
    with serve(proxy, running, tmp_path / "proxy") as site:
        place = ["--server", site.ws, "--data", tmp_path / "agent", "--token", token]
        command = [sys.executable, "-m", "moorage", "agent", *map(str, place), "--no-machine-id"]
        trusting = {**os.environ, "MOORAGE_CA_FILE": str(site.ca)}
        with child(command, tmp_path / "agent.log", trusting) as (_, ready):
            assert ready["cluster_id"] == f"boxes-{proxy}"


def test_clients_need_a_certificate_where_the_file_demands_it(
    proxy: str, running: Running, tmp_path: Path
) -> None:
    with serve(proxy, running, tmp_path / "proxy", demand_certificates) as site:
        assert site.status(certified=True) == 200
        assert site.say({"op": "leases"}, certified=True)["success"]
        if proxy == "nginx":
            assert site.status() == 400
        else:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                site.status()
        with pytest.raises((InvalidStatus, InvalidMessage, ConnectionClosed, OSError, EOFError)):
            site.say({"op": "leases"})


def test_idle_sockets_stay_open(proxy: str, running: Running, tmp_path: Path) -> None:
    with serve(proxy, running, tmp_path / "proxy") as site, site.connect() as connection:
        with pytest.raises(TimeoutError):
            connection.recv(IDLE_SECONDS)
        assert tell(connection, {"op": "leases"})["success"]


@pytest.mark.parametrize("name", ["nginx", "haproxy"])  # Caddy cuts none.
def test_a_timeout_below_the_pings_cuts_idle_sockets(
    name: str, running: Running, tmp_path: Path
) -> None:
    """So the timeouts of the file are those that count."""
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here: apt-get install nginx-light haproxy")
    with (
        serve(name, running, tmp_path / "proxy", cut_idle_sockets) as site,
        site.connect() as connection,
        pytest.raises(ConnectionClosed),
    ):
        connection.recv(IDLE_SECONDS)


def test_timeouts_of_the_files_outlast_two_pings() -> None:
    for file, _ in PROXIES.values():
        text = (FOLDER / file).read_text()
        found = re.findall(
            r"(?:read_timeout|send_timeout|timeout tunnel|timeout client) (\d+)s", text
        )
        assert all(int(each) > 2 * PING_SECONDS for each in found), file


def test_an_upload_of_the_largest_size_passes(proxy: str, running: Running, tmp_path: Path) -> None:
    with serve(proxy, running, tmp_path / "proxy") as site:
        answer = httpx.post(
            f"{site.http}/policy",
            content=b" " * (24 * 1024 * 1024),
            headers={"Authorization": f"Bearer {TOKEN}"},
            verify=site.context(),
            timeout=60,
        )
        assert answer.headers["content-type"].startswith("application/json"), answer.text
        assert answer.status_code in {400, 413, 422}

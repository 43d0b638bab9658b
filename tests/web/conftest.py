"""Fixtures with a real HTTP server over a real catalog, on a free loopback port."""

import asyncio
import json
import ssl
import sys
from pathlib import Path

import httpx
import pytest

from moorage.catalog.opening import open_catalog
from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.rights import Caller, Role
from moorage.storage.sqlite.records import SqliteRecords
from moorage.web.connections import CONNECTIONS_MAX
from moorage.web.server import WebServer

sys.path.insert(0, str(Path(__file__).parent))  # Lets the tests here import `interface`.

from interface import Interface

CONTEXT = ssl.create_default_context()
"""The TLS context of all HTTP clients, since loading its authorities takes long."""


class House:
    """`WebServices` as in the daemon, but with a fixed policy instead of a jail."""

    def __init__(self, catalog, tokens):
        self.catalog = catalog
        self.tokens = tokens
        self.ready = True
        self.noted = []
        self.console = self.standby = None
        self.sign_in = {}
        self.tickets = SocketTickets(self.authenticate)
        self.clusters, self.metrics, self.blocks = catalog.clusters, catalog.metrics, catalog.blocks
        self.executors, self.policies = catalog.executors, catalog.policies
        self.publications = self.aliases = self.block_actions = self.ownership = self.audit = self
        self.holds = asyncio.Event()
        self.let_go = asyncio.Event()

    def authenticate(self, bearer):
        tenant = self.tokens.get(bearer)
        return None if tenant is None else Caller(tenant, Role.ADMIN)

    def pending(self, bearer):
        return None

    def why_refused(self, bearer):
        return "no token" if bearer is None else "the token is unknown"

    def note(self, entry):
        self.noted.append(entry)

    async def flush(self):
        return None

    def note_refusal(self, caller, remote, what, reason):
        self.noted.append((caller.tenant, what))

    def note_failed_login(self, remote, door, why):
        self.noted.append((remote, door))

    def check_cluster(self, caller, cluster_id):
        """Allow every caller to change every cluster."""

    check_new_cluster = check_alias = check_shadow = check_cluster
    check_metrics = check_block = check_cluster

    async def check_policy(self, caller, uri):
        """Allow every caller to change every policy."""

    check_executor = check_policy

    async def publish(self, document, who, remote):
        prepared = await self.catalog.policies.prepare(document)
        record = await self.catalog.policies.register(prepared, who)
        return record.ref.uri, prepared.warnings

    async def update(self, uri, change, who):
        return await self.catalog.policies.update(uri, change, who)

    async def delete(self, uri, who, *, force):
        assert not force  # This catalog has no aliases.
        return await self.catalog.policies.delete(uri, who)

    async def search(self, action, body, tenant):
        if "fault" in body:
            raise ServiceError(Code(body["fault"]), "no", field="fault")
        documents = [{"id": "c1", "action": action, "tenant": tenant, "body": body}]
        return documents, body.get("warnings", [])

    async def allocate(self, body, caller, remote, traceparent):
        if body == b"hold":
            self.holds.set()
            await self.let_go.wait()
        if body == b"break":
            raise RuntimeError("a bug")
        if body == b"busy":
            raise ServiceError(Code.BUSY, "later", details={"waiting": 3})
        data = [caller.tenant, len(body), *([traceparent] if traceparent else [])]
        return 200, json.dumps({"success": True, "data": data}).encode()

    def readiness(self):
        return self.ready, {"catalog": "open"}

    def history(self, caller, minutes, step):
        return {"tenant": caller.tenant, "minutes": minutes, "step": step}

    def metrics_text(self):
        return b"moorage_up 1\n"


class Site:
    """A running HTTP server with its services and a client."""

    def __init__(self, server, house, client, port):
        self.server, self.house, self.client, self.port = server, house, client, port


@pytest.fixture
def tokens():
    return {None: "local"}


@pytest.fixture(scope="session")
def server_interface():
    """The interface description of the first started server."""
    return {}


@pytest.fixture
def connections_max():
    return CONNECTIONS_MAX


@pytest.fixture
async def site(tmp_path, tokens, connections_max, server_interface):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    house = House(catalog, tokens)
    server = WebServer(house, connections_max=connections_max)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=CONTEXT
    ) as client:
        if not server_interface:
            token = next(iter(tokens))
            headers = {"authorization": f"Bearer {token}"} if token else {}
            answer = await client.get("/openapi.json", headers=headers)
            server_interface |= answer.raise_for_status().json()
        interface = Interface(server_interface)

        async def check(response):
            await response.aread()
            real = not response.request.url.path.startswith(("/allocate", "/api/"))
            interface.check(response.request, response, body=real)  # `House` reads these itself.

        client.event_hooks = {"response": [check]}
        yield Site(server, house, client, port)
    await server.close()
    await catalog.close()


@pytest.fixture
def client(site):
    return site.client

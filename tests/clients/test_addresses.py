"""Tests of clients with several addresses: the choice of a server, and reads at a standby."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest

from moorage.model import Code
from moorage_client import (
    AddressesFailed,
    BlockingClient,
    Client,
    ConnectionFailed,
    Services,
    SettingRefused,
    Unauthorized,
    addresses,
)
from moorage_client.addresses import Addresses
from moorage_client.endpoint import ADDRESSES_MAX, Endpoint
from moorage_client.errors import refusal
from tests.clients.conftest import Harbour, Shell
from tests.sites import Answer, Site


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of a port that accepts connections and never answers requests."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(100)
        yield f"ws://127.0.0.1:{taken.getsockname()[1]}"


def two(*harbours: Harbour) -> str:
    return ", ".join(each.url for each in harbours)


@pytest.fixture
def standby(harbour: Harbour, other: Harbour) -> Harbour:
    """The other harbour, as a standby that names the harbour as its leader."""
    other.standby, other.leader = True, harbour.url
    return other


async def lease_of(client: Client, policy: str = "first:1-x") -> str:
    lease = (await client.ask(policy, lease={"ttl_seconds": 60, "wait_seconds": 60})).lease
    assert lease is not None
    return lease.id


class TestWhichAddress:
    async def test_a_client_skips_an_address_at_which_no_server_answers(
        self, harbour, other, nowhere, deaf
    ):
        other.token = "of others"  # noqa: S105  # A test's value.
        for unfit in (nowhere, deaf, other.url):
            async with asyncio.timeout(60), Client(f"{unfit},{harbour.url}") as client:
                assert client.url == harbour.url
                assert await lease_of(client)

    async def test_the_error_quotes_each_server_if_none_answers(self, nowhere, harbour):
        harbour.token = "another"  # noqa: S105  # A test's value.
        with pytest.raises(AddressesFailed) as caught:
            await Client(f"{nowhere},{harbour.url}").__aenter__()
        assert str(caught.value) == (
            f"none of 2 addresses serves: {nowhere}: Connection refused;"
            f" {harbour.url}: Send a valid token. [unauthorized]"
        )
        with pytest.raises(Unauthorized):  # All servers refuse the token.
            await Client(two(harbour, harbour)).__aenter__()

    async def test_the_client_sends_its_token_to_each_configured_address(self, harbour, standby):
        async with Client(two(standby, harbour), "secret") as client:
            assert await lease_of(client)
        assert [*standby.headers, *harbour.headers] == ["Bearer secret"] * 2

    @pytest.mark.parametrize("urls", ["ws://a,,ws://b", "ws://a,", ",ws://a", "ws://a, ,ws://b"])
    def test_a_blank_address_is_refused(self, urls, monkeypatch):
        with pytest.raises(SettingRefused, match="url: expected addresses separated by commas"):
            Client(urls)
        monkeypatch.setenv("MOORAGE_URL", urls)
        with pytest.raises(SettingRefused, match="MOORAGE_URL: expected addresses"):
            Client()

    def test_addresses_with_a_wrong_scheme_and_too_many_addresses_are_refused(self, monkeypatch):
        monkeypatch.setenv("MOORAGE_URL", "ws://a,http://b")
        with pytest.raises(SettingRefused, match="ws:// or wss://"):
            Client()
        urls = ",".join(f"ws://h{number}" for number in range(ADDRESSES_MAX + 1))
        with pytest.raises(SettingRefused, match="at most 16"):
            Client(urls)
        assert len(Endpoint.of_socket("ws://a,ws://a", None, None)) == 1, "duplicates count once"


class TestTheWriter:
    async def test_a_client_follows_a_standby_to_the_named_leader(self, harbour, standby):
        async with Client(two(standby, harbour)) as client:
            assert await lease_of(client)
            assert client.url == harbour.url
            assert await client.manage("first:1-x", "poke") == {"did": "poke"}, "it is sent once"
        assert standby.count("ask") == harbour.count("ask") == 1

    async def test_a_client_follows_a_standby_to_a_leader_that_is_not_configured(
        self, harbour, standby
    ):
        async with Client(standby.url, "secret", reconnect_seconds=0.1) as client:
            assert await lease_of(client)
            assert harbour.headers == ["Bearer secret"]
        third = Harbour()
        third.start()
        harbour.standby, harbour.leader = True, third.url  # A client does not follow it.
        async with Client(standby.url, "secret", reconnect_seconds=0.1) as client:
            with pytest.raises(AddressesFailed, match="from an address that you did not name"):
                await client.ask("first:1-x", lease={})
        assert third.headers == []
        third.end()

    async def test_a_standby_answers_reads(self, harbour, standby):
        async with Client(two(standby, harbour)) as client:
            assert [each["cluster_id"] async for each in client.fleet()] == ["c0"]
            assert client.url == standby.url
        assert harbour.heard == []

    async def test_a_standby_that_knows_no_leader_is_tried_again(self, harbour, other):
        harbour.standby = other.standby = True
        async with Client(two(other, harbour)) as client:
            asking = asyncio.create_task(lease_of(client))
            heard = [harbour, other]
            await asyncio.to_thread(other.wait_for, lambda: all(h.count("ask") for h in heard))
            harbour.standby = False
            assert await asking

    async def test_standbys_that_name_each_other_as_leader_cause_an_error(self, harbour, standby):
        harbour.standby, harbour.leader = True, standby.url
        async with Client(two(harbour, standby), reconnect_seconds=0.4) as client:
            with pytest.raises(AddressesFailed) as caught:
                await client.ask("first:1-x", lease={})
        assert caught.value.said == {
            harbour.url: f"is a standby, and names {standby.url} as the writer",
            standby.url: f"is a standby, and names {harbour.url} as the writer",
        }
        assert harbour.count("ask") + standby.count("ask") < 30

    async def test_a_standby_that_names_itself_as_leader_is_not_followed(self, harbour):
        harbour.standby, harbour.leader = True, harbour.url
        async with Client(harbour.url, reconnect_seconds=0.1) as client:
            with pytest.raises(ConnectionFailed, match="which is itself"):
                await client.ask("first:1-x", lease={})

    @pytest.mark.parametrize(
        ("by", "leader", "why"),
        [
            ("wss://a.example", "ws://b.example", "it is not wss://"),
            ("ws://a.example", "wss://b.example", "it is not ws://"),
            ("wss://a.example", "http://b.example", "it is not wss://"),
            ("wss://a.example", "wss://me:secret@b.example", "it has a user's name"),
            ("ws://a.example", "ws://127.0.0.1:9", "it is this machine"),
            ("ws://a.example", "ws://localhost:9", "it is this machine"),
            ("ws://a.example", "ws://[::1", "not a URL"),
            ("ws://a.example", "ws://", "not a URL"),
            ("ws://a.example", "ws://b:99999", "not a URL"),
            ("ws://a.example", "ws://b\x1b[31m", "not a URL"),
            ("ws://a.example", "\n", "not a URL"),
            ("ws://a.example", ["ws://b"], "not a URL"),
            ("ws://a.example", 5, "not a URL"),
        ],
    )
    def test_a_client_does_not_follow_a_named_leader_that_may_not_have_the_token(
        self, by, leader, why
    ):
        (endpoint,) = Endpoint.of_socket(by, "secret", None)
        addresses = Addresses([endpoint])
        said = refusal(Code.NOT_LEADER, "no", details={"leader": leader})
        assert not addresses.redirected(endpoint, said)
        assert why in addresses.word_of(endpoint)
        assert addresses.order() == [endpoint]

    def test_the_client_uses_the_same_token_and_authority_for_a_named_leader(self):
        (endpoint,) = Endpoint.of_socket("wss://a.example", "secret", "ca.pem")
        addresses = Addresses([endpoint])
        named = {"leader": "wss://b.example:8765/"}
        assert addresses.redirected(endpoint, refusal(Code.NOT_LEADER, "no", details=named))
        led = addresses.order()[0]
        assert (led.url, led.token, led.ca_file) == ("wss://b.example:8765", "secret", "ca.pem")
        assert led.named_by == endpoint.url


class TestATakeover:
    async def test_waiting_requests_go_to_the_next_leader_with_their_keys(self, harbour, standby):
        async with Client(two(harbour, standby)) as client:
            waiting = [asyncio.create_task(lease_of(client, "slow:1-x")) for _ in range(5)]
            await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("ask") == 5)
            await asyncio.to_thread(harbour.stop)
            await asyncio.to_thread(standby.wait_for, lambda: standby.count("ask") >= 5)
            standby.take_over(harbour)
            standby.gate.set()
            assert len({*await asyncio.gather(*waiting)}) == 5
        keys = [
            [each["lease"]["idempotency_key"] for each in at.heard if "op" not in each]
            for at in (harbour, standby)
        ]
        assert {*keys[0]} == {*keys[1]}
        assert len(keys[0]) == 5

    async def test_a_session_that_a_standby_cannot_resume_moves_to_the_leader(self, harbour, other):
        harbour.names_sessions = other.names_sessions = True
        other.standby, other.leader = True, None
        async with Client(two(harbour, other)) as client:
            waiting = asyncio.create_task(lease_of(client, "slow:1-x"))
            await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("ask") == 1)
            (session,) = harbour.sessions
            await asyncio.to_thread(harbour.stop)
            await asyncio.to_thread(other.wait_for, lambda: other.count("ask") >= 2)
            other.take_over(harbour)
            other.gate.set()
            assert await waiting
        resumed = [each["session"] for each in other.heard if each.get("op") == "resume"]
        assert set(resumed) == {session}
        assert len(resumed) >= 2, "once at the standby, once at the writer"

    @pytest.mark.heavy  # It waits for seconds without a sign of life.
    async def test_the_client_leaves_a_leader_that_stops_answering(self, harbour, standby):
        async with Client(two(harbour, standby)) as client:
            assert await lease_of(client)
            await asyncio.to_thread(harbour.freeze)
            standby.take_over(harbour)
            async with asyncio.timeout(20):
                assert await lease_of(client)
            assert client.url == standby.url
            harbour.lose_sockets()  # Otherwise the end of the test waits for them.

    async def test_a_client_keeps_its_lease_over_a_takeover(self, harbour, standby):
        client = Client(two(harbour, standby))
        async with client, client.lease("first:1-x", ttl_seconds=3) as held:
            await asyncio.to_thread(harbour.stop)
            standby.take_over(harbour)
            await asyncio.to_thread(standby.wait_for, lambda: standby.count("renew") >= 1)
            held.check()
            assert (await client.renew(held.id, held.token)).id == held.id
            assert client.url == standby.url
        assert standby.leases[held.id]["state"] == "ended"

    async def test_a_watch_continues_at_another_server(self, harbour, other):
        async with Client(two(harbour, other)) as client:
            news = client.watch("leases")
            coming = asyncio.create_task(anext(news))
            await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("watch") == 1)
            await asyncio.to_thread(harbour.stop)
            event = await coming
            assert (event.event, event.data["url"]) == ("reconnected", other.url)
            await news.aclose()

    def test_a_watch_that_looks_for_a_server_can_be_closed(self, harbour, other):
        with BlockingClient(two(harbour, other), reconnect_seconds=600) as client:
            news = client.watch("leases")
            for each in (harbour, other):
                each.stop()
            news.close()  # Otherwise it would look for a server for ten minutes.
            assert news.next() is None


class Registry(Site):
    """A server that answers as one without policies, or as a standby, and records requests."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, str | None]] = []
        self.refusal: dict[str, str | None] | None = None
        self.cuts = False
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        self.heard.append((request.command, request.path, request.headers.get("Authorization")))
        if self.cuts:
            return None
        if self.refusal is None:
            return 200, {"success": True, "data": []}
        error = {"code": "not_leader", "reason": "It stands by.", **self.refusal}
        return 421, {"success": False, "message": "It stands by.", "error": error}


@pytest.fixture
def sites() -> Iterator[tuple[Registry, Registry]]:
    with Registry() as one, Registry() as another:
        yield one, another


class TestHttp:
    def test_an_address_without_a_server_is_skipped(self, sites, nowhere):
        gone = nowhere.replace("ws", "http")
        with Services(f"{gone},{sites[0].url}") as services:
            assert services.policies() == []
            assert services.url == sites[0].url

    def test_a_standby_leads_an_http_client_to_the_leader(self, sites):
        standby, writer = sites
        standby.refusal = {"leader": "ws://127.0.0.1:9", "leader_http": writer.url}
        with Services(standby.url, "secret") as services:
            assert services.policies() == []
            assert services.policies() == []
        assert len(standby.heard) == 1, "later requests go to the writer at once"
        assert writer.heard == [("POST", "/policy/query", "Bearer secret")] * 2

    def test_a_standby_that_knows_no_leader_is_tried_again(self, sites):
        standby, other = sites
        standby.refusal = other.refusal = {"leader_http": None}
        with ThreadPoolExecutor() as pool, Services(f"{standby.url},{other.url}") as services:
            asking = pool.submit(services.policies)
            while not (standby.heard and other.heard):
                time.sleep(0.01)  # A site has no event for its requests.
            other.refusal = None
            assert asking.result(60) == []

    def test_requests_that_may_not_be_repeated_are_sent_only_once(self, sites):
        one, another = sites
        one.cuts = True
        with Services(f"{one.url},{another.url}") as services:
            with pytest.raises(ConnectionFailed):
                services.roll_back_policy("first")
            assert another.heard == []
            assert services.policies() == []


class TestTheCommandLine:
    def test_the_option_url_takes_several_addresses(self, standby, shell: Shell, nowhere):
        done = shell("--url", f"{nowhere},{standby.url}", "ask", "first:1-x", "--lease", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["lease"]["id"] == "l-1"

    def test_the_error_names_each_failed_or_wrong_address(self, shell: Shell, nowhere):
        shell.environment["MOORAGE_URL"] = f"{nowhere},ws://127.0.0.1:1"
        done = shell("leases")
        assert done.returncode == 4
        assert f"none of 2 addresses serves: {nowhere}: Connection refused; ws" in done.stderr
        assert "Check the addresses in --url" in done.stderr
        wrong = shell("--url", "ws://a,http://b", "leases")
        assert wrong.returncode == 2
        assert "--url: expected ws://HOST:PORT, got 'http://b'" in wrong.stderr.replace("\n", " ")


async def test_the_client_finds_the_next_leader_at_once_when_a_server_stops(
    harbour: Harbour, other: Harbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_PAUSES_OF_SEVERAL", (1_000.0,))
    async with asyncio.timeout(60), Client(two(harbour, other)) as client:
        asked = asyncio.create_task(lease_of(client, "slow:1-x"))
        await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("ask"))
        other.gate.set()
        await asyncio.to_thread(harbour.stop)  # The sockets close with 1012.
        assert await asked in other.leases
        other.refusals["first:1-x"] = {"code": "shutting_down", "reason": "It stops."}
        harbour.gate.set()
        harbour.start()
        assert await lease_of(client) in harbour.leases

"""Several addresses: which server a client goes to, and what it does where that is a standby."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
)
from moorage_client.addresses import Addresses
from moorage_client.endpoint import ADDRESSES_MAX, Endpoint
from moorage_client.errors import refusal
from tests.clients.conftest import Harbour, Shell


@pytest.fixture
def deaf() -> Iterator[str]:
    """A URL where connections are taken and never answered."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(100)
        yield f"ws://127.0.0.1:{taken.getsockname()[1]}"


def two(*harbours: Harbour) -> str:
    return ", ".join(each.url for each in harbours)


async def lease_of(client: Client, policy: str = "first:1-x") -> str:
    lease = (await client.ask(policy, lease={"ttl_seconds": 60, "wait_seconds": 60})).lease
    assert lease is not None
    return lease.id


class TestWhichAddress:
    async def test_an_address_without_a_server_is_passed_over(self, harbour, nowhere):
        async with Client(f"{nowhere},{harbour.url}") as client:
            assert client.url == harbour.url
            assert await lease_of(client)

    async def test_an_address_that_never_answers_holds_up_nothing(self, harbour, deaf):
        async with asyncio.timeout(5), Client(f"{deaf},{harbour.url}") as client:
            assert await lease_of(client)

    async def test_an_answer_of_another_kind_is_passed_over(self, harbour, other):
        other.token = "of others"  # noqa: S105  # Of the test.
        async with Client(two(other, harbour)) as client:
            assert await lease_of(client)

    async def test_where_none_answers_each_says_what_it_said(self, nowhere, harbour):
        harbour.token = "another"  # noqa: S105  # Of the test.
        with pytest.raises(AddressesFailed) as caught:
            await Client(f"{nowhere},{harbour.url}").__aenter__()
        assert str(caught.value) == (
            f"none of 2 addresses serves: {nowhere}: Connection refused;"
            f" {harbour.url}: Send a valid token. [unauthorized]"
        )

    async def test_where_all_refuse_the_token_that_is_the_answer(self, harbour, other):
        harbour.token = other.token = "another"  # noqa: S105  # Of the test.
        with pytest.raises(Unauthorized):
            await Client(two(harbour, other)).__aenter__()

    async def test_the_token_goes_to_each_that_was_named(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(other, harbour), "secret") as client:
            assert await lease_of(client)
        assert [*other.headers, *harbour.headers] == ["Bearer secret"] * 2

    @pytest.mark.parametrize("urls", ["ws://a,,ws://b", "ws://a,", ",ws://a", "ws://a, ,ws://b"])
    def test_a_blank_address_is_refused(self, urls, monkeypatch):
        with pytest.raises(SettingRefused, match="url: expected addresses separated by commas"):
            Client(urls)
        monkeypatch.setenv("MOORAGE_URL", urls)
        with pytest.raises(SettingRefused, match="MOORAGE_URL: expected addresses"):
            Client()

    def test_an_address_of_another_scheme_in_the_environment_is_refused(self, monkeypatch):
        monkeypatch.setenv("MOORAGE_URL", "ws://a,http://b")
        with pytest.raises(SettingRefused, match="ws:// or wss://"):
            Client()

    def test_more_addresses_than_may_be_named_are_refused(self):
        urls = ",".join(f"ws://h{number}" for number in range(ADDRESSES_MAX + 1))
        with pytest.raises(SettingRefused, match="at most 16"):
            Client(urls)

    def test_an_address_that_is_named_twice_counts_once(self):
        assert len(Endpoint.of_socket("ws://a,ws://a", None, None)) == 1


class TestTheWriter:
    async def test_a_standby_leads_to_the_writer_that_was_named(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(other, harbour)) as client:
            assert await lease_of(client)
            assert client.url == harbour.url
        assert other.count("ask") == harbour.count("ask") == 1

    async def test_a_standby_leads_to_a_writer_that_was_not_named(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(other.url, "secret") as client:
            assert await lease_of(client)
        assert harbour.headers == ["Bearer secret"]

    async def test_the_word_of_a_writer_that_was_not_named_is_not_followed(self, harbour, other):
        third = Harbour()
        third.start()
        other.standby, other.leader = True, harbour.url
        harbour.standby, harbour.leader = True, third.url
        async with Client(other.url, "secret", reconnect_seconds=0.1) as client:
            with pytest.raises(AddressesFailed, match="you did not name the one that says so"):
                await client.ask("first:1-x", lease={})
        assert third.headers == []
        third.end()

    async def test_what_a_standby_can_answer_it_answers(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(other, harbour)) as client:
            assert [each["cluster_id"] async for each in client.fleet()] == ["c0"]
            assert client.url == other.url
        assert harbour.heard == []

    async def test_what_may_not_be_repeated_is_sent_to_the_writer(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(other, harbour)) as client:
            assert await client.manage("first:1-x", "poke") == {"did": "poke"}

    async def test_a_standby_that_knows_no_writer_is_tried_again(self, harbour, other):
        harbour.standby = other.standby = True
        async with Client(two(other, harbour)) as client:
            asking = asyncio.create_task(lease_of(client))
            heard = [harbour, other]
            await asyncio.to_thread(other.wait_for, lambda: all(h.count("ask") for h in heard))
            harbour.standby = False
            assert await asking

    async def test_standbys_that_name_each_other_end_in_a_sentence(self, harbour, other):
        harbour.standby, harbour.leader = True, other.url
        other.standby, other.leader = True, harbour.url
        async with Client(two(harbour, other), reconnect_seconds=1.0) as client:
            with pytest.raises(AddressesFailed) as caught:
                await client.ask("first:1-x", lease={})
        assert caught.value.said == {
            harbour.url: f"is a standby, and names {other.url} as the writer",
            other.url: f"is a standby, and names {harbour.url} as the writer",
        }
        assert harbour.count("ask") + other.count("ask") < 30

    async def test_a_standby_that_names_itself_is_none_that_leads_on(self, harbour):
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
            ("ws://a.example", "ws://[::1", "no URL"),
            ("ws://a.example", "ws://", "no URL"),
            ("ws://a.example", "ws://b:99999", "no URL"),
            ("ws://a.example", "ws://b\x1b[31m", "no URL"),
            ("ws://a.example", "\n", "no URL"),
            ("ws://a.example", ["ws://b"], "no URL"),
            ("ws://a.example", 5, "no URL"),
        ],
    )
    def test_a_writer_that_may_not_have_the_token_is_not_followed(self, by, leader, why):
        (endpoint,) = Endpoint.of_socket(by, "secret", None)
        addresses = Addresses([endpoint])
        assert not addresses.redirected(
            endpoint, refusal(Code.NOT_LEADER, "no", details={"leader": leader})
        )
        assert why in addresses.word_of(endpoint)
        assert addresses.order() == [endpoint]

    def test_a_writer_has_the_token_and_the_authority_of_who_names_it(self):
        (endpoint,) = Endpoint.of_socket("wss://a.example", "secret", "ca.pem")
        addresses = Addresses([endpoint])
        named = {"leader": "wss://b.example:8765/"}
        assert addresses.redirected(endpoint, refusal(Code.NOT_LEADER, "no", details=named))
        led = addresses.order()[0]
        assert (led.url, led.token, led.ca_file) == ("wss://b.example:8765", "secret", "ca.pem")
        assert led.named_by == endpoint.url


class TestATakeover:
    async def test_a_lost_writer_is_replaced_and_leases_are_held_on(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(harbour, other)) as client:
            lease = (await client.ask("first:1-x", lease={"ttl_seconds": 60})).lease
            await asyncio.to_thread(harbour.stop)
            other.take_over(harbour)
            assert (await client.renew(lease.id, lease.token)).id == lease.id
            assert client.url == other.url

    async def test_what_waits_is_sent_to_the_next_writer_with_its_key(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(harbour, other)) as client:
            waiting = [asyncio.create_task(lease_of(client, "slow:1-x")) for _ in range(5)]
            await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("ask") == 5)
            await asyncio.to_thread(harbour.stop)
            await asyncio.to_thread(other.wait_for, lambda: other.count("ask") >= 5)
            other.take_over(harbour)
            other.gate.set()
            assert len({*await asyncio.gather(*waiting)}) == 5
        keys = [
            [each["lease"]["idempotency_key"] for each in at.heard if "op" not in each]
            for at in (harbour, other)
        ]
        assert {*keys[0]} == {*keys[1]}
        assert len(keys[0]) == 5

    async def test_a_session_is_resumed_at_the_writer_where_a_standby_cannot(self, harbour, other):
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
        assert len(resumed) >= 2, "once of the standby, once of the writer"

    async def test_a_writer_that_gives_no_sign_of_life_is_left(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        async with Client(two(harbour, other)) as client:
            assert await lease_of(client)
            await asyncio.to_thread(harbour.freeze)
            other.take_over(harbour)
            async with asyncio.timeout(20):
                assert await lease_of(client)
            assert client.url == other.url
            harbour.lose_sockets()  # Else they are waited for at the end.

    async def test_a_lease_is_kept_over_a_takeover(self, harbour, other):
        other.standby, other.leader = True, harbour.url
        client = Client(two(harbour, other))
        async with client, client.lease("first:1-x", ttl_seconds=3) as held:
            await asyncio.to_thread(harbour.stop)
            other.take_over(harbour)
            await asyncio.to_thread(other.wait_for, lambda: other.count("renew") >= 2)
            held.check()
        assert other.leases[held.id]["state"] == "ended"

    async def test_news_go_on_at_another_server(self, harbour, other):
        async with Client(two(harbour, other)) as client:
            news = client.watch("leases")
            coming = asyncio.create_task(anext(news))
            await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("watch") == 1)
            await asyncio.to_thread(harbour.stop)
            event = await coming
            assert (event.event, event.data["url"]) == ("reconnected", other.url)
            await news.aclose()

    async def test_news_of_one_address_end_with_its_server(self, harbour):
        async with Client(harbour.url) as client:
            coming = asyncio.create_task(anext(client.watch("leases")))
            await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("watch") == 1)
            await asyncio.to_thread(harbour.stop)
            with pytest.raises(ConnectionFailed):
                await coming

    def test_news_that_look_for_a_server_can_be_closed(self, harbour, other):
        with BlockingClient(two(harbour, other), reconnect_seconds=600) as client:
            news = client.watch("leases")
            for each in (harbour, other):
                each.stop()
            news.close()  # It would look on for ten minutes.
            assert news.next() is None


class Door(BaseHTTPRequestHandler):
    """Answers with no policies, or as a standby does; notes what came."""

    server: "Site"

    def answer(self) -> None:
        site = self.server
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        site.heard.append((self.command, self.path, self.headers.get("Authorization")))
        if site.cuts:
            self.close_connection = True
            return
        body = {"success": True, "data": []}
        if site.refusal is not None:
            error = {"code": "not_leader", "reason": "It stands by.", **site.refusal}
            body = {"success": False, "message": "It stands by.", "error": error}
        text = json.dumps(body).encode()
        self.send_response(200 if site.refusal is None else 421)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815  # The names http.server looks for.

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class Site(ThreadingHTTPServer):
    """A registry over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Door)
        self.heard: list[tuple[str, str, str | None]] = []
        self.refusal: dict[str, str | None] | None = None
        self.cuts = False
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.serving = threading.Thread(target=self.serve_forever, args=(0.02,))
        self.serving.start()

    def server_close(self) -> None:
        self.shutdown()
        self.serving.join()
        super().server_close()


@pytest.fixture
def sites() -> Iterator[tuple[Site, Site]]:
    with Site() as one, Site() as another:
        yield one, another


class TestHttp:
    def test_an_address_without_a_server_is_passed_over(self, sites, nowhere):
        gone = nowhere.replace("ws", "http")
        with Services(f"{gone},{sites[0].url}") as services:
            assert services.policies() == []
            assert services.url == sites[0].url

    def test_a_standby_leads_to_the_writer(self, sites):
        standby, writer = sites
        standby.refusal = {"leader": "ws://127.0.0.1:9", "leader_http": writer.url}
        with Services(standby.url, "secret") as services:
            assert services.policies() == []
            assert services.policies() == []
        assert len(standby.heard) == 1, "then it goes to the writer at once"
        assert writer.heard == [("POST", "/policy/query", "Bearer secret")] * 2

    def test_a_standby_that_knows_no_writer_is_tried_again(self, sites):
        standby, other = sites
        standby.refusal = other.refusal = {"leader_http": None}
        with ThreadPoolExecutor() as pool, Services(f"{standby.url},{other.url}") as services:
            asking = pool.submit(services.policies)
            while not (standby.heard and other.heard):
                time.sleep(0.01)  # A site tells no thread what it heard.
            other.refusal = None
            assert asking.result(60) == []

    def test_what_may_not_be_repeated_is_not(self, sites):
        one, another = sites
        one.cuts = True
        with Services(f"{one.url},{another.url}") as services:
            with pytest.raises(ConnectionFailed):
                services.roll_back_policy("first")
            assert another.heard == []
            assert services.policies() == []

    def test_where_none_answers_each_says_what_it_said(self, nowhere):
        gone = nowhere.replace("ws", "http")
        with (
            Services(f"{gone},http://127.0.0.1:1") as services,
            pytest.raises(AddressesFailed, match=r"http://127\.0\.0\.1:1: Connection refused"),
        ):
            services.policies()

    def test_a_writer_of_other_security_is_not_followed(self, sites):
        standby, writer = sites
        standby.refusal = {"leader_http": writer.url.replace("http", "https")}
        with (
            Services(standby.url, "secret", reconnect_seconds=0.1) as services,
            pytest.raises(ConnectionFailed, match="it is not http://"),
        ):
            services.policies()
        assert writer.heard == []


class TestTheCommandLine:
    def test_it_takes_several_addresses(self, harbour, other, shell: Shell, nowhere):
        other.standby, other.leader = True, harbour.url
        done = shell("--url", f"{nowhere},{other.url}", "ask", "first:1-x", "--lease", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["lease"]["id"] == "l-1"

    def test_it_names_each_address_that_failed(self, shell: Shell, nowhere, deaf):
        shell.environment["MOORAGE_URL"] = f"{nowhere},ws://127.0.0.1:1"
        done = shell("leases")
        assert done.returncode == 4
        assert f"none of 2 addresses serves: {nowhere}: Connection refused; ws" in done.stderr
        assert "the addresses of --url are right" in done.stderr

    def test_a_wrong_address_among_several_is_a_wrong_command_line(self, shell: Shell):
        done = shell("--url", "ws://a,http://b", "leases")
        assert done.returncode == 2
        assert "--url: expected ws://HOST:PORT, got 'http://b'" in done.stderr.replace("\n", " ")

"""With `resume`, a session that lost its connection continues over a new one without losses."""

import asyncio
import contextlib
import json
from typing import Self
from urllib.parse import urlsplit

import pytest
from cut_proxy import cut_proxy
from served import FIRST_FIT, Server, ask_message, policy, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from moorage.gateway.settings import INFLIGHT_MAX
from moorage_client import Client

ALL = {"gpus": 4, "models": ["A100"], "nodes": 2}
PATIENT = {"ttl_seconds": 60, "wait_seconds": 60}


@pytest.fixture(scope="module")
def proxy(server):
    with cut_proxy(urlsplit(server.running.ws).port) as proxy:
        yield proxy


class Talk:
    """One connection, and the session that it belongs to."""

    def __init__(self, url: str) -> None:
        # With a bound, hundreds of unread answers would delay the close by 10 s.
        self._opened = connect(url, compression=None, max_queue=None)
        self.socket = self._opened.__enter__()
        self.session = self.socket.response.headers["Moorage-Session"]

    def send(self, **message) -> None:
        self.socket.send(json.dumps(message))

    def heard(self) -> dict:
        return json.loads(self.socket.recv(30))

    def say(self, **message) -> dict:
        self.send(**message)
        return self.heard()

    def resume(self, session: str) -> dict:
        return self.say(op="resume", session=session, id="back")

    def closed(self) -> None:
        """Wait until the connection is closed."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.heard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)


def wait_for_all(name):
    return ask_message(FIRST_FIT, resources=ALL, lease=PATIENT, id=name)


def hold_all(server: Server) -> dict:
    reply = server.ask(FIRST_FIT, resources=ALL, lease={"ttl_seconds": 120})
    assert reply["success"], reply
    server.leases = [reply["lease"]]
    return reply["lease"]


def waiting(server: Server) -> list[str]:
    return [each["request"] for each in server.waiting()]


def test_a_waiter_of_a_lost_session_keeps_its_place_and_gets_its_answer_once(server, proxy):
    held = hold_all(server)
    with Talk(server.running.ws) as other, Talk(proxy.url) as lost:
        lost.send(**wait_for_all("first"))
        until(lambda: len(waiting(server)) == 1)
        other.send(**wait_for_all("second"))
        until(lambda: len(waiting(server)) == 2)
        (first, second) = waiting(server)
        proxy.cut()
        lost.closed()
        with Talk(proxy.url) as back:
            reply = back.resume(lost.session)
            assert reply["id"] == "back"
            assert reply["data"] == {
                "session": lost.session,
                "open": ["first"],
                "waiting": [{"request": first, "message": "first", "position": 1}],
                "leases": [],
                "topics": [],
            }
            assert waiting(server) == [first, second]
            server.release(held)
            granted = back.heard()
            assert (granted["id"], granted["lease"]["id"]) == ("first", first)
            server.release(granted["lease"])
            later = other.heard()
            assert later["lease"]["id"] == second
            server.release(later["lease"])
            with pytest.raises(TimeoutError):
                back.socket.recv(0.2)


def open_sessions(server: Server) -> int:
    return server.metric("moorage_sessions")


def requests(server: Server) -> int:
    return server.metric("moorage_asks_total")


def test_repeated_waiting_requests_delay_no_renewal_in_their_session(server):
    held = hold_all(server)
    with Talk(server.running.ws) as first, Talk(server.running.ws) as second:
        keys = [PATIENT | {"idempotency_key": f"again-{n}"} for n in range(INFLIGHT_MAX)]
        asks = [ask_message(resources=ALL, lease=key, id=n) for n, key in enumerate(keys)]
        for talk in (first, second):
            for ask in asks:
                talk.send(**ask)
            until(lambda: server.metric("moorage_waiting") == INFLIGHT_MAX)
        renewed = second.say(op="renew", lease=held["id"], token=held["token"], id="held")
        assert (renewed["id"], renewed["success"]) == ("held", True)
        server.say(*({"op": "cancel", "request": f"again-{n}"} for n in range(INFLIGHT_MAX)))


def test_requests_that_are_repeated_before_the_first_one_waits_delay_no_renewal(server):
    slow = policy("import time; time.sleep(1); return {}", "declines:1-x")
    server.publish({**slow, "deadline_seconds": 30})
    held = server.ask(FIRST_FIT, resources={"gpus": 1}, lease={"ttl_seconds": 120})["lease"]
    server.leases = [held]
    terms = PATIENT | {"idempotency_key": "undecided"}
    ask = ask_message("declines:1-x", resources={"gpus": 1}, lease=terms)
    with Talk(server.running.ws) as first, Talk(server.running.ws) as second:
        first.send(**ask, id="first")
        for number in range(INFLIGHT_MAX):
            second.send(**ask, id=number)
        until(lambda: server.metric("moorage_waiting") == 1)
        renewed = second.say(op="renew", lease=held["id"], token=held["token"], id="held")
        assert (renewed["id"], renewed["success"]) == ("held", True)
        server.say({"op": "cancel", "request": "undecided"})


def test_a_repeated_request_is_known_by_the_id_of_its_message(server, proxy):
    hold_all(server)
    ask = wait_for_all("again")
    ask["lease"] = PATIENT | {"idempotency_key": "known"}
    with Talk(server.running.ws) as first, Talk(proxy.url) as second:
        first.send(**ask)
        until(lambda: len(waiting(server)) == 1)
        second.send(**ask)
        (request,) = waiting(server)
        proxy.cut()
        second.closed()
        with Talk(proxy.url) as back:
            resumed = back.resume(second.session)["data"]
            place = {"request": request, "message": "again", "position": 1}
            assert resumed["waiting"] == [place]
            back.send(op="cancel", request="again", id="cancel")
            replies = {reply["id"]: reply for reply in (back.heard(), back.heard())}
            assert replies["cancel"]["success"]
            assert replies["again"]["error"]["code"] == "cancelled"
            assert first.heard() == replies["again"]


def test_after_a_resume_watched_topics_continue_with_the_missed_news(server, proxy):
    with Talk(proxy.url) as lost:
        lost.say(op="watch", topics=["leases", "map"], id=1)
        proxy.cut()
        lost.closed()
    until(lambda: open_sessions(server) == 0)
    held = hold_all(server)
    with Talk(proxy.url) as back:
        assert back.resume(lost.session)["data"]["topics"] == ["leases", "map"]
        first: dict[str, dict] = {}
        while len(first) < 2:
            news = back.heard()
            first.setdefault(news["topic"], news)
        assert first["leases"]["event"] == "granted"
        assert first["leases"]["data"]["id"] == held["id"]
        assert first["map"]["event"] == "snapshot", "the whole map instead of its changes"
        server.release(held)


async def test_the_client_resumes_by_itself_and_its_requests_keep_their_places(server, proxy):
    """The client loses its connection twice; during the second loss a request is granted."""
    held = hold_all(server)

    async def has_sessions(count: int) -> None:
        await asyncio.to_thread(until, lambda: open_sessions(server) == count)

    async with Client(proxy.url) as client, asyncio.TaskGroup() as tasks:
        answers = []
        for number in range(2):
            coming = client.ask(FIRST_FIT, resources=ALL, lease=PATIENT)
            answers.append(tasks.create_task(coming))
            await asyncio.to_thread(until, lambda number=number: len(waiting(server)) > number)
        places, sent = waiting(server), requests(server)
        with proxy.closed():
            await has_sessions(0)
        await has_sessions(1)
        assert waiting(server) == places
        with proxy.closed():
            await has_sessions(0)
            server.release(held)
            await asyncio.to_thread(until, lambda: len(waiting(server)) == 1)
        for answer, place in zip(answers, places, strict=True):
            lease = (await answer).lease
            assert lease.id == place
            await client.release(lease.id, lease.token)
        assert requests(server) == sent, "nothing is sent again"

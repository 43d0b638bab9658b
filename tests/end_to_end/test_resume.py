"""`resume`: a session that lost its connection goes on over another one, and nothing is lost."""

import asyncio
import json
from typing import Self
from urllib.parse import urlsplit

import pytest
from cut_proxy import cut_proxy
from served import FIRST_FIT, Server, ask_message, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from moorage_client import Client

ALL = {"gpus": 4, "models": ["A100"], "nodes": 2}
PATIENT = {"ttl_seconds": 60, "wait_seconds": 60}


@pytest.fixture(scope="module")
def proxy(server):
    with cut_proxy(urlsplit(server.running.ws).port) as proxy:
        yield proxy


class Talk:
    """One connection, and the session that it speaks for."""

    def __init__(self, url: str, token: str = "") -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._opened = connect(url, compression=None, additional_headers=headers)
        self.socket = self._opened.__enter__()
        self.session = self.socket.response.headers["Moorage-Session"]

    def send(self, **message) -> None:
        self.socket.send(json.dumps(message))

    def heard(self) -> dict:
        return json.loads(self.socket.recv(30))

    def heard_or_closed(self) -> dict | int:
        """Return what comes next, or the code that the server closed with."""
        try:
            return self.heard()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else 0

    def say(self, **message) -> dict:
        self.send(**message)
        return self.heard()

    def resume(self, session: str) -> dict:
        return self.say(op="resume", session=session, id="back")

    def closed(self) -> int:
        """Wait until the connection is closed; return the code."""
        while type(came := self.heard_or_closed()) is dict:
            pass
        return came

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)


def wait_for_all(number, **terms):
    return ask_message(FIRST_FIT, resources=ALL, lease=PATIENT | terms, id=number)


def hold_all(server: Server) -> dict:
    reply = server.ask(FIRST_FIT, resources=ALL, lease={"ttl_seconds": 120})
    assert reply["success"], reply
    server.leases = [reply["lease"]]
    return reply["lease"]


def waiting(server: Server) -> list[str]:
    return [each["request"] for each in server.waiting()]


def test_a_waiter_keeps_its_place_and_its_answer_comes_once(server, proxy):
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


def test_what_is_granted_while_it_is_away_is_held_for_it(server, proxy):
    held = hold_all(server)
    with Talk(proxy.url) as lost:
        lost.send(**wait_for_all("mine"))
        until(lambda: waiting(server))
        proxy.cut()
        lost.closed()
        until(lambda: open_sessions(server) == 0)
        server.release(held)
        until(lambda: not waiting(server))
    with Talk(proxy.url) as back:
        granted = back.resume(lost.session)
        assert granted["id"] == "mine"
        reply = back.heard()
        assert reply["id"] == "back"
        assert reply["data"]["open"] == reply["data"]["waiting"] == []
        (lease,) = reply["data"]["leases"]
        assert lease == {"message": "mine", "lease": granted["lease"]}
        server.release(granted["lease"])


def open_sessions(server: Server) -> int:
    return server.metric("moorage_sessions")


def asks(server: Server) -> int:
    return server.metric("moorage_asks_total")


def test_watched_topics_go_on_and_what_happened_meanwhile_is_told(server, proxy):
    with Talk(proxy.url) as lost:
        lost.say(op="watch", topics=["leases", "map"], id=1)
        proxy.cut()
        lost.closed()
    until(lambda: open_sessions(server) == 0)
    held = hold_all(server)
    with Talk(proxy.url) as back:
        assert back.resume(lost.session)["data"]["topics"] == ["leases", "map"]
        told: dict[str, dict] = {}
        while len(told) < 2:
            news = back.heard()
            told.setdefault(news["topic"], news)
        assert told["leases"]["event"] == "granted"
        assert told["leases"]["data"]["id"] == held["id"]
        assert told["map"]["event"] == "snapshot", "the whole map, not what changed in it"
        server.release(held)


async def test_the_client_resumes_by_itself_and_keeps_its_places(server, proxy):
    held = hold_all(server)
    async with Client(proxy.url) as client, asyncio.TaskGroup() as tasks:
        asked = []
        for number in range(2):
            coming = client.ask(FIRST_FIT, resources=ALL, lease=PATIENT)
            asked.append(tasks.create_task(coming))
            await asyncio.to_thread(until, lambda number=number: len(waiting(server)) > number)
        places, sent = waiting(server), asks(server)
        for _ in range(3):
            with proxy.closed():
                await asyncio.to_thread(until, lambda: open_sessions(server) == 0)
            await asyncio.to_thread(until, lambda: open_sessions(server) == 1)
        assert waiting(server) == places
        server.release(held)
        for task, place in zip(asked, places, strict=True):
            answer = await task
            assert answer.lease.id == place
            await client.release(answer.lease.id, answer.lease.token)
        assert asks(server) == sent, "nothing is asked again"


async def test_what_was_granted_while_a_client_was_cut_off_reaches_it(server, proxy):
    held = hold_all(server)
    async with Client(proxy.url) as client:
        task = asyncio.create_task(client.ask(FIRST_FIT, resources=ALL, lease=PATIENT))
        await asyncio.to_thread(until, lambda: waiting(server))
        places, sent = waiting(server), asks(server)
        with proxy.closed():
            await asyncio.to_thread(until, lambda: open_sessions(server) == 0)
            server.release(held)
            await asyncio.to_thread(until, lambda: not waiting(server))
        answer = await task
        assert [answer.lease.id] == places
        assert asks(server) == sent
        await client.release(answer.lease.id, answer.lease.token)

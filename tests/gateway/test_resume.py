"""Tests of a session without a connection: its buffer, lifetime and resumption."""

import asyncio
import json

import pytest

from moorage.gateway.settings import HELD_BYTES_MAX
from moorage.model import Tenant
from moorage.protocol.codes import Close
from moorage.protocol.replies import event
from moorage.records.rights import Caller, Role

LONG = 600.0
"""Seconds for which a lost session is held: longer than any test takes."""


@pytest.fixture
async def port(open_port):
    return await open_port(resume_seconds=LONG)


async def lose(port, client):
    """Cut a connection, and wait until the server has noticed."""
    client.socket.transport.abort()
    await until_none_is_open(port)


async def park(port, count):
    """Return a client of `count` parked requests whose connection is lost."""
    client = await port.client()
    for n in range(count):
        await client.ask(n, "park", id=n)
    await port.harbour.until(lambda: len(port.harbour.held) == count)
    await lose(port, client)
    return client


async def until_none_is_open(port):
    async with asyncio.timeout(30):
        while port.gateway.stats().sessions:  # noqa: ASYNC110  # No event reports a count.
            await asyncio.sleep(0.01)  # There is no event to wait for.


async def test_replies_and_news_of_a_lost_session_are_buffered_and_sent_in_order(port):
    client = await park(port, 3)
    port.harbour.answer(1)
    port.gateway.push(client.session, event("moved", {"n": 1}, "fleet"))
    port.harbour.answer(0)
    back = await port.client()
    first = await back.resume(client.session, id="back")
    said = [first, *[await back.reply() for _ in range(3)]]
    assert [each.get("id") for each in said] == [1, 0, "back", None]
    assert said[2]["data"] == {"open": [2]}
    assert said[3]["event"] == "moved"
    port.harbour.answer(2)
    assert (await back.reply())["id"] == 2
    assert list(port.harbour.sessions) == [client.session]


async def test_a_resumed_session_answers_messages_without_ids_in_order(port):
    client = await port.client()
    for n in range(3):
        await client.ask(n, "park")
    await port.harbour.until(lambda: len(port.harbour.held) == 3)
    await lose(port, client)
    port.harbour.answer(2)
    back = await port.client()
    assert (await back.resume(client.session))["data"] == {"open": [None] * 3}
    await back.ask(3)
    port.harbour.answer(1)
    port.harbour.answer(0)
    assert [await back.data() for _ in range(4)] == [0, 1, 2, {"n": 3}]


@pytest.mark.parametrize("code", [Close.NORMAL, Close.GOING_AWAY, Close.DEFECT])
async def test_a_normal_close_ends_a_session_and_an_abnormal_close_does_not(port, code):
    client = await port.client()
    await client.socket.close(code)
    await until_none_is_open(port)
    if code is not Close.DEFECT:
        await port.harbour.until(lambda: bool(port.harbour.ever) and not port.harbour.sessions)
    reply = await (await port.client()).resume(client.session)
    found = "success" if reply["success"] else reply["error"]["code"]
    assert found == ("success" if code is Close.DEFECT else "not_found")


@pytest.mark.parametrize("settings", [{"resume_seconds": 0.1}, {}])
async def test_a_session_that_is_not_resumed_in_time_ends(open_port, settings):
    port = await open_port(**settings)
    client = await port.client()
    await client.ask(1, "park", id=1)
    await port.harbour.until(lambda: bool(port.harbour.held))
    client.socket.transport.abort()
    await port.harbour.until(lambda: not port.harbour.sessions)
    port.harbour.answer(1)  # The client of this request is gone.
    reply = await (await port.client()).resume(client.session)
    assert reply["error"]["code"] == "not_found"


async def test_too_many_buffered_replies_end_a_lost_session(port):
    client = await park(port, 3)
    port.harbour.answer(0, "x" * (HELD_BYTES_MAX - 1_000))
    assert client.session in port.harbour.sessions
    port.harbour.answer(1, "x" * 1_000)
    assert client.session not in port.harbour.sessions
    port.harbour.answer(2)


async def test_news_that_exceed_the_buffer_of_a_lost_session_are_counted(port):
    client = await port.client()
    assert await client.answers(0)
    await lose(port, client)
    for size in (100, HELD_BYTES_MAX, 100):
        port.gateway.push(client.session, event("moved", {"x": "x" * size}, "fleet"))
    back = await port.client()
    assert (await back.resume(client.session))["success"]
    assert (await back.reply())["event"] == "moved"
    missed = await back.reply()
    assert (missed["event"], missed["data"]) == ("missed", {"missed": 2})


async def test_lost_sessions_of_one_address_are_bounded(open_port):
    port = await open_port(resume_seconds=LONG, sessions_max=4)
    lost = []
    for number in range(5):
        client = await port.client()
        assert await client.answers(number)
        lost.append(client.session)
        await lose(port, client)
    assert list(port.harbour.sessions) == lost[2:]


async def test_only_its_own_tenant_can_resume_a_session(open_port):
    port = await open_port(resume_seconds=LONG)
    mine, others = ({"Authorization": f"Bearer token-{name}"} for name in "ab")
    client = await port.client(additional_headers=mine)
    await lose(port, client)
    other = await port.client(additional_headers=others)
    refused = await other.resume(client.session)
    unknown = await (await port.client(additional_headers=others)).resume("0" * 32)
    assert refused == unknown
    back = await port.client(additional_headers=mine)
    assert (await back.resume(client.session))["success"]


async def test_a_removed_token_ends_a_disconnected_session(open_port):
    callers = {"old": Caller(Tenant("a"), Role.CLIENT)}
    port = await open_port(authenticate=callers.get, resume_seconds=LONG)
    client = await port.client(additional_headers={"Authorization": "Bearer old"})
    await lose(port, client)
    del callers["old"]
    port.gateway.expel()
    assert not port.harbour.sessions


async def test_a_stop_of_the_gateway_ends_disconnected_sessions(port):
    await park(port, 1)
    await port.gateway.close()
    assert not port.harbour.sessions


async def test_resume_must_be_the_first_message(port):
    client = await port.client()
    error = (await client.resume(client.session))["error"]
    assert (error["code"], error["field"]) == ("not_found", "session"), "its own session is in use"
    assert await client.answers(0)
    reply = await client.resume(client.session, id=1)
    assert (reply["id"], reply["error"]["code"]) == (1, "bad_message")


async def test_a_message_resumes_a_session_although_its_operation_has_an_escape(port):
    client = await park(port, 1)
    back = await port.client()
    resume = json.dumps({"op": "resume", "session": client.session})
    await back.say(resume.replace("resume", "res\\u0075me"))
    assert (await back.reply())["data"] == {"open": [0]}


async def test_sessions_are_resumed_while_messages_arrive(port):
    """Resume a busy session repeatedly: each message is answered, or was never received."""
    client = await port.client()
    for turn in range(20):
        for n in range(10):
            await client.ask(n, "hold" if n % 2 else "", id=f"{turn}-{n}")
        taker = await port.client()
        await taker.say(json.dumps({"op": "resume", "session": port.harbour.ever[0], "id": "t"}))
        while (reply := await taker.reply())["id"] != "t":
            pass
        assert await client.close_code() == Close.RESUMED
        still_open = reply["data"]["open"]
        for n in list(port.harbour.held):
            port.harbour.answer(n)
        assert {(await taker.reply())["id"] for _ in still_open} == set(still_open)
        client = taker
    assert port.harbour.sessions.keys() == {port.harbour.ever[0]}

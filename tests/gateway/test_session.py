"""A session sends replies in their order, and loses no message under load."""

import asyncio
import json
import random

import pytest
from websockets.frames import CloseCode


async def test_replies_with_ids_come_as_soon_as_they_are_ready(port):
    client = await port.client()
    for n in range(5):
        await client.ask(n, "hold", id=f"id-{n}")
    await client.ask("in line", "hold")
    await client.ask("beside it", id=7)
    assert (await client.reply())["id"] == 7
    await port.harbour.until(lambda: len(port.harbour.held) == 6)
    for n in (3, 1, 4, 0, 2):
        port.harbour.answer(n)
        reply = await client.reply()
        assert (reply["id"], reply["data"]) == (f"id-{n}", n)
    port.harbour.answer("in line")
    assert await client.data() == "in line"


async def test_an_invalid_message_gets_an_error_and_the_socket_stays_open(port):
    client = await port.client()
    for frame, code in (
        *((each, "bad_message") for each in (b'{"adhoc": true}', b"", b"\xff\x00")),
        *(("{", "bad_json"), ('{"adhoc": true}', "missing_fields")),
    ):
        await client.say(frame)
        refused = await client.reply()
        assert (refused["success"], refused["error"]["code"]) == (False, code)
        assert isinstance(frame, str) or "send JSON as a text message" in refused["message"]
        assert await client.answers()


async def test_text_that_is_not_utf_8_closes_the_connection(port):
    client = await port.client()
    await client.socket.send(b"\xff", text=True)
    assert await client.close_code() == CloseCode.INVALID_DATA


async def test_any_mix_of_messages_gets_its_replies_in_order_and_only_once(port):
    dice = random.Random(7)
    client = await port.client()
    kinds = [
        dice.choice(["hold", "hold with id", "", "with id", "bad", "binary"]) for _ in range(200)
    ]
    for n, kind in enumerate(kinds):
        if kind == "bad":
            await client.say("[]")
        elif kind == "binary":
            await client.say(b"{}")
        elif "id" in kind:
            await client.ask(n, "hold" if "hold" in kind else "", id=n)
        else:
            await client.ask(n, kind)
    held = sum("hold" in kind for kind in kinds)
    await port.harbour.until(lambda: len(port.harbour.held) == held)
    for n in dice.sample(list(port.harbour.held), held):
        port.harbour.answer(n)
    replies = [await client.reply() for _ in kinds]
    with_id = {reply["id"] for reply in replies if "id" in reply}
    assert with_id == {n for n, kind in enumerate(kinds) if "id" in kind}
    line = [reply.get("data", "refused") for reply in replies if "id" not in reply]
    expected = {"hold": lambda n: n, "": lambda n: {"n": n}}
    assert line == [
        expected.get(kind, lambda _: "refused")(n)
        for n, kind in enumerate(kinds)
        if "id" not in kind
    ]
    assert port.gateway.stats().in_flight == 0


async def test_messages_that_wait_for_room_keep_their_order(port):
    client = await port.client()
    await client.ask(0, "wait")
    await client.ask(1, "wait")
    await client.ask(2)
    await client.say("{}")
    # The first request waits for space, so no later one was admitted.
    assert await (await port.client()).answers("other")
    assert port.harbour.taken == ["other"]
    port.harbour.room.set()
    assert [(await client.data())["n"] for _ in range(3)] == [0, 1, 2]
    assert (await client.reply())["success"] is False
    assert port.harbour.taken == ["other", 0, 1, 2]


async def test_many_messages_of_one_read_are_handled_in_order(port):
    client = await port.client()
    protocol = client.socket.protocol
    for n in range(30):
        inputs = {"n": n, "do": "wait" if n == 3 else ""}
        message = {"adhoc": True, "policy_rule_uri": "p:1-a", "inputs": inputs}
        protocol.send_text(json.dumps(message).encode())
    client.socket.transport.write(b"".join(protocol.data_to_send()))
    await port.harbour.until(lambda: port.harbour.waiting > 0)
    port.harbour.room.set()
    assert [(await client.data())["n"] for _ in range(30)] == list(range(30))
    assert port.harbour.taken == list(range(30))


async def test_a_slow_request_with_an_id_delays_no_other_request(port):
    client = await port.client()
    await client.ask(0, "wait", id="slow")
    await client.ask(1, id="quick")
    await client.ask(2)
    assert (await client.reply())["id"] == "quick"
    assert await client.data() == {"n": 2}
    port.harbour.room.set()
    assert (await client.reply())["id"] == "slow"


async def test_messages_that_wait_for_room_before_a_close_are_read(port):
    client = await port.client()
    for n in range(5):
        await client.ask(n, "wait", **({"id": n} if n % 2 else {}))
    client.socket.transport.abort()
    port.harbour.room.set()
    await port.harbour.until(lambda: bool(port.harbour.ever) and not port.harbour.sessions)
    assert sorted(port.harbour.taken) == list(range(5))


# Back-pressure -------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"id": 1}])
async def test_at_the_limit_of_open_requests_a_session_stops_reading_and_drops_no_message(
    open_port, fields
):
    port = await open_port(inflight_max=4)
    client = await port.client()
    for n in range(50):
        await client.ask(n, "hold", **fields)
    for n in range(50):
        await port.harbour.until(lambda n=n: n in port.harbour.held)
        assert len(port.harbour.held) <= 4
        assert port.gateway.stats().in_flight <= 4
        port.harbour.answer(n)
    assert [await client.data() for _ in range(50)] == list(range(50))


async def test_replies_that_wait_for_earlier_replies_count_for_the_limit(open_port):
    port = await open_port(inflight_max=4)
    client = await port.client()
    await client.ask("first", "hold")
    for n in range(20):
        await client.ask(n)
    await port.harbour.until(lambda: port.harbour.taken == ["first", 0, 1, 2])
    assert await (await port.client()).answers("other")
    assert port.harbour.taken == ["first", 0, 1, 2, "other"]
    port.harbour.answer("first")
    assert await client.data() == "first"
    assert [(await client.data())["n"] for _ in range(20)] == list(range(20))


async def test_a_session_at_its_limit_does_not_hold_up_another_session(open_port):
    port = await open_port(inflight_max=1)
    full, free = await port.client(), await port.client()
    for n in range(3):
        await full.ask(n, "hold")
    for n in range(10, 20):
        assert await free.answers(n)


async def test_parked_messages_leave_room_for_a_cancel(open_port):
    port = await open_port(inflight_max=2, parked_max=10)
    client = await port.client()
    for n in range(10):
        await client.ask(n, "park", id=n)
    await client.ask("cancel", id="c")
    assert (await client.reply())["id"] == "c"
    assert port.gateway.stats().parked == 10
    port.harbour.answer(4)
    assert (await client.reply())["id"] == 4
    assert port.gateway.stats().parked == 9


async def test_parked_messages_beyond_their_limit_count_as_open(open_port):
    port = await open_port(inflight_max=2, parked_max=3)
    client = await port.client()
    for n in range(20):
        await client.ask(n, "park", id=n)
    await port.harbour.until(lambda: len(port.harbour.held) == 5)
    assert await (await port.client()).answers("other")
    assert len(port.harbour.held) == 5
    for n in range(20):
        await port.harbour.until(lambda n=n: n in port.harbour.held)
        port.harbour.answer(n)
    assert {(await client.reply())["id"] for _ in range(20)} == set(range(20))


async def test_messages_beyond_the_limit_are_refused_as_busy(open_port):
    port = await open_port(inflight_max=8, parked_max=20)
    client = await port.client()
    patient = {"lease": {"wait_seconds": 60}}
    for n in range(50):
        await client.ask(n, "park", id=n, **patient)
    replies = [await client.reply() for _ in range(30)]
    assert {reply["error"]["code"] for reply in replies} == {"busy"}
    assert {reply["id"] for reply in replies} == set(range(20, 50))
    assert "20 requests of this connection wait" in replies[0]["message"]
    await client.ask("not patient", id="a", lease={"wait_seconds": 0})
    assert (await client.reply())["id"] == "a"
    port.harbour.answer(3)
    assert (await client.reply())["id"] == 3
    await client.ask(99, "park", id=99, **patient)  # Now there is space for one more.
    await port.harbour.until(lambda: 99 in port.harbour.held)
    assert port.gateway.stats().parked == 20


async def test_a_socket_that_the_server_does_not_read_for_a_while_stays_open(open_port):
    port = await open_port(inflight_max=1, ping_interval_seconds=0.05, ping_timeout_seconds=0.05)
    client = await port.client()
    for n in range(60):  # More messages than the server reads ahead.
        await client.ask(n, "hold")
    await asyncio.sleep(0.3)  # Time for several pings without a pong.
    for n in range(60):
        await port.harbour.until(lambda n=n: n in port.harbour.held)
        port.harbour.answer(n)
    assert [await client.data() for _ in range(60)] == list(range(60))

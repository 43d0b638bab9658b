"""Tests of the gateway under the attack classes 91 to 96 of the list, and similar attacks.

Source of the numbers: docs/reference/sandbox.md, "Attack classes".
"""

import asyncio
import gc
import json
import resource
import socket
import tracemalloc
import zlib
from collections.abc import Callable, Iterator

import pytest

from moorage.protocol.codes import Close
from moorage.protocol.replies import event
from tests.gateway.conftest import Attacker

TEXT, CONTINUATION, CLOSE, PING, PONG = 1, 0, 8, 9, 10
MIB = 2**20


@pytest.fixture
def measure_mib() -> Iterator[Callable[[], float]]:
    """Trace memory. Each call returns the peak MiB since the last call, above the base."""
    tracemalloc.start()
    base = 0

    def peak_mib() -> float:
        nonlocal base
        now, peak = tracemalloc.get_traced_memory()
        above, base = peak - base, now
        tracemalloc.reset_peak()
        return above / MIB

    yield peak_mib
    tracemalloc.stop()


@pytest.fixture
def crowd() -> Iterator[int]:
    """Raise the limit of open files; return how many clients it allows, at most 2,000."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))
    yield min(2_000, usual[1] // 2 - 100)  # This process has both ends of each socket.
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


async def still_serves(port) -> None:
    assert await (await port.client()).answers("still there")


def asks(attacker, count: int, size: int = 0, **more: object) -> bytes:
    """Return frames of requests whose replies have `size` bytes each."""
    inputs = {"n": "x" * size}
    message = json.dumps({"adhoc": True, "policy_rule_uri": "p", "inputs": inputs, **more}).encode()
    return attacker.frame(TEXT, message) * count


# 91 and 92: fragments and compression, and other frames that are not acceptable --------------

frame = Attacker.frame


def bomb(mib: int) -> bytes:
    """Return a message that inflates to `mib` MiB."""
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    pressed = b"".join(press.compress(b" " * MIB) for _ in range(mib))
    return pressed + press.flush(zlib.Z_SYNC_FLUSH)[:-4]


def fragments(first: bytes, more: bytes, count: int) -> bytes:
    return frame(TEXT, first, fin=False) + frame(CONTINUATION, more, fin=False) * count


UNACCEPTABLE = {
    "many fragments": (fragments(b'"', b"x", 5_000), Close.TOO_LARGE),
    "empty fragments": (fragments(b"", b"", 5_000), Close.TOO_LARGE),
    "large fragments": (fragments(b'"', b"x" * 65_536, 20), Close.TOO_LARGE),
    "a claim to be huge": (b"\x81\xff" + (2**62).to_bytes(8) + bytes(4), Close.TOO_LARGE),
    "not masked": (b"\x81\x01x", Close.PROTOCOL_ERROR),
    "no such opcode": (b"\x83\x80" + bytes(4), Close.PROTOCOL_ERROR),
    "continues nothing": (b"\x80\x80" + bytes(4), Close.PROTOCOL_ERROR),
    "a fragmented ping": (b"\x09\x80" + bytes(4), Close.PROTOCOL_ERROR),
    "not text": (b"\x81\x82" + bytes(4) + b"\xff\xff", Close.NOT_TEXT),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n" * 99, Close.PROTOCOL_ERROR),
    "compressed": (frame(TEXT, bomb(2), rsv1=True), Close.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("data", "code"), UNACCEPTABLE.values(), ids=UNACCEPTABLE)
async def test_an_unacceptable_frame_closes_the_connection_of_its_sender(port, data, code):
    attacker = await port.attacker()
    await attacker.write(data)
    assert await attacker.close_code() == code
    await still_serves(port)


async def test_a_message_in_fragments_is_read_as_one_message(port):
    client = await port.client()
    message = json.dumps({"adhoc": True, "policy_rule_uri": "p", "inputs": {"n": 1}})
    await client.socket.send(iter(message))
    assert await client.data() == {"n": 1}


# Oversized frames ----------------------------------------------------------------------------


async def test_a_message_of_the_largest_size_is_read_and_one_byte_more_is_refused(open_port):
    port = await open_port(message_bytes_max=10_000)
    client = await port.client()
    empty = len('{"adhoc": true, "policy_rule_uri": "p:1-a", "inputs": {"n": ""}}')
    await client.ask("x" * (10_000 - empty))
    assert (await client.reply())["success"] is True
    await client.ask("x" * (10_001 - empty))
    assert await client.close_code() == Close.TOO_LARGE
    await still_serves(port)


async def test_a_ping_after_a_huge_message_leaves_no_stray_exception(open_port):
    stray: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    port = await open_port(ping_interval_seconds=0.02, close_seconds_max=0.1)
    attacker = await port.attacker()
    await attacker.write(b"\x81\xff" + (80 * MIB).to_bytes(8) + bytes(4) + bytes(MIB))
    assert await attacker.close_code() == Close.TOO_LARGE
    while port.gateway.stats().connections:  # noqa: ASYNC110  # No event reports a count.
        await asyncio.sleep(0.02)  # As above.
    gc.collect()
    await asyncio.sleep(0)
    assert [each["message"] for each in stray] == []


# 92: compression -----------------------------------------------------------------------------


async def test_a_compression_bomb_is_refused_before_it_is_unpacked(open_port, measure_mib):
    port = await open_port(deflate=True)
    attacker = await port.attacker("permessage-deflate")
    charge = attacker.frame(TEXT, bomb(64), rsv1=True)
    measure_mib()
    await attacker.write(charge)
    assert await attacker.close_code() == Close.TOO_LARGE
    assert measure_mib() < 16
    await still_serves(port)


async def test_compression_works_if_it_is_configured(open_port):
    port = await open_port(deflate=True)
    client = await port.client(compression="deflate")
    assert client.socket.response.headers["Sec-WebSocket-Extensions"]
    await client.ask("x" * 10_000)
    assert await client.data() == {"n": "x" * 10_000}


# 93: slow readers ----------------------------------------------------------------------------


async def test_a_client_that_never_reads_is_held_back_and_dropped(open_port, measure_mib):
    port = await open_port(slow_seconds_max=0.3, close_seconds_max=0.1)
    attacker = await port.attacker(receive_bytes=4_096)
    load = asks(attacker, 2_000, size=10_000)
    measure_mib()
    assert await attacker.write(load) is False
    await port.harbour.until(lambda: not port.harbour.sessions)
    # 20 MB were sent; at most the in-flight replies and the frames read ahead are held.
    assert measure_mib() < 12
    assert len(port.harbour.seen) < 2_000
    assert port.gateway.stats().slow_readers_total == 1
    await still_serves(port)


async def test_a_slow_client_that_reads_at_last_sees_why_it_was_closed(open_port):
    port = await open_port(slow_seconds_max=0.1, close_seconds_max=10)
    attacker = await port.attacker(receive_bytes=4_096)
    writing = asyncio.create_task(attacker.write(asks(attacker, 2_000, size=10_000)))
    other = await port.client()
    async with asyncio.timeout(60):
        while not port.gateway.stats().slow_readers_total:
            await other.ask("meanwhile")
            await other.reply()
    assert await attacker.close_code() == Close.TRY_LATER
    await writing  # Only one task may write to a socket at a time.
    await attacker.write(attacker.frame(CLOSE))


async def test_a_client_that_pauses_reading_loses_no_message(open_port):
    port = await open_port(inflight_max=8, write_buffer_bytes_max=1_024)
    client = await port.client(max_queue=1)
    client.socket.transport.pause_reading()
    for n in range(200):
        await client.ask(["x" * 5_000, n])
    client.socket.transport.resume_reading()
    assert [(await client.data())["n"][1] for _ in range(200)] == list(range(200))
    assert port.gateway.stats().slow_readers_total == 0


async def test_unread_news_are_bounded(open_port):
    port = await open_port(events_max=16, slow_seconds_max=0.2)
    attacker = await port.attacker(receive_bytes=4_096)
    await port.harbour.until(lambda: bool(port.harbour.ever))
    news = event("news", "x" * 60_000)
    for _ in range(1_000):
        port.gateway.push(port.harbour.ever[0], news)
        await asyncio.sleep(0)
    stats = port.gateway.stats()
    assert stats.events_total + stats.missed_total == 1_000
    assert stats.events_total < 100, "sixteen, plus those in the sockets' buffers"
    await port.harbour.until(lambda: not port.harbour.sessions)
    assert port.gateway.stats().slow_readers_total == 1
    assert await attacker.close_code() in {Close.TRY_LATER, 0}, "or cut, since it read nothing"


async def test_a_slow_watcher_reads_how_many_events_it_missed(open_port):
    port = await open_port(events_max=16, write_buffer_bytes_max=1_024)
    client = await port.client(max_queue=1)
    await port.harbour.until(lambda: bool(port.harbour.ever))
    client.socket.transport.pause_reading()
    for number in range(400):
        port.gateway.push(port.harbour.ever[0], event("news", [number, "x" * 60_000]))
        await asyncio.sleep(0)
    missed = port.gateway.stats().missed_total
    assert missed > 0
    client.socket.transport.resume_reading()
    seen = [json.loads(await client.socket.recv()) for _ in range(400 - missed + 1)]
    *news, last = seen
    assert [each["data"][0] for each in news] == list(range(400 - missed)), "the first, in order"
    assert last == {"event": "missed", "data": {"missed": missed}}
    port.gateway.push(port.harbour.ever[0], event("news", [400, ""]))
    assert json.loads(await client.socket.recv())["data"] == [400, ""]


# 94: pings -----------------------------------------------------------------------------------


async def test_a_client_that_floods_pings_and_reads_nothing_is_slowed_and_dropped(open_port):
    port = await open_port(slow_seconds_max=1, close_seconds_max=0.1)
    attacker = await port.attacker(receive_bytes=4_096)
    (attacked,) = port.gateway._connections
    other = await port.client()
    flood = asyncio.create_task(attacker.write(attacker.frame(PING, b"x" * 125) * 250_000))
    unsent = 0
    while not flood.done():
        unsent = max(unsent, attacked.transport.get_write_buffer_size())
        await other.ask("meanwhile")
        await other.reply()
    assert flood.result() is False, "the server must not read the whole flood"
    # The pongs to one read of the socket, on top of a full write buffer.
    assert unsent < MIB
    await port.harbour.until(lambda: len(port.harbour.sessions) == 1)
    assert port.gateway.stats().slow_readers_total == 1


async def test_a_ping_flood_does_not_delay_answers_to_other_clients(port):
    attacker = await port.attacker()
    flood = asyncio.create_task(attacker.write(attacker.frame(PING, b"x") * 20_000))
    pongs = asyncio.create_task(attacker.close_code())
    await still_serves(port)
    assert await flood
    await attacker.write(attacker.frame(CLOSE, b"\x03\xe8"))
    assert await pongs == Close.NORMAL


@pytest.mark.parametrize("frame", [(PING, b""), (PING, b"x" * 125), (TEXT, b"{}"), (PONG, b"x")])
async def test_clients_that_send_tiny_frames_are_read_in_turn(port, frame):
    """A quarter of a mebibyte of such frames, which is read at once, takes 100 ms."""
    attackers = [await port.attacker() for _ in range(4)]
    attacked = tuple(port.gateway._connections)
    tiny = attackers[0].frame(*frame)
    floods = [asyncio.create_task(each.write(tiny * (MIB // len(tiny)))) for each in attackers]
    other = await port.client()
    waited = False
    for number in range(20):
        await other.ask(number)
        assert (await other.reply())["data"]["n"] == number
        waited |= any(each._unread for each in attacked)
        assert sum(len(each._unread) for each in attacked) <= MIB
    assert waited, "the frames must not be read all at once"
    for each in attackers:
        each.vanish()
    await asyncio.gather(*floods, return_exceptions=True)
    await port.harbour.until(lambda: len(port.harbour.sessions) == 1)


@pytest.mark.parametrize("count", [1, 40, 4_000])
async def test_messages_that_arrived_before_the_close_are_read(port, count):
    """Any number of messages may wait for their turn when the client leaves."""
    attacker = await port.attacker()
    before = len(port.harbour.seen)
    await attacker.write(asks(attacker, count))
    attacker.endpoint.shutdown(socket.SHUT_WR)
    await port.harbour.until(lambda: len(port.harbour.seen) == before + count)
    await port.harbour.until(lambda: not port.gateway._connections)


async def test_requests_for_leases_of_a_client_that_left_are_dropped(port):
    """Thousands of requests may wait when a client leaves; messages about leases are still read."""
    attacker = await port.attacker()
    before = len(port.harbour.seen)
    await attacker.write(asks(attacker, 4_000, lease={"ttl_seconds": 60, "wait_seconds": 60}))
    attacker.endpoint.shutdown(socket.SHUT_WR)
    await port.harbour.until(lambda: not port.harbour.sessions)
    assert len(port.harbour.seen) < before + 4_000


# 95: storms ----------------------------------------------------------------------------------


async def test_after_a_storm_of_disconnecting_clients_the_next_client_is_served(port, crowd):
    storm = []
    while len(storm) < crowd:
        wave = min(100, crowd - len(storm))
        storm += await asyncio.gather(*(port.attacker() for _ in range(wave)))
    await port.harbour.until(lambda: len(port.harbour.sessions) == crowd)
    for attacker in storm:
        attacker.vanish()
    await still_serves(port)
    await port.harbour.until(lambda: len(port.harbour.sessions) <= 1)
    assert port.gateway.stats().in_flight == 0


async def test_clients_that_disconnect_during_a_request_leave_no_session(port):
    storm = await asyncio.gather(*(port.attacker() for _ in range(100)))
    for number, attacker in enumerate(storm):
        await attacker.write(asks(attacker, 50) + asks(attacker, 1)[: number % 40])
        attacker.vanish()
    await still_serves(port)
    await port.harbour.until(lambda: len(port.harbour.sessions) <= 1)


async def test_an_incomplete_handshake_is_cut_off(open_port):
    port = await open_port(open_seconds_max=0.2)
    answers = await asyncio.gather(
        *(
            port.http(b"GET / HTTP/1.1\r\nhost: localhost\r\nUpgra"[: 2 + n % 30])
            for n in range(200)
        )
    )
    assert not any(b" 101 " in answer for answer in answers)
    await still_serves(port)
    assert port.gateway.stats().connections == 1


# 96: headers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 1_000 + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"x" * 1_000_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\r\n" * 1_000,
    ],
)
async def test_an_invalid_handshake_is_refused(port, request_bytes):
    answer = await port.http(request_bytes)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    await still_serves(port)
    assert port.gateway.stats().connections == 1

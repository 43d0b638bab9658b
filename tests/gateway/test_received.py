"""Tests of the memory of incomplete messages, and of the turns of large messages."""

import asyncio
import json
import tracemalloc

import pytest

from moorage.gateway.received import PART_BYTES_MIN, Received

MIB = 2**20


class Connection:
    """A connection that records whether the gateway still reads it."""

    def __init__(self) -> None:
        self.reads = True

    def hold_back(self) -> None:
        self.reads = False

    def go_on(self) -> None:
        self.reads = True


def test_a_tenant_has_at_most_its_share_of_the_memory():
    received = Received(8 * MIB)
    ours, other = [Connection() for _ in range(20)], Connection()
    for connection in ours:
        received.note(connection, "a", MIB)
    assert [connection.reads for connection in ours] == [True] * 6 + [False] * 14
    received.note(other, "b", MIB)
    assert other.reads
    for connection in ours[:6]:  # The messages are complete.
        received.note(connection, "a", 0)
    assert sum(connection.reads for connection in ours[6:]) == 1
    for connection in ours[6:]:  # The connections are closed.
        received.note(connection, "a", 0)
    received.note(other, "b", 0)
    assert not received._held
    assert not received._waiting
    assert not (received._bytes_of + received._read_of)


def test_one_connection_of_each_tenant_is_always_read():
    received = Received(2 * MIB)
    ours = {tenant: [Connection() for _ in range(3)] for tenant in "abcd"}
    for count in range(1, 4):
        for tenant, connections in ours.items():
            for connection in connections:
                if connection.reads:
                    received.note(connection, tenant, count * MIB)
    assert all(sum(each.reads for each in connections) == 1 for connections in ours.values())


def test_small_parts_of_messages_are_not_counted():
    received = Received(0)
    few = [Connection() for _ in range(1_000)]
    for connection in few:
        received.note(connection, "a", PART_BYTES_MIN - 1)
    assert all(connection.reads for connection in few)


async def test_large_messages_are_read_between_small_ones(port):
    large = await port.client()
    other = await port.client(additional_headers={"Authorization": "Bearer token-b"})
    text = "x" * (900 * 1024)
    for number in range(6):
        await large.ask(number, text=text)
    await other.ask("mine")
    assert await other.data() == {"n": "mine"}
    assert [(await large.reply())["data"]["n"] for _ in range(6)] == list(range(6))


@pytest.mark.parametrize("small", [0, 1])
async def test_a_connection_holds_one_large_message_at_a_time(port, small):
    await port.client()  # A session of another tenant.
    attacker = await port.attacker()
    message = json.dumps({"adhoc": True, "policy_rule_uri": "p", "inputs": {"n": 1, "do": "wait"}})
    frame = attacker.frame(1, message[:-1].encode() + b" " * 1_000_000 + b"}")
    if small:  # While this message waits, large ones are queued.
        await attacker.write(attacker.frame(1, message.encode()))
        await port.harbour.until(lambda: port.harbour.waiting > 0)
    writing = asyncio.create_task(attacker.write(frame * (20 - small)))
    await port.harbour.until(lambda: port.harbour.waiting > 0)
    held = port.gateway._received._bytes_of
    async with asyncio.timeout(60):
        while not held.total():  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.01)  # As above.
    await asyncio.sleep(0.1)  # Meanwhile the next message must not be read.
    assert not writing.done()
    assert 1_000_000 < held.total() < 1_500_000
    port.harbour.room.set()
    assert await writing
    await port.harbour.until(lambda: len(port.harbour.taken) == 20)


async def until_all(port, condition):
    """Poll until the connections of a gateway are in a state; no event reports this."""
    async with asyncio.timeout(60):
        while not all(map(condition, port.gateway._connections)):  # noqa: ASYNC110  # See above.
            await asyncio.sleep(0.01)  # As above.


async def test_when_the_gateway_stops_it_refuses_large_messages_that_wait_unread(port):
    clients = [await port.client() for _ in range(4)]
    async with port.gateway._turns.turn("another"):
        for client in clients:
            await client.ask(2, text="x" * 900_000)
        await until_all(port, lambda each: each._taken_bytes)
        closing = asyncio.create_task(port.gateway.close())
        replies = [await client.reply() for client in clients]
    assert {reply["error"]["code"] for reply in replies} == {"shutting_down"}
    await closing


@pytest.mark.parametrize("size", [40_000, 300_000, 900_000])
async def test_large_messages_of_a_closed_socket_are_not_read(port, size):
    """When many clients leave at once, hundreds of their messages wait for milliseconds each."""
    clients = [await port.client() for _ in range(4)]
    async with port.gateway._turns.turn("another"):
        for client in clients:
            await client.ask(1, text="x" * size)
        await until_all(port, lambda each: each._taken_bytes)
        for client in clients:
            client.socket.transport.abort()
        await until_all(port, lambda each: each.has_left)
    await port.harbour.until(lambda: not port.harbour.sessions)
    assert port.harbour.seen == []


async def test_large_messages_are_freed_after_they_are_taken(port):
    await port.client()
    attackers = [await port.attacker() for _ in range(10)]
    message = (
        b'{"adhoc": true, "policy_rule_uri": "p", "inputs": {"n": 1}' + b" " * 1_000_000 + b"}"
    )
    frame = attackers[0].frame(1, message)
    tracemalloc.start()
    try:
        for number, attacker in enumerate(attackers, 1):
            assert await attacker.write(frame)
            await port.harbour.until(lambda number=number: len(port.harbour.taken) == number)
        await port.harbour.until(lambda: not port.gateway._received._held)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < len(message)


async def test_messages_that_directly_follow_a_large_message_arrive_complete(port):
    await port.client()
    attacker = await port.attacker()
    sizes = [1_000_000, 70_000, 10, 300_000, 70_000, 40_000, 1_000_000, 10]
    frames = b""
    for number, size in enumerate(sizes):
        text = f'{{"adhoc": true, "policy_rule_uri": "p", "inputs": {{"n": {number}}}'
        frames += attacker.frame(1, text.encode() + b" " * size + b"}")
    assert await attacker.write(frames)
    await port.harbour.until(lambda: len(port.harbour.taken) == len(sizes))
    assert port.harbour.taken == list(range(len(sizes)))

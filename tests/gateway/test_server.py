"""Tests of the gateway as the daemon sees it: sessions, limits, a clean stop."""

import asyncio
import contextlib
import gc
import logging

import pytest
from websockets.exceptions import InvalidStatus

from moorage.core.turns.effects import Address
from moorage.model import Tenant
from moorage.protocol.codes import Close
from moorage.protocol.replies import event
from moorage.records.rights import Caller, Role


async def test_the_daemon_learns_of_each_session_and_its_end(port):
    client = await port.client(additional_headers={"Authorization": "Bearer token-a"})
    await client.ask(1)
    assert await client.reply() == {"success": True, "data": {"n": 1}}
    assert port.harbour.sessions == {client.session: "a"}
    assert port.harbour.seen[0][:2] == (Address(client.session, 1), "a")
    await client.socket.close()
    await port.harbour.until(lambda: not port.harbour.sessions)
    assert port.gateway.stats().sessions == 0
    ids = {(await port.client()).session for _ in range(20)}
    assert len(ids) == 20
    assert all(len(name) == 32 for name in ids)


async def test_an_ended_session_gets_no_messages(port):
    client = await port.client()
    await client.ask(1, "hold")
    await port.harbour.until(lambda: 1 in port.harbour.held)
    await client.socket.close()
    await port.harbour.until(lambda: not port.harbour.sessions)
    port.harbour.answer(1)
    port.gateway.push(port.harbour.ever[0], event("news", 1))
    port.gateway.park(Address(port.harbour.ever[0], 1))


async def test_each_message_has_a_single_reply(port):
    client = await port.client()
    await client.ask(1)
    await client.reply()
    session = port.harbour.ever[0]
    for number in (1, 2, -1):
        with pytest.raises(AssertionError, match=f"message {number} of session {session}"):
            port.gateway.tell(Address(session, number), b"{}")


async def test_news_of_a_lease_are_sent_after_the_reply_that_grants_the_lease(port):
    client = await port.client()
    await client.ask(1, "hold")
    await port.harbour.until(lambda: 1 in port.harbour.held)
    port.gateway.push(port.harbour.ever[0], event("lease", {"id": "r"}))
    port.harbour.answer(1)
    assert await client.data() == 1
    assert await client.reply() == {"event": "lease", "data": {"id": "r"}}
    assert port.gateway.stats().events_total == 1


async def test_a_full_server_refuses_sessions_until_a_session_ends(open_port):
    port = await open_port(sessions_max=2)
    first, _ = await port.client(), await port.client()
    with pytest.raises(InvalidStatus) as refused:
        await port.client()
    assert refused.value.response.status_code == 503
    assert b"All 2 sessions are taken" in refused.value.response.body
    await first.socket.close()
    await port.harbour.until(lambda: len(port.harbour.sessions) == 1)
    assert await (await port.client()).answers()
    assert port.gateway.stats().refused_full_total == 1


async def test_connections_that_send_nothing_are_bounded_and_cut_off(open_port):
    port = await open_port(sessions_max=1, handshakes_max=3, open_seconds_max=0.2)
    idle = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(8)]
    async with asyncio.timeout(60):
        for reader, writer in idle:
            with contextlib.suppress(ConnectionError):  # The kernel may report the cut as an error.
                assert b"101" not in await reader.read()
            writer.close()
    assert await (await port.client()).answers()
    assert port.gateway.stats().connections == 1


async def test_connections_that_send_nothing_do_not_lock_clients_out(open_port):
    """One address opens too many connections; health checks and new sessions still succeed."""
    port = await open_port(handshakes_max=100)
    idle = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(500)]
    answer = await port.http(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert await (await port.client()).answers()
    await port.harbour.until(lambda: port.gateway.stats().connections <= 76)
    assert await idle[0][0].read() == b""  # The oldest connection was closed.
    for _, writer in idle:
        writer.close()


async def test_one_address_leaves_sessions_to_other_addresses(open_port):
    port = await open_port(sessions_max=4)
    for _ in range(3):
        await port.client()
    with pytest.raises(InvalidStatus) as refused:
        await port.client()
    assert b"All 3 sessions that one address may have" in refused.value.response.body
    assert await (await port.client(local_addr=("127.0.0.2", 0))).answers()


async def test_sessions_of_a_token_that_is_removed_or_changes_its_tenant_are_closed(open_port):
    a = Caller(Tenant("a"), Role.CLIENT)
    callers = {"old": a, "new": a, "moved": a, "promoted": a}
    port = await open_port(authenticate=callers.get)
    old, new, moved, promoted = [
        await port.client(additional_headers={"Authorization": f"Bearer {token}"})
        for token in callers
    ]
    del callers["old"]
    callers["moved"] = Caller(Tenant("b"), Role.CLIENT)
    callers["promoted"] = Caller(Tenant("a"), Role.ADMIN)
    port.gateway.expel()
    for client in (old, moved, promoted):
        assert await client.close_code() == Close.UNAUTHORIZED
    assert await new.answers()


@pytest.mark.parametrize("fields", [{}, {"id": "x"}])
@pytest.mark.parametrize("slow", [False, True])
async def test_a_defect_in_the_daemon_is_reported_and_closes_the_session(port, fields, slow):
    client = await port.client()
    if slow:
        await client.ask(1, "wait", **fields)
    await client.ask(2, "raise", **fields)
    port.harbour.room.set()
    assert await client.close_code() == Close.DEFECT
    assert [str(error) for error in port.harbour.defects] == ["a defect"]


# Stopping ------------------------------------------------------------------------------------


async def test_a_stop_of_the_gateway_closes_all_clients_with_1012_and_logs_nothing(
    open_port, caplog
):
    port = await open_port()
    clients = [await port.client() for _ in range(50)]
    gc.collect()  # So that leftovers of other tests are not logged below.
    with caplog.at_level(logging.WARNING):
        await port.gateway.close()
    assert [await client.close_code() for client in clients] == [Close.RESTART] * 50
    assert caplog.records == []
    assert port.harbour.sessions == {}
    with pytest.raises(OSError, match=r".*"):
        await asyncio.open_connection("127.0.0.1", port.number)


async def test_a_handler_that_was_replaced_sends_no_answers(open_port):
    """A standby that becomes leader has new handlers, which know no old sessions."""
    port = await open_port()
    before = await port.client()
    assert await before.answers()
    port.gateway.change(port.harbour, None)
    assert await before.close_code() == Close.RESTART
    after = await port.client()
    assert await after.answers()
    port.gateway.trusts = lambda: False  # From here on no answer leaves.
    await after.ask(1)
    assert await after.close_code() == Close.RESTART


@pytest.mark.parametrize(("do", "patient"), [("hold", False), ("park", True)])
async def test_a_stop_of_the_gateway_waits_neither_for_the_queue_nor_for_a_defect(
    open_port, do, patient
):
    port = await open_port(drain_seconds_max=1_000)
    client = await port.client()
    await client.ask(1, do)
    await port.harbour.until(lambda: 1 in port.harbour.held)
    async with asyncio.timeout(20):
        await port.gateway.close(patient=patient)
    assert await client.close_code() == Close.RESTART


async def test_a_stop_of_the_gateway_waits_for_replies_in_progress(open_port):
    port = await open_port(drain_seconds_max=20)
    client = await port.client()
    await client.ask(1, "hold")
    await port.harbour.until(lambda: 1 in port.harbour.held)
    closing = asyncio.create_task(port.gateway.close())
    await asyncio.sleep(0)  # The stop begins.
    await client.ask(2, id="late")
    refused = await client.reply()
    assert (refused["error"]["code"], refused["id"]) == ("shutting_down", "late")
    assert not closing.done()
    port.harbour.answer(1)
    assert await client.data() == 1
    assert await client.close_code() == Close.RESTART
    await closing


async def test_the_time_of_a_stop_is_bounded_although_a_client_does_not_react(open_port):
    port = await open_port(drain_seconds_max=0.1)
    silent = await asyncio.open_connection("127.0.0.1", port.number)
    waiting = await port.client()
    await waiting.ask(1, "hold")
    deaf = await port.client(close_timeout=0.1)
    deaf.socket.transport.pause_reading()
    await port.harbour.until(lambda: 1 in port.harbour.held)
    async with asyncio.timeout(20):
        await port.gateway.close()
        await port.gateway.close()
    silent[1].close()


@pytest.mark.parametrize("fields", [{}, {"id": 1}])
async def test_a_stop_of_the_gateway_does_not_wait_for_a_stalled_daemon(open_port, fields):
    port = await open_port(drain_seconds_max=0.1)
    client = await port.client()
    await client.ask(1, "wait", **fields)
    await port.harbour.until(lambda: port.harbour.waiting == 1)
    async with asyncio.timeout(20):
        await port.gateway.close()
    assert port.harbour.sessions == {}
    assert port.harbour.seen == []


async def test_messages_of_a_client_that_left_are_dropped(port):
    client = await port.client()
    await client.ask(1, "wait")
    for _ in range(5):
        await client.say('{"op": "status", "lease": "l-1"}')
    await client.ask(2)
    await port.harbour.until(lambda: port.harbour.waiting == 1)
    client.socket.transport.abort()
    async with asyncio.timeout(60):
        while port.gateway.stats().connections:  # noqa: ASYNC110  # No event reports a count.
            await asyncio.sleep(0.01)  # As above.
    port.harbour.room.set()
    await port.harbour.until(lambda: not port.harbour.sessions)
    assert port.harbour.taken == [1, 2]
    assert port.harbour.defects == [], "the daemon got no request"


async def test_the_gateway_counts_connections_messages_and_replies(port):
    client = await port.client()
    await client.ask(1)
    await client.ask(2, "hold", id=2)
    await client.ask(3, "park", id=3)
    await client.say("nonsense")
    await client.reply()
    await client.reply()
    await port.harbour.until(lambda: len(port.harbour.held) == 2)
    stats = port.gateway.stats()
    assert (stats.connections, stats.sessions, stats.sessions_total) == (1, 1, 1)
    assert (stats.messages_total, stats.malformed_total, stats.replies_total) == (4, 1, 2)
    assert (stats.in_flight, stats.parked) == (1, 1)

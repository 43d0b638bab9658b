# ruff: noqa: PT012  # These blocks are what is tested: errors come out of their ends.
import asyncio

import pytest

from moorage_client import Client, LeaseLost, NoCapacity, RuleFailed


def on_thread(function, *arguments):
    return asyncio.to_thread(function, *arguments)


async def test_a_block_holds_its_lease_and_releases_it(harbour, client):
    async with client.lease("first:1-x", resources={"gpus": 2}, ttl_seconds=60) as held:
        assert held.placement[0].node_id == "n1"
        assert held.data["gpus"] == ["0", "1"]
        assert held.fencing == 1
        assert not held.lost
        held.check()
        assert harbour.leases[held.id]["state"] == "active"
    assert harbour.leases[held.id]["state"] == "ended"


async def test_a_lease_is_renewed_even_while_its_block_holds_up_the_event_loop(harbour):
    async with Client(harbour.url) as client, client.lease("first:1-x", ttl_seconds=2) as held:
        first = held.expires_at
        # Block the event loop, as a long computation would.
        harbour.wait_for(lambda: harbour.count("renew") >= 2)
        held.check()
        assert held.expires_at > first
        assert held.seconds_left > 0


async def test_a_lost_lease_cancels_its_block(harbour, client):
    with pytest.raises(LeaseLost, match="preempted") as caught:
        async with client.lease("first:1-x", ttl_seconds=0.6) as held:
            harbour.leases[held.id] |= {"state": "ended", "reason": "preempted"}
            await asyncio.Event().wait()
    assert caught.value.lease == held.id
    assert held.lost
    assert asyncio.current_task().cancelling() == 0
    assert harbour.count("release") == 0


async def test_after_the_loss_of_a_lease_a_block_that_may_continue_only_gets_a_warning(
    harbour, client
):
    finished = False
    with pytest.raises(LeaseLost):
        async with client.lease("first:1-x", ttl_seconds=0.6, cancel_when_lost=False) as held:
            harbour.leases[held.id] |= {"state": "ended", "reason": "preempted"}
            assert await on_thread(held.wait_lost, 60.0)
            with pytest.raises(LeaseLost):
                held.check()
            await asyncio.sleep(0)
            finished = True
    assert finished


async def test_a_lease_that_cannot_be_renewed_is_lost_when_it_runs_out(harbour, client):
    with pytest.raises(LeaseLost, match="before it expired"):
        async with client.lease("first:1-x", ttl_seconds=0.5) as held:
            await on_thread(harbour.stop)
            await asyncio.Event().wait()
    assert held.seconds_left <= 0.0


async def test_a_lease_is_lost_if_the_server_does_not_answer_renewals(harbour, client):
    harbour.mute.add("renew")
    with pytest.raises(LeaseLost, match="no reply"):
        async with client.lease("first:1-x", ttl_seconds=1):
            await asyncio.Event().wait()
    assert harbour.count("renew") >= 2  # The client tried again, on another socket.
    assert len(harbour.headers) >= 3


async def test_a_lease_survives_if_the_server_restarts_in_time(harbour, client):
    async with client.lease("first:1-x", ttl_seconds=3) as held:
        await on_thread(harbour.stop)
        await on_thread(harbour.start)
        before = harbour.count("renew")
        await on_thread(harbour.wait_for, lambda: harbour.count("renew") > before)
        held.check()
    assert harbour.leases[held.id]["state"] == "ended"


async def test_a_lease_that_a_client_takes_over_is_renewed_at_once(harbour, client):
    terms = {"ttl_seconds": 300, "idempotency_key": "mine"}
    await client.ask("first:1-x", lease=terms)
    async with client.lease("first:1-x", ttl_seconds=300, idempotency_key="mine"):
        await on_thread(harbour.wait_for, lambda: harbour.count("renew") == 1)


async def test_an_error_of_the_block_is_raised_even_if_its_lease_is_lost(harbour, client):
    with pytest.raises(ZeroDivisionError):
        async with client.lease("first:1-x", ttl_seconds=60):
            raise ZeroDivisionError
    assert harbour.leases["l-1"]["state"] == "ended", "the client releases the lease"
    with pytest.raises(ZeroDivisionError) as caught:
        async with client.lease("first:1-x", ttl_seconds=0.6, cancel_when_lost=False) as held:
            harbour.leases[held.id] |= {"state": "ended", "reason": "preempted"}
            await on_thread(held.wait_lost, 60.0)
            raise ZeroDivisionError
    assert "is lost: Lease l-2 ended: preempted" in caught.value.__notes__[0]


async def test_a_cancelled_block_stays_cancelled(harbour, client):
    async def hold(client):
        async with client.lease("first:1-x", ttl_seconds=60):
            inside.set()
            await asyncio.Event().wait()

    inside = asyncio.Event()
    holding = asyncio.create_task(hold(client))
    await inside.wait()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert harbour.leases["l-1"]["state"] == "ended"


async def test_a_lease_that_ended_within_its_block_raises_lease_lost(harbour, client):
    with pytest.raises(LeaseLost, match="There is no lease"):
        async with client.lease("first:1-x", ttl_seconds=60) as held:
            del harbour.leases[held.id]


async def test_a_block_does_not_run_if_its_lease_is_refused(client):
    with pytest.raises(NoCapacity):
        async with client.lease("full:1-x"):
            pytest.fail("the block ran")
    with pytest.raises(RuleFailed, match="not today"):
        async with client.lease("shy:1-x"):
            pytest.fail("the block ran")


async def test_many_leases_are_renewed_at_the_same_time(harbour):
    async def hold(client):
        async with client.lease("first:1-x", ttl_seconds=1) as held:
            first = held.expires_at
            while held.expires_at == first:  # noqa: ASYNC110  # No event reports a renewal.
                await asyncio.sleep(0.01)  # As above.
            return held.id

    async with Client(harbour.url) as client, asyncio.timeout(60):
        held = await asyncio.gather(*(hold(client) for _ in range(30)))
    assert len(set(held)) == 30
    assert {lease["state"] for lease in harbour.leases.values()} == {"ended"}
    assert len(harbour.headers) == 2  # One socket for requests, one for renewals.

"""Tests of the time for which one turn of the event loop reads messages of a tenant."""

import asyncio

from moorage.model import Tenant
from moorage.protocol.loop_shares import READ_SECONDS_MAX, LoopShares

ANN, BOB = Tenant("ann"), Tenant("bob")


async def test_a_tenant_that_used_its_time_of_a_turn_waits_for_the_next_turn():
    shares = LoopShares()
    shares.spend(ANN, READ_SECONDS_MAX / 2)
    assert shares.turn(ANN) is None
    shares.spend(ANN, READ_SECONDS_MAX / 2)
    first, second, third = (shares.turn(ANN) for _ in range(3))
    shares.spend(BOB, READ_SECONDS_MAX / 2)
    assert shares.turn(BOB) is None
    await asyncio.sleep(0)
    assert [each.done() for each in (first, second, third)] == [True, False, False]
    second.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert third.done()
    assert shares.turn(ANN) is None
    shares.spend(BOB, READ_SECONDS_MAX)
    assert shares.turn(BOB) is not None

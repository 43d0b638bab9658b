"""How long the messages of one tenant are read in one turn of the event loop."""

import asyncio

from moorage.gateway.loop_shares import READ_SECONDS_MAX, LoopShares
from moorage.model import Tenant

ANN, BOB = Tenant("ann"), Tenant("bob")


async def test_a_tenant_has_its_share_of_each_turn_and_its_sessions_go_on_one_by_one():
    shares = LoopShares()
    assert shares.spend(ANN, READ_SECONDS_MAX / 2) is None
    first = shares.spend(ANN, READ_SECONDS_MAX / 2)
    second = shares.spend(ANN, READ_SECONDS_MAX)
    assert shares.spend(BOB, READ_SECONDS_MAX / 2) is None
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (True, False)
    second.cancel()
    await asyncio.sleep(0)
    assert shares.spend(ANN, READ_SECONDS_MAX / 2) is None
    assert shares.spend(BOB, READ_SECONDS_MAX) is not None

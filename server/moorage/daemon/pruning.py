"""Prunes the ledger's history by age and by size, in small steps beside grants."""

import asyncio
import time
from typing import Final

from moorage.config.settings import Config
from moorage.ledger.base import Ledger

LOOK_SECONDS: Final = 60.0
"""Seconds between two checks for old facts."""
PAUSE_FACTOR: Final = 4.0
"""A pause is this many times as long as the step before it, so that commits get the disk."""
DAY_SECONDS: Final = 86_400.0


async def prune_forever(ledger: Ledger, config: Config) -> None:
    """Delete facts that are too old or too many. Runs until cancelled."""
    while True:
        before = time.time() - config.history_days * DAY_SECONDS
        began = time.monotonic()
        more = await ledger.prune(before, config.history_mib_max << 20)
        took = time.monotonic() - began
        await asyncio.sleep(PAUSE_FACTOR * took if more else LOOK_SECONDS)

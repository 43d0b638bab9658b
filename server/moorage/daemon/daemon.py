"""The daemon at work: serves, takes new tokens, drains and stops. `daemon.start` builds it."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moorage.daemon.access.seen_tokens import SeenTokens
from moorage.daemon.access.tokens import Tokens
from moorage.daemon.agents.roster import AgentRoster
from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.doors import Doors
from moorage.daemon.requests.http_calls import STOPPING, HttpCalls
from moorage.daemon.requests.replies import Replies
from moorage.daemon.tasks import Tasks
from moorage.daemon.trust import Trust
from moorage.gateway.server import Gateway

DRAIN_SECONDS_MAX: Final = 10.0
"""Maximum seconds that a stop waits for work under way before it closes the ports."""


CHECKPOINT_SECONDS_MAX: Final = 5.0
"""Seconds that a stop waits for a checkpoint, which a standby reads, before it closes the ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """One server that accepts requests. Use it once: `run`, then `stop`.

    Args:
        doors: The two ports, open.
        agents: The machines with agents, and the server's own machine.
        trust: Says whether this server still leads, and whether it should.
        closing: Closes all open parts of the server, the ports first.
    """

    doors: Doors
    tokens: Tokens
    seen_tokens: SeenTokens
    agents: AgentRoster
    gateway: Gateway
    calls: HttpCalls
    replies: Replies
    commit_loop: CommitLoop
    tasks: Tasks
    trust: Trust
    closing: contextlib.AsyncExitStack

    def change_tokens(self, tokens: Mapping[str, str]) -> None:
        """Accept only these tokens from now on, and close the sessions of all other tokens.

        The audit log names the tenants whose tokens were added or removed.
        """
        added, removed = self.tokens.change(tokens)
        self.seen_tokens.note(added, removed)
        self.tasks.spawn(self.seen_tokens.remember(tokens))
        self.gateway.expel()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            BaseException: An invariant was broken or the ledger failed; the process must end.
        """
        await self.tasks.broken

    async def stop(self) -> None:
        """Close the ports, let work under way finish, write a checkpoint, close the rest.

        A standby becomes the leader as soon as the last batch is committed.
        """
        election = self.trust.election
        if election is not None and election.standbys and not self.tasks.broken.done():
            with contextlib.suppress(TimeoutError):  # The standby then leads later.
                async with asyncio.timeout(CHECKPOINT_SECONDS_MAX):
                    await self.commit_loop.checkpoint_beside()
            await asyncio.to_thread(election.announce)
        self.calls.draining = True
        self.doors.give_way()
        broken = self.tasks.broken.done()
        self.tasks.broken.cancel()
        if not broken:
            await self.gateway.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS_MAX):
                    await self.commit_loop.settle()
                    if election is None or not election.standbys:
                        await self.commit_loop.checkpoint()
            if election is not None:
                await asyncio.to_thread(election.resign)
        # A broken server does not wait for its clients, so that they reconnect at once.
        await self.gateway.close(patient=not broken)
        self.replies.drain(STOPPING)
        await self.tasks.close()
        await self.closing.aclose()

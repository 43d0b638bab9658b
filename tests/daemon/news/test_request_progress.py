"""Progress of requests that several messages repeat."""

import asyncio
from typing import Any

import msgspec
import pytest

from moorage.core.state.facts import Started
from moorage.core.turns.effects import Address, LeaseNews
from moorage.daemon.news import request_progress
from moorage.daemon.news.request_progress import RequestProgress
from moorage.model import (
    Lease,
    LeaseState,
    LeaseTerms,
    PolicyRef,
    Provision,
    RequestId,
    SessionId,
    Tenant,
)

FIRST, AGAIN = RequestId("first"), RequestId("again")
OLD, NEW = Address(SessionId("old"), 1), Address(SessionId("new"), 1)


class Streams:
    """Progress, and the messages that each session gets."""

    def __init__(self) -> None:
        self.told: dict[SessionId, list[Any]] = {OLD.session: [], NEW.session: []}
        self.progress = RequestProgress(
            self._push, lambda names: dict.fromkeys(names, 1), lambda _: {}
        )
        self.pushed = asyncio.Event()

    def _push(self, session: SessionId, frame: bytes) -> None:
        told = msgspec.json.decode(frame)
        self.told[session].append((told["id"], told["data"]["state"]))
        self.pushed.set()


def lease(state: LeaseState) -> Lease:
    who = FIRST, Tenant("ann"), ""
    terms, provision = LeaseTerms(ttl_seconds=60.0), Provision("local")
    policy = PolicyRef("p", "d")
    return Lease(*who, policy, (), 1, 0.0, 60.0, terms, provision=provision, state=state)


@pytest.mark.parametrize(
    ("state", "told"), [("starting", [(7, "ready")]), ("active", []), ("ending", [])]
)
async def test_a_repeated_request_gets_the_progress_of_a_workload_that_still_starts(
    state: LeaseState, told: list[tuple[int, str]]
) -> None:
    streams = Streams()
    streams.progress.add(NEW, AGAIN, 7)
    streams.progress.note_answer(NEW, LeaseNews(lease(state)))
    streams.progress.note_durable([Started(FIRST, 0.0)])
    streams.progress.note_durable([Started(FIRST, 0.0, "http://later")])
    assert streams.told[NEW.session] == told


@pytest.mark.parametrize("streamed_before", [True, False])
async def test_a_request_repeated_during_a_long_decision_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, streamed_before: bool
) -> None:
    monkeypatch.setattr(request_progress, "PAUSE_SECONDS", 0.01)
    streams = Streams()
    if streamed_before:
        streams.progress.add(OLD, FIRST, 1)
    streams.progress.observe_consultation(FIRST)
    streams.progress.add(NEW, AGAIN, 7)
    streams.progress.repeat(NEW, FIRST, 7, waits=False)
    running = asyncio.ensure_future(streams.progress.run())
    while not streams.told[NEW.session]:
        streams.pushed.clear()
        await streams.pushed.wait()
    running.cancel()
    assert streams.told[NEW.session] == [(7, "deciding")]


async def test_a_session_that_ends_leaves_the_progress_to_the_other_one() -> None:
    streams = Streams()
    streams.progress.add(OLD, FIRST, 1)
    streams.progress.add(NEW, AGAIN, 7)
    streams.progress.repeat(NEW, FIRST, 7, waits=True)
    streams.progress.drop_session(OLD.session)
    streams.progress.note_durable([Started(FIRST, 0.0)])
    assert streams.told == {OLD.session: [], NEW.session: [(7, "ready")]}

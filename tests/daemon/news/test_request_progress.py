"""Tests of progress of requests that messages repeat, and of HTTP callers, who get none."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from moorage.config.settings import Config
from moorage.core.state.facts import Started
from moorage.core.turns.effects import Address, LeaseNews
from moorage.daemon.news import request_progress
from moorage.daemon.news.request_progress import RequestProgress
from moorage.daemon.observability.counters import Measures
from moorage.daemon.start import start
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
from moorage_policies import catalog
from tests.waiting import async_until

FIRST, AGAIN = RequestId("first"), RequestId("again")
OLD, NEW = Address(SessionId("old"), 1), Address(SessionId("new"), 1)


class Streams:
    """The progress of requests, and the messages that each session gets."""

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
async def test_a_request_repeated_during_a_long_decision_gets_the_progress_of_the_decision(
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


async def test_after_the_end_of_a_session_the_other_session_of_a_request_gets_the_progress() -> (
    None
):
    streams = Streams()
    streams.progress.add(OLD, FIRST, 1)
    streams.progress.add(NEW, AGAIN, 7)
    streams.progress.repeat(NEW, FIRST, 7, waits=True)
    streams.progress.drop_session(OLD.session)
    streams.progress.note_durable([Started(FIRST, 0.0)])
    assert streams.told == {OLD.session: [], NEW.session: [(7, "ready")]}


def is_streamed(candidate: object) -> bool:
    """Return whether the progress in memory has an entry of a request."""
    return isinstance(candidate, request_progress._Streamed)


@pytest.mark.heavy
async def test_an_http_caller_that_left_leaves_no_progress_in_memory(tmp_path: Path) -> None:
    node = {"id": "n", "gpus": {"count": 1}, "vcpus": {"count": 8}, "memory": 8_192}
    cluster = {"id": "lab", "nodes": {"count": 1, "nodeData": [node]}}
    terms = {"ttl_seconds": 60, "wait_seconds": 60}
    asked = {"policy_rule_uri": "first_fit:1.0-stable", "inputs": {}, "resources": {"gpus": 1}}
    body = {**asked, "lease": terms, "stream": True}
    own = {"port": 0, "http_port": 0, "http_host": "127.0.0.1", "sandbox": "unsafe"}
    daemon = await start(Config(data_dir=tmp_path, **own), Measures())
    url = f"http://127.0.0.1:{daemon.doors.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def waits(count: int) -> bool:
            return f"\nmoorage_waiting {count}.0\n" in (await http.get("/metrics")).text

        for path, document in (("/clusters", cluster), ("/policy", catalog.document("first_fit"))):
            (await http.post(path, json=document)).raise_for_status()
        (await http.post("/allocate", json=body)).raise_for_status()
        caller = asyncio.ensure_future(http.post("/allocate", json=body))
        await async_until(lambda: waits(1))
        caller.cancel()
        await async_until(lambda: not any(map(is_streamed, gc.get_objects())), seconds=20)
    await daemon.stop()

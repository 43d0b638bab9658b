"""Servers that are killed, frozen and stopped under load: what clients were answered stays true."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from served import ask_message, cluster, until
from test_takeover import One, ended, leads, one
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

CLIENTS: Final = 4
HELD_MAX: Final = 3
FAULTS: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL)
GRANTS_BETWEEN: Final = 40
ANSWER_SECONDS: Final = 5.0
"""A frozen server answers nothing: then the next one is tried."""


class Held(NamedTuple):
    """A lease as a client knows it: from before it was asked for until its release was sent."""

    id: str
    token: str
    fencing: int
    gpu: tuple[str, str, str]
    asked_at: float
    answered_at: float


class History:
    """What all clients were answered."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.granted: dict[str, Held] = {}
        self.released: dict[str, float] = {}
        """When the release of a lease was first sent."""
        self.problems: list[str] = []
        self.over = threading.Event()

    def check(self, there: dict[str, int]) -> None:
        """Look at all of it, given the leases that the last server has."""
        held = list(self.granted.values())
        assert self.problems == []
        assert len({each.id for each in held}) == len(held), "two keys have one lease"
        assert len({each.fencing for each in held}) == len(held), "a fencing number came twice"
        lost = [each for each in held if each.id not in {*self.released, *there}]
        assert lost == [], "acknowledged, and not there"
        in_order = sorted(held, key=lambda each: each.answered_at)
        highest, late = 0, iter(in_order)
        before = next(late, None)
        for each in sorted(held, key=lambda each: each.asked_at):
            while before is not None and before.answered_at < each.asked_at:
                highest = max(highest, before.fencing)
                before = next(late, None)
            assert each.fencing > highest, "fencing numbers went back"
        for _, group in itertools.groupby(sorted(held, key=lambda e: e.gpu), lambda e: e.gpu):
            spans = sorted((e.answered_at, self.released.get(e.id, float("inf"))) for e in group)
            for (_, end), (begin, _) in itertools.pairwise(spans):
                assert end <= begin, "a GPU was in two leases"


class Client(threading.Thread):
    """Asks for leases and releases them, each until a server says that it is so."""

    def __init__(self, number: int, history: History) -> None:
        super().__init__(daemon=True)
        self._number, self._history = number, history
        self._turn = number
        self._socket: ClientConnection | None = None
        self._connected = contextlib.ExitStack()
        self._held: list[Held] = []

    def run(self) -> None:
        """Go on until the history is over."""
        try:
            for number in itertools.count():
                if self._history.over.is_set():
                    break
                self._ask(f"{self._number}-{number}")
                if len(self._held) > HELD_MAX:
                    self._release(self._held.pop(0))
            self._connected.close()
        except Exception as error:  # noqa: BLE001  # The test's own thread tells of it.
            self._history.problems.append(repr(error))

    def _ask(self, key: str) -> None:
        terms = {"ttl_seconds": 3_600, "idempotency_key": key}
        asked_at = time.monotonic()
        reply = self._answered(ask_message(resources={"gpus": 1}, lease=terms))
        lease = reply["lease"]
        (share,) = lease["placement"]
        gpu = (share["cluster_id"], share["node_id"], str(share["gpus"][0]))
        held = Held(lease["id"], lease["token"], lease["fencing"], gpu, asked_at, time.monotonic())
        self._history.granted[key] = held
        self._held.append(held)

    def _release(self, held: Held) -> None:
        self._history.released[held.id] = time.monotonic()
        self._answered({"op": "release", "lease": held.id, "token": held.token})

    def _answered(self, message: dict) -> dict:
        """Return the success that some server answers, in the end."""
        while True:
            try:
                if self._socket is None:
                    urls = self._history.addresses
                    url = urls[self._turn % len(urls)]
                    opening = connect(
                        url, compression=None, open_timeout=ANSWER_SECONDS, close_timeout=0.1
                    )
                    self._socket = self._connected.enter_context(opening)
                self._socket.send(json.dumps(message))
                reply = json.loads(self._socket.recv(ANSWER_SECONDS))
            except (OSError, WebSocketException):
                self._next()
                continue
            if reply["success"]:
                return reply
            assert reply["error"]["code"] in {"not_leader", "shutting_down"}, reply
            self._next()

    def _next(self) -> None:
        self._connected.close()
        self._socket = None
        self._turn += 1
        time.sleep(0.02)  # As a client would that none answers.


@pytest.fixture
def history() -> Iterator[tuple[History, list[Client]]]:
    history = History()
    clients = [Client(number, history) for number in range(CLIENTS)]
    yield history, clients
    history.over.set()


def test_what_was_answered_stays_true(
    postgres, tmp_path: Path, history: tuple[History, list[Client]]
):
    (told, clients), storage, stack = history, postgres.database(), contextlib.ExitStack()
    names = map(str, itertools.count())

    def start() -> One:
        begun = stack.enter_context(one(tmp_path / next(names), storage))
        told.addresses.append(begun.ready["ws"])
        return begun

    def more() -> None:
        """Wait until clients have some more leases."""
        enough = len(told.granted) + GRANTS_BETWEEN
        until(lambda: len(told.granted) >= enough or told.problems, 120)
        assert told.problems == []

    with stack:
        leader = start()
        leader.server.fill(cluster("east", nodes=2, gpus=8))
        for client in clients:
            client.start()
        for fault in FAULTS:
            standby = start()
            more()
            os.kill(leader.process.pid, fault)
            until(lambda: leads(standby.server), 60)  # noqa: B023  # It is called here.
            more()
            if fault == signal.SIGSTOP:
                os.kill(leader.process.pid, signal.SIGCONT)
            code = {signal.SIGKILL: -9, signal.SIGSTOP: 75, signal.SIGTERM: 0}[fault]
            assert ended(leader.process) == code, leader.server.log()
            told.addresses.remove(leader.ready["ws"])
            leader = standby
        told.over.set()
        for client in clients:
            client.join(60)
        there = {each["id"]: each["fencing"] for each in leader.server.held()}
    told.check(there)


@pytest.mark.parametrize("defect", ["lost", "twice", "back", "two keys"])
def test_the_checker_finds_what_is_wrong(defect: str):
    told = History()
    first = Held("l1", "t", 1, ("east", "n", "0"), 0.0, 1.0)
    second = Held("l2", "t", 2, ("east", "n", "1"), 2.0, 3.0)
    told.granted = {"a": first, "b": second}
    there = {"l1": 1, "l2": 2}
    told.check(there)
    match defect:
        case "lost":
            del there["l1"]
        case "twice":
            told.granted["b"] = second._replace(gpu=first.gpu)
        case "back":
            told.granted["b"] = second._replace(fencing=0)
        case "two keys":
            told.granted["b"] = first
    with pytest.raises(AssertionError):
        told.check(there)

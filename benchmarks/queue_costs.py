"""`queue`: how the cost of an event grows with the number of waiting requests, or with the fleet.

The fleet is full, and all waiting requests differ in tenant and inputs. A figure is a ratio of CPU
times: with many and with few waiting requests, or on a large and on a small fleet. The events go
directly to the core; only `explained` and `overload` are measured through a daemon.
"""

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import msgspec
from websockets.sync.client import ClientConnection, connect

from benchmarks.overload import overload, prepare
from moorage.core.allocator import Allocator
from moorage.core.turns.effects import Address, Consult
from moorage.core.turns.events import Asked, ClusterSeen, Event, Proposed, ReleaseAsked, SessionLost
from moorage.core.turns.turn import Turn
from moorage.lab.errors import CommandError
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Demand,
    Gpu,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    SessionId,
    Tenant,
)
from moorage.testing.daemon_process import daemon

NODES: Final = 100
GPUS_EACH: Final = 8
WAITERS_FEW: Final = 10
WAITERS_MANY: Final = 10_000
WAITERS_MOST: Final = 100_000
NODES_FEW: Final = 1_250
NODES_MANY: Final = 125_000
TIMES: Final = 9
"""Number of measured events of each kind; the median counts."""
POLICY: Final = PolicyRef("bench:1.0", "digest")
OWNER: Final = SessionId("owner")


PAIRS: Final = 2_000
WARM_PAIRS: Final = 200
"""Number of pairs of requests before the first measured pair."""


class _Queue:
    """Plays events on a core with a full fleet and waiting requests."""

    def __init__(self, nodes: int, waiters: int) -> None:
        self.core, self.now, self._numbered = Allocator(), 0.0, 0
        gpus = tuple(Gpu(str(number), "A100", 81920) for number in range(GPUS_EACH))
        machines = (Node(NodeId(f"n{n:06d}"), 64_000, 256_000, gpus) for n in range(nodes))
        self.step(ClusterSeen(Cluster(ClusterId("c"), tuple(machines))))
        # Each lease takes a whole node, except on the first node, whose GPUs have a lease each.
        self.held = [self._grant(1, 0, [str(gpu)]) for gpu in range(GPUS_EACH)]
        for node in range(1, min(nodes, NODES)):
            self._grant(GPUS_EACH, node, [str(gpu) for gpu in range(GPUS_EACH)])
        for _ in range(waiters):
            self.wait()

    def step(self, event: Event) -> Turn:
        self.now += 0.001
        return self.core.step(event, self.now)

    def _ask(self, gpus: int, wait: float, cpu: int = 0) -> Ask:
        self._numbered += 1
        number = self._numbered
        return Ask(
            RequestId(f"r{number}"),
            Tenant(f"tenant-{number}"),
            POLICY,
            demand=Demand(gpus=gpus, cpu_milli=cpu),
            terms=LeaseTerms(ttl_seconds=1e6, wait_seconds=wait),
            inputs={"number": number},
            token_digest="digest",  # noqa: S106  # The digest of no token.
        )

    def _grant(self, gpus: int, node: int, devices: list[str]) -> RequestId:
        ask = self._ask(gpus, 0.0)
        turn = self.step(Asked(Address(OWNER, self._numbered), ask))
        self._propose(turn, node, devices)
        return ask.id

    def _propose(self, turn: Turn, node: int, devices: list[str]) -> list[Turn]:
        """Answer all calls of a policy, from this turn on, with the same GPUs."""
        wanted = {"cluster_id": "c", "node_id": f"n{node:06d}", "gpus": devices}
        consultations = [effect for effect in turn.effects if isinstance(effect, Consult)]
        turns: list[Turn] = []
        while consultations:
            effect = consultations.pop(0)
            turns.append(self.step(Proposed(effect.ask.id, effect.consultation, wanted)))
            consultations += [effect for effect in turns[-1].effects if isinstance(effect, Consult)]
        return turns

    def wait(self) -> Event:
        """Add a waiting request with its own session, for one to three GPUs and some CPU."""
        number = self._numbered
        ask = self._ask(1 + number % 3, 1e6, cpu=number % 5_000)
        event = Asked(Address(SessionId(f"s{number}"), 0), ask)
        self.step(event)
        return event

    def release(self) -> None:
        """Release the lease of one GPU, and grant the GPU to a waiting request."""
        gpu = len(self.held) - 1
        turn = self.step(ReleaseAsked(Address(OWNER, self._numbered), self.held.pop(), "digest"))
        self._propose(turn, 0, [str(gpu)])

    def lose(self) -> None:
        """Lose the session of the last waiting request."""
        self.step(SessionLost(SessionId(f"s{self._numbered - 1}")))

    def refuse(self) -> None:
        """Refuse a request that would fit on an emptier fleet."""
        self.step(Asked(Address(OWNER, self._numbered), self._ask(GPUS_EACH, 0.0, 63_999)))


def queue() -> dict[str, Any]:
    """Measure events in a short and a long queue, refusals on two fleets, and overload."""
    few, many, most = (_Queue(NODES, count) for count in (WAITERS_FEW, WAITERS_MANY, WAITERS_MOST))
    released = _seconds(few.release, 5), _seconds(many.release, 5)
    added = _seconds(_Queue(NODES, WAITERS_FEW).wait), _seconds(most.wait)
    lost = _seconds(few.lose), _seconds(most.lose)
    refused = _refusals(NODES_FEW), _refusals(NODES_MANY)
    return {
        "waiters_few": WAITERS_FEW,
        "waiters_many": WAITERS_MANY,
        "waiters_most": WAITERS_MOST,
        "release_seconds": released[0],
        "release_many_to_few": released[1] / released[0],
        "add_seconds": added[0],
        "add_most_to_few": added[1] / added[0],
        "lost_session_seconds": lost[0],
        "lost_session_most_to_few": lost[1] / lost[0],
        "refusal_seconds": refused[0],
        "refusal_125000_to_1250_nodes": refused[1] / refused[0],
        "waiter_bytes": _waiter_bytes(),
        **measure_explanations(),
        **overload(),
    }


def _refusals(nodes: int) -> float:
    """Return the seconds of a refusal on a fleet where no free GPU fits the request."""
    full = _Queue(nodes, 0)
    fleet = full.core.state.fleet
    fleet.cpu_free[:] = 1_000  # As if all CPU were taken: leases on 125,000 nodes take minutes.
    return _seconds(full.refuse)


def _waiter_bytes() -> int:
    """Return the mean bytes of memory per waiting request, of ten thousand."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    queue = _Queue(1, WAITERS_MANY)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert queue.core.requests.queue
    return (after - before) // WAITERS_MANY


def _seconds(event: Callable[[], object], times: int = TIMES) -> float:
    """Return the CPU seconds of an event: the median of `times` events."""
    taken: list[float] = []
    for _ in range(times):
        started = time.thread_time()
        event()
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


def measure_explanations() -> dict[str, Any]:
    """Measure a grant without reasons, and a grant with reasons as a multiple of the first."""
    with daemon() as running, connect(running.ws, proxy=None) as socket:
        uri = asyncio.run(prepare(running))
        pairs = [(_grant(socket, uri), _grant(socket, uri, explain=True)) for _ in range(PAIRS)]
    plain, reasoned = (statistics.median(each) for each in zip(*pairs[WARM_PAIRS:], strict=True))
    return {"grant_seconds": plain, "explained_to_grant": reasoned / plain}


def _grant(socket: ClientConnection, uri: str, *, explain: bool = False) -> float:
    """Return the seconds from a request to its lease, which is then released."""
    request = {
        "adhoc": True,
        "policy_rule_uri": uri,
        "inputs": {},
        "resources": {"gpus": 1},
        "lease": {"ttl_seconds": 600},
        "explain": explain,
    }
    started = time.perf_counter()
    reply = _say(socket, request)
    seconds = time.perf_counter() - started
    lease = reply["lease"]
    _say(socket, {"op": "release", "lease": lease["id"], "token": lease["token"]})
    return seconds


def _say(socket: ClientConnection, message: dict[str, Any]) -> Any:
    socket.send(msgspec.json.encode(message).decode())
    reply = msgspec.json.decode(socket.recv(60))
    if not reply["success"]:
        raise CommandError(f"the daemon refused a request: {reply['message']}")
    return reply

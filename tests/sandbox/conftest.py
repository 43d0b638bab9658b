"""Fixtures with a real sandbox and a small fleet, in which futures replace the core."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest_asyncio

from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed, Proposed
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
    Tenant,
)
from moorage.policy import Fleet
from moorage.sandbox.host.sandbox import CallRefusedError, Document, Limits, PolicyCode, Sandbox

ANSWER_SECONDS_MAX = 60.0


def small_fleet(clusters: int = 2, nodes: int = 2, gpus: int = 4) -> Fleet:
    fleet = Fleet()
    fleet.install(
        Cluster(
            ClusterId(f"c{c}"),
            tuple(
                Node(NodeId(f"n{n}"), 64_000, 64_000, tuple(Gpu(str(g)) for g in range(gpus)))
                for n in range(nodes)
            ),
        )
        for c in range(clusters)
    )
    return fleet


class Registry:
    """The services of policies, in memory, which record their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.fetched: list[str] = []
        self.versions: dict[str, int] = {}
        self.hold: asyncio.Event | None = None
        self.packed: dict[str, bytes] = {}
        self.gone: list[Any] = []
        self.called = asyncio.Event()

    async def call(self, client: str, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((client, method, arguments))
        self.called.set()
        if self.hold is not None:
            await self.hold.wait()
        if arguments == ("missing",) or arguments[0] in self.gone:
            raise CallRefusedError("404 Not Found", 404)
        if arguments == ("broken",):
            raise RuntimeError("BREACH-SECRET-VALUE")
        return {"client": client, "arguments": list(arguments)}

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> dict[str, bytes]:
        return {name: self.packed[name] for name in ids if name in self.packed}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[Document]:
        self.fetched += cluster_ids
        return [
            Document(name, version, msgspec.msgpack.encode(self.document(name, version)))
            for name in cluster_ids
            for version in [self.versions.get(name, 1)]
        ]

    @staticmethod
    def document(name: str, version: int) -> dict[str, Any]:
        return {
            "data": {"id": name, "version": version, "tags": ["a"]},
            "cluster_metrics": {"load": version},
        }


class Bench:
    """A sandbox that returns each outcome as a future."""

    def __init__(self, **options: Any) -> None:
        self.fleet = small_fleet(options.pop("clusters", 2))
        self.registry = Registry()
        self.outcomes: dict[tuple[str, int], asyncio.Future[Proposed | ConsultFailed]] = {}
        self.order: list[str] = []
        self.twice: list[str] = []
        # Long enough for policies that end by themselves, also on a busy machine.
        options.setdefault("limits", Limits(evaluation_seconds=20.0))
        self.sandbox = Sandbox(
            fleet=self.fleet, services=self.registry, deliver=self._deliver, **options
        )
        self._number = 0

    def _deliver(self, event: Proposed | ConsultFailed) -> None:
        self.order.append(event.request)
        future = self.outcomes[event.request, event.consultation]
        if future.done():
            self.twice.append(event.request)
        else:
            future.set_result(event)

    def ask(self, code: PolicyCode, inputs: Any = None, **fields: Any) -> asyncio.Future[Any]:
        """Consult and return the future of the outcome."""
        self._number += 1
        request = fields.pop("request", f"r{self._number}")
        consultation = fields.pop("consultation", 1)
        reserved = fields.pop("reserved", ())
        fields.setdefault("tenant", Tenant("t"))
        ask = Ask(RequestId(request), policy=code.ref, inputs=inputs or {}, **fields)
        future = asyncio.get_running_loop().create_future()
        self.outcomes[request, consultation] = future
        self.sandbox.consult(Consult(ask, consultation, reserved), code)
        return future

    async def value(self, code: PolicyCode, inputs: Any = None, **fields: Any) -> Any:
        """Consult a policy, and return the value that its `eval` returned."""
        outcome = await self.outcome(code, inputs, **fields)
        assert isinstance(outcome, Proposed), outcome
        return outcome.value

    async def refusal(self, code: PolicyCode, inputs: Any = None, **fields: Any) -> Any:
        """Consult a policy, and return the refusal of its evaluation."""
        outcome = await self.outcome(code, inputs, **fields)
        assert isinstance(outcome, ConsultFailed), outcome
        return outcome.refusal

    async def outcome(self, code: PolicyCode, inputs: Any = None, **fields: Any) -> Any:
        """Consult a policy, and return the event with the outcome."""
        return await asyncio.wait_for(self.ask(code, inputs, **fields), ANSWER_SECONDS_MAX)

    @staticmethod
    def policy(body: str, name: str = "rule", **documents: Any) -> PolicyCode:
        """Return a policy whose `eval` has a given body."""
        lines = "\n        ".join(body.strip("\n").splitlines())
        source = (
            "class AIOSv1PolicyRule:\n"
            "    def __init__(self, rule_id, settings, parameters):\n"
            "        self.rule_id, self.settings = rule_id, settings\n"
            "        self.parameters = parameters\n"
            "    def eval(self, parameters, input_data, context):\n"
            f"        {lines}\n"
        )
        ref = PolicyRef(f"{name}:1-test", f"digest of {name} {body}")
        return PolicyCode(ref, {"function.py": source.encode()}, **documents)

    @staticmethod
    def first_fit() -> PolicyCode:
        """Return a policy that proposes the first node that fits."""
        return Bench.policy(
            "fleet = input_data['fleet']\n"
            "rows = fleet.feasible().nonzero()[0]\n"
            "return fleet.placement(int(rows[0])) if len(rows) else {'none': True}",
            "first-fit",
        )


@contextlib.asynccontextmanager
async def _making() -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Yield a function that starts sandboxes with options; close the sandboxes afterwards."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**options: Any) -> Bench:
            made = Bench(**options)
            stack.push_async_callback(_close, made)
            await made.sandbox.start()
            return made

        yield make


async def _close(made: Bench) -> None:
    await made.sandbox.close()
    assert not made.twice


@pytest_asyncio.fixture
async def make_bench():
    """Return a function that starts sandboxes with options for one test."""
    async with _making() as make:
        yield make


@pytest_asyncio.fixture
async def bench(make_bench):
    """A started sandbox for one test."""
    return await make_bench()


@pytest_asyncio.fixture
async def hasty(make_bench):
    """A started sandbox with a short deadline, for policies that never end."""
    return await make_bench(limits=Limits(evaluation_seconds=1.0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make_common():
    """Return a function that starts sandboxes with options for all tests of a file."""
    async with _making() as make:
        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bench(make_common):
    """A started sandbox shared by a file's tests that are marked `loop_scope="module"`.

    Each test has its own policy, and leaves fleet, contexts and open proposals unchanged.
    """
    return await make_common()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty_bench(make_common):
    """A started sandbox with a short deadline, for policies that never end, for a whole file."""
    return await make_common(limits=Limits(evaluation_seconds=1.0))


__all__ = ["Bench", "Demand", "LeaseTerms", "Registry", "small_fleet"]

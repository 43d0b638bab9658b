"""The deciding parts of a daemon without sockets, ledger and clock, for tests of policies.

The catalog takes in clusters and policies, jailed cells evaluate the policies, and the allocator's
core verifies and grants, each as in the daemon. The caller sets the time, and the core gets the
answers to consultations in the order of their numbers; so the same input gives the same decisions.
Outcomes can still differ if a policy uses its own clock or random numbers, or misses a deadline.

`policy_test` runs one policy on examples, `backtest` several policies on a trace.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, assert_never

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.catalog.opening import open_catalog
from moorage.catalog.values import PolicyRecord
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Granted, Refusal
from moorage.core.turns.effects import (
    Address,
    Consult,
    Forget,
    KeepWarm,
    Look,
    Recall,
    Respond,
    Response,
    Start,
    Stop,
)
from moorage.core.turns.events import (
    Asked,
    ClusterSeen,
    ConsultFailed,
    Event,
    Proposed,
    ReleaseAsked,
    Tick,
)
from moorage.core.turns.turn import Turn
from moorage.daemon.policies.finder import code_of
from moorage.daemon.publishing.vetting import vet
from moorage.daemon.requests.services import CatalogReader
from moorage.model import Ask, Code, Lease, RequestId, SessionId, Tenant
from moorage.records.json_values import JsonObject, JsonValue
from moorage.sandbox.host.contract import HostServices, Mode
from moorage.sandbox.host.sandbox import Limits, PolicyCode, Sandbox
from moorage.storage.sqlite.storage import SqliteStorage

SESSION: Final = SessionId("rehearsal")


@dataclass(slots=True)
class Decision:
    """The decision on one request.

    Args:
        answer: The reply for the client; None while the request waits in the queue.
        values: The values that the policy returned, one per consultation.
        seconds: Duration of the longest consultation.
    """

    ask: Ask
    answer: Response | None = None
    values: tuple[JsonValue, ...] = ()
    seconds: float = 0.0


class Rehearsal:
    """Simulates a server, whose fleet is empty at first.

    Args:
        mode: `jail`, or `unsafe` if the site runs its policies without a jail.
        limits: Limits of one evaluation and its cell. A policy has only one cell here, since two
            would answer in a random order, and its circuit never opens.
        hash_seed: Seed of the cells' text hashes, so that the order of sets is reproducible, too.
        services: Services for the clients of policies; None: the rehearsal's own catalog.
        attacked: Whether to omit the self-test of the jail, since another sandbox just passed it.

    Attributes:
        allocator: The core. Its state may be read.
        now: The core's time, in seconds since the epoch.
        decisions: The decision on each request, by its id.
        warnings: Warnings of the latest upload.
    """

    def __init__(
        self,
        mode: Mode = "jail",
        limits: Limits | None = None,
        hash_seed: int = 1,
        services: HostServices | None = None,
        *,
        attacked: bool = False,
    ) -> None:
        self._services = services
        self._attacked = attacked
        self.allocator = Allocator()
        self.now = 0.0
        self.decisions: dict[RequestId, Decision] = {}
        self.warnings: tuple[str, ...] = ()
        self._mode: Mode = mode
        self._limits = replace(
            limits or Limits(), cells_per_policy_max=1, circuit_overruns=0, hash_seed=hash_seed
        )
        self._codes: dict[str, PolicyCode] = {}
        self._started: dict[int, float] = {}
        self._answers: dict[int, Proposed | ConsultFailed] = {}
        self._news = asyncio.Event()
        self._numbers: dict[int, RequestId] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-"))
            self._catalog = await open_catalog(SqliteStorage(Path(folder)).records())
            stack.push_async_callback(self._catalog.close)
            self._sandbox = Sandbox(
                fleet=self.allocator.state.fleet,
                services=self._services or CatalogReader(self._catalog),
                deliver=self._deliver,
                limits=self._limits,
                mode=self._mode,
            )
            stack.push_async_callback(self._sandbox.close)
            await self._sandbox.start(attacked=self._attacked)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def upload(self, document: JsonObject) -> PolicyRecord:
        """Register a policy as `POST /policy` would.

        Raises:
            ServiceError: The policy is refused.
        """
        prepared = await vet(self._catalog, self._sandbox, document, "rehearsal")
        record = await self._catalog.policies.register(prepared, "rehearsal")
        self.warnings = prepared.warnings
        self._codes[record.ref.uri] = code_of(record)
        return record

    async def add_cluster(self, document: JsonObject, metrics: JsonObject | None = None) -> None:
        """Register a cluster as `POST /clusters` would, with its metrics if there are any.

        Raises:
            ServiceError: The cluster is refused.
        """
        await self._catalog.clusters.create(document)
        if metrics is not None:
            await self._catalog.metrics.put(metrics)
        registered = read_cluster_document(document)
        await self.step(ClusterSeen(registered.cluster))

    async def note_document(self, document: JsonObject) -> None:
        """Store a cluster document for policies; the cluster's inventory is set with `step`.

        Raises:
            ServiceError: The document is refused.
        """
        await self._catalog.clusters.create(document)

    async def ask(self, ask: Ask) -> Decision:
        """Send a request to the core, carry out all effects, and return the decision."""
        decision = self.decisions[ask.id] = Decision(ask)
        number = len(self.decisions)
        self._numbers[number] = ask.id
        await self.step(Asked(Address(SESSION, number), ask))
        return decision

    async def release(self, lease: Lease) -> None:
        """End a lease, and carry out all effects."""
        await self.step(ReleaseAsked(Address(SESSION, 0), lease.id, lease.token_digest))

    async def pass_to(self, now: float) -> None:
        """Advance the time to `now`; end leases and waits that expire until then at their times."""
        while (due := self.allocator.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            await self.step(Tick())
        self.now = max(self.now, now)

    def use(self, code: PolicyCode) -> None:
        """Evaluate the given policy instead of the uploaded policy with the same URI."""
        self._codes[code.ref.uri] = code

    async def evaluate(self, uri: str, tenant: Tenant, input_data: JsonValue) -> JsonValue:
        """Evaluate a policy on plain input, as rankings and blocks do.

        Raises:
            PolicyFault: The policy failed.
        """
        code = self._codes[uri]
        return await self._sandbox.evaluate(code, tenant, input_data, parameters={}, settings={})

    async def manage(self, uri: str, tenant: Tenant, action: str) -> JsonValue:
        """Run a policy's `management`.

        Raises:
            PolicyFault: The policy failed.
        """
        return await self._sandbox.manage(self._codes[uri], tenant, action, None)

    def output(self, uri: str, tenant: Tenant) -> str:
        """Return the output of a policy since the last call."""
        return self._sandbox.take_output(self._codes[uri].ref, tenant)

    async def step(self, event: Event) -> None:
        """Pass an event to the core, and answer its consultations until none is open."""
        self._carry_out(event, self.allocator.step(event, self.now))
        while self._started:
            number = min(self._started)
            while number not in self._answers:
                self._news.clear()
                await self._news.wait()
            answer = self._answers.pop(number)
            if self._started.pop(number, None) is not None:
                self._carry_out(answer, self.allocator.step(answer, self.now))

    def _carry_out(self, event: Event, turn: Turn) -> None:
        if isinstance(event, Proposed | ConsultFailed):
            granted = any(
                isinstance(fact, Granted) and fact.lease.id == event.request for fact in turn.facts
            )
            self._sandbox.settle(event.request, granted)
        for effect in turn.effects:
            match effect:
                case Consult(ask, number):
                    self._started[number] = time.perf_counter()
                    self._consult(effect, self._codes.get(ask.policy.uri))
                case Forget(request, number):
                    self._started.pop(number, None)
                    self._sandbox.forget(request, number)
                case Respond(to, answer) if to.number in self._numbers:
                    self.decisions[self._numbers.pop(to.number)].answer = answer
                case Respond() | Look() | Start() | Stop() | KeepWarm() | Recall():
                    pass  # No workloads run here.
                case _:
                    assert_never(effect)

    def _consult(self, effect: Consult, code: PolicyCode | None) -> None:
        ask = effect.ask
        if code is None:
            reason = f"Policy {ask.policy.uri} was removed while the request waited."
            refusal = Refusal(Code.UNKNOWN_POLICY, reason, "policy_rule_uri")
            self._deliver(ConsultFailed(ask.id, effect.consultation, refusal))
        else:
            self._sandbox.consult(effect, code)

    def _deliver(self, event: Proposed | ConsultFailed) -> None:
        decision = self.decisions.get(event.request)
        started = self._started.get(event.consultation)
        if decision is not None and started is not None:
            decision.seconds = max(decision.seconds, time.perf_counter() - started)
        if decision is not None and isinstance(event, Proposed):
            decision.values = (*decision.values, event.value)
        self._answers[event.consultation] = event
        self._news.set()

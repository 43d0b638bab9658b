"""The server's part of the sandbox, for the daemon.

`consult` is synchronous and cheap; its one outcome arrives later through `deliver`, on the same
thread. Nothing in here compiles, parses or imports policy source: only jailed cells do that.

For cells to see the true fleet, the daemon must change `fleet` only on the loop's thread. The
daemon must also call `settle` for every `Proposed` of a request with a lease, right after the step
that decided about it and before that step's effects are carried out.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.model import Code, PolicyRef, RequestId, Tenant
from moorage.policy import Fleet
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.contexts import ContextEntry, Key
from moorage.sandbox.host.contract import (
    CallRefusedError,
    CheckResult,
    Document,
    HostServices,
    Isolation,
    JailError,
    Meter,
    Mode,
    OpenCircuit,
    PolicyCode,
    PolicyFault,
    Sample,
    SampleOutcome,
    SandboxError,
    SandboxReport,
    WorkerSettings,
)
from moorage.sandbox.host.pool import CellPool
from moorage.sandbox.host.spawner import attack_self
from moorage.sandbox.host.work import Work, crash_refusal, overrides, work_of
from moorage.sandbox.host.zygote import SpawnError
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.frames import CodeFinding
from moorage.sandbox.wire.limits import (
    FINDINGS_MAX,
    INPUT_BYTES_MAX,
    MESSAGE_CHARACTERS_MAX,
    OUTPUT_RING_BYTES_MAX,
    OUTPUT_RINGS_MAX,
    Limits,
)

__all__ = [
    "CallRefusedError",
    "CheckResult",
    "CodeFinding",
    "Document",
    "HostServices",
    "JailError",
    "Limits",
    "Meter",
    "OpenCircuit",
    "PolicyCode",
    "PolicyFault",
    "Sample",
    "SampleOutcome",
    "Sandbox",
    "SandboxError",
    "SandboxReport",
    "WorkerSettings",
]

ASIDE: Final = "aside"
"""Marks the cells, contexts and questions of shadows."""
PROPOSERS_MAX: Final = 65_536
"""Maximum unsettled proposals of all cells; with one more, the oldest one counts as settled."""
CHECKS_MAX: Final = 4
"""Maximum checks of policies at one time: each may use a cell's memory, and a processor core."""
CHECKS_WAITING_MAX: Final = 32
"""Maximum waiting checks; with one more, the tenant with most of them loses its last one."""
CHECKS_BUSY: Final = "policies wait for their check"
_UNSAFE_WARNING: Final = (
    "UNSAFE: policies run without seccomp and Landlock; any user who may register a policy can "
    "control this server. Start it with --sandbox jail."
)


Changes = Mapping[str, JsonMapping]
"""`settings` and `parameters`, by name; a missing name leaves its value unchanged."""
_NONE: Final[JsonObject] = {}


class Managed:
    """Settings and parameters that `management` of a policy has changed, by version and tenant.

    `Sandbox` puts the changes between the policy's defaults and those of a request, at every
    evaluation, so all cells agree. `daemon.publishing.management` stores the changes.
    """

    def __init__(self) -> None:
        self._changes: dict[tuple[str, str, str], Changes] = {}

    def of(self, ref: PolicyRef, tenant: str) -> Changes:
        """Return the changes of a version for a tenant."""
        return self._changes.get((ref.uri, ref.digest, tenant), {})

    def put(self, uri: str, digest: str, tenant: str, changes: Changes) -> None:
        """Apply changes in place of earlier ones; {} removes all."""
        self._changes.pop((uri, digest, tenant), None)
        if changes:
            self._changes[uri, digest, tenant] = changes

    def merge(
        self, ref: PolicyRef, tenant: str, settings: JsonMapping, parameters: JsonMapping
    ) -> tuple[JsonMapping, JsonMapping]:
        """Return a tenant's changes, with a request's settings and parameters on top of them."""
        changes = self._changes.get((ref.uri, ref.digest, tenant)) if self._changes else None
        if not changes:
            return settings, parameters
        return (
            {**changes.get("settings", _NONE), **settings},
            {**changes.get("parameters", _NONE), **parameters},
        )

    def apply(self, consult: Consult, ref: PolicyRef) -> Consult:
        """Return a consultation whose request also has its tenant's changes."""
        if not self._changes:
            return consult
        ask = consult.ask
        settings, parameters = self.merge(ref, ask.tenant, ask.settings, ask.parameters)
        return replace(consult, ask=replace(ask, settings=settings, parameters=parameters))


class Sandbox:
    """Runs policies in jailed cells and delivers their answers.

    Args:
        fleet: The live fleet. Read when a consultation is sent, never written.
        deliver: Called with exactly one event per consultation that was not forgotten.
        limits: All limits.
        mode: `jail`, or `unsafe` for a separate process without the jail.
        isolation: The requests that share a cell: all requests for a policy version, those of one
            tenant, or none (a fresh cell per evaluation).
        circuits: Called when a policy's circuit opens.
        workers: Other machines that run cells; None: there are none.
        meter: Counts the processor time of evaluations, and refuses those of a tenant that used too
            much, except consultations for live requests; None: no count and no limit.

    Attributes:
        uploads: Turns to read and check new policies; `rechecks`: turns to check known policies.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        services: HostServices,
        deliver: Callable[[Proposed | ConsultFailed], None],
        limits: Limits | None = None,
        mode: Mode = "jail",
        isolation: Isolation = "per_policy_version",
        circuits: Callable[[OpenCircuit], None] | None = None,
        workers: WorkerSettings | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._deliver = deliver
        self._meter = meter
        self._limits = limits or Limits()
        self._mode: Mode = mode
        self._isolation = isolation
        self._number = 0
        self._works: dict[tuple[str, int], Work] = {}
        self.managed = Managed()
        self._proposers: OrderedDict[str, Cell] = OrderedDict()
        self._declined: OrderedDict[str, str] = OrderedDict()
        """By request, the worker whose proposal failed: another worker gets the request next."""
        self._output: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._probes: dict[str, str] = {}
        self._closed = False
        # Uploads may be slow; a fallback or rollback must not wait behind many uploads.
        self.uploads = FairSemaphore(CHECKS_MAX, CHECKS_WAITING_MAX, busy=CHECKS_BUSY)
        self.rechecks = FairSemaphore(CHECKS_MAX, CHECKS_WAITING_MAX, busy=CHECKS_BUSY)
        self._pool = CellPool(
            fleet=fleet,
            services=services,
            limits=self._limits,
            mode=mode,
            finish=self._finish,
            printed=self._note_output,
            circuits=circuits or (lambda _circuit: None),
            workers=workers,
            meter=meter,
        )

    async def start(self, *, attacked: bool = False) -> SandboxReport:
        """Start the zygote, test the jail by attacks, and return the report.

        Call `start` before serving, from the thread that runs the loop until the end.

        Args:
            attacked: Whether to omit the attacks: another sandbox of this process withstood them.

        Raises:
            JailError: In mode `jail`, a layer is missing or an attack succeeded.
        """
        try:
            await self._pool.spawner.start()
            if self._mode == "jail" and not attacked:
                self._probes = await attack_self(self._pool.spawner)
                self._pool.counters.clear()
            await self._pool.spawner.refill()
            if self._pool.workers is not None:
                self._pool.workers.start()
        except SpawnError as error:
            await self.close()
            raise JailError("zygote", f"no cell can be started here: {error}") from error
        except JailError:
            await self.close()
            raise
        return self.report()

    def show(self, fleet: Fleet) -> None:
        """Replace the fleet that policies see, before the first consultation."""
        self._pool.world.change(fleet)

    async def close(self) -> None:
        """Kill every cell and the zygote, and refuse all waiting work, in limited time."""
        if not self._closed:
            self._closed = True
            await self._pool.close()

    # Consultations -------------------------------------------------------------------------

    def consult(self, consult: Consult, code: PolicyCode) -> None:
        """Consult the policy; exactly one event with the outcome is delivered later."""
        consult = self.managed.apply(consult, code.ref)
        ask = consult.ask
        work = Work("evaluate", code, ask.tenant, consult)
        work.avoided = self._declined.pop(ask.id, "")
        earlier = self._proposers.pop(ask.id, None)
        if earlier is not None:
            earlier.settle(ask.id)  # Another cell may evaluate the request this time.
        self._works[ask.id, consult.consultation] = work
        refusal = self._submit(work)
        if refusal is not None:
            # Never from within this call: the caller is in the middle of carrying out effects.
            asyncio.get_running_loop().call_soon(self._finish, work, None, refusal, None)

    def ask_aside(self, consult: Consult, code: PolicyCode) -> "asyncio.Future[JsonValue]":
        """Consult a shadow policy about the same request; its answer has no effect.

        The evaluation runs at low priority in a separate cell per tenant, whatever the isolation:
        its answers for one tenant must not show another tenant's requests. The evaluation has its
        own contexts, and sees the same fleet as live policies, except for their unsettled
        proposals.

        Returns:
            A future of the policy's value, or of a `PolicyFault`.
        """
        ask = consult.ask
        tenant, name = Tenant(f"{ASIDE} {ask.tenant}"), RequestId(f"{ask.id} {ASIDE}")
        same = replace(consult, ask=replace(ask, id=name, tenant=tenant, dry_run=True))
        work = Work("evaluate", code, tenant, same)
        work.future = asyncio.get_running_loop().create_future()
        refusal = self._beyond(work) or self._submit(work, aside=True)
        if refusal is not None:
            work.fail(refusal)
        return work.future

    def forget(self, request: RequestId, consultation: int) -> None:
        """Cancel a consultation; no event will be delivered for it."""
        work = self._works.pop((request, consultation), None)
        if work is not None:
            work.forgotten = True
            self._pool.withdraw(work)

    def settle(self, request: RequestId, granted: bool) -> None:
        """Record that the core has decided on the proposal for a request.

        Args:
            request: The id of the ask.
            granted: Whether a lease exists now; only counted, since the cell sees leases in the
                fleet's rows.
        """
        cell = self._proposers.pop(request, None)
        if cell is not None:
            self._pool.counters["granted" if granted else "not_granted"] += 1
            self._pool.settle(cell, granted=granted)
            cell.settle(request)
            if cell.worker and not granted:
                self._declined[request] = cell.worker
                if len(self._declined) > PROPOSERS_MAX:
                    self._declined.popitem(last=False)

    def drop_documents(self, cluster_id: str) -> None:
        """Invalidate the cells' copies of a cluster's document and metrics."""
        self._pool.drop_documents(cluster_id)

    # Contexts ------------------------------------------------------------------------------

    def restore_contexts(self, contexts: Iterable[ContextEntry], beyond: int) -> None:
        """Load the stored contexts, before any evaluation."""
        self._pool.contexts.restore(contexts, beyond)

    def take_changed_contexts(self, bytes_max: int) -> list[ContextEntry]:
        """Return contexts that changed since the last call; empty bytes: the context is deleted."""
        return self._pool.contexts.take_changes(bytes_max)

    def return_contexts(self, keys: Iterable[Key]) -> None:
        """Take back contexts that could not be stored; the next call returns them again."""
        self._pool.contexts.changed |= dict.fromkeys(keys)

    @property
    def contexts_waiting(self) -> int:
        """The contexts that changed since they were last taken."""
        return len(self._pool.contexts.changed)

    def forget_contexts(self, uri: str) -> None:
        """Drop the contexts of a policy that is no longer registered."""
        self._pool.contexts.forget_policy(uri)

    def is_crowded(self, ref: PolicyRef, tenant: Tenant, coming: int = 0) -> bool:
        """Return whether one more consultation of a tenant, besides `coming` ones, is too many.

        This check is cheap, unlike a request that is made first and then refused.
        """
        isolation = f"tenant {tenant}" if self._isolation == "per_tenant" else ""
        return self._pool.is_crowded(ref, tenant, isolation, coming)

    def _beyond(self, work: Work) -> Refusal | None:
        """Return why a tenant that used too much processor time gets no evaluation now, or None."""
        return None if self._meter is None else self._meter.refusal(Tenant(work.tenant))

    def _submit(self, work: Work, *, aside: bool = False) -> Refusal | None:
        if self._closed:
            return Refusal(Code.SHUTTING_DOWN, "the server is shutting down")
        if self._isolation == "per_policy_version":
            return self._pool.submit(work, work.tenant if aside else "", aside=aside)
        if self._isolation == "per_tenant":
            return self._pool.submit(work, f"tenant {work.tenant}", aside=aside)
        self._number += 1
        return self._pool.submit(work, f"evaluation {self._number}", single_use=True)

    def _finish(
        self, work: Work, value: JsonValue, refusal: Refusal | None, cell: Cell | None
    ) -> None:
        if work.forgotten:
            if work.provisional and work.consult is not None and cell is not None:
                cell.settle(work.consult.ask.id)
            return
        consult = work.consult
        if consult is not None:
            self._works.pop((consult.ask.id, consult.consultation), None)
            if refusal is None and cell is not None and work.provisional:
                self._proposers[consult.ask.id] = cell
                if len(self._proposers) > PROPOSERS_MAX:
                    request, oldest = self._proposers.popitem(last=False)
                    oldest.settle(request)
        guard = work.code.guard
        if refusal is None and guard is not None and work.judged:
            refusal = guard.judge(value)
            self._pool.counters["failures"] += refusal is not None
        event = work.succeed(value) if refusal is None else work.fail(refusal)
        if event is not None:
            self._deliver(event)

    # Everything else -----------------------------------------------------------------------

    async def check(self, code: PolicyCode, samples: Sequence[Sample] = ()) -> CheckResult:
        """Compile, import and construct a policy in a new cell; report its faults.

        The caller holds a turn of `uploads` or `rechecks`.

        Args:
            code: The policy, which need not be registered.
            samples: Evaluations to make once the policy is loaded.

        Returns:
            The findings, none if the policy may be registered, and then the outcomes of the
            samples.

        Raises:
            PolicyFault: No cell could be started for the check, or two cells were killed
                (UNAVAILABLE).
        """
        try:
            return await check_once(self._pool, code, samples)
        except PolicyFault as fault:
            if fault.refusal.code is not Code.UNAVAILABLE:
                raise
        # The kill came from outside, and may not happen again.
        return await check_once(self._pool, code, samples)

    async def manage(
        self, code: PolicyCode, tenant: Tenant, action: str, data: JsonValue
    ) -> JsonValue:
        """Run the policy's `management(action, data)` and return its plain value.

        Raises:
            PolicyFault: The policy has no `management`, raised an error, overran, or its answer
                cannot be sent; or its schema of management commands forbids the action or the data.
        """
        return (await self.manage_and_tell(code, tenant, action, data))[0]

    async def manage_and_tell(
        self, code: PolicyCode, tenant: Tenant, action: str, data: JsonValue
    ) -> tuple[JsonValue, bytes]:
        """Run `manage`; also return the settings and parameters that it changed, as JSON text."""
        if code.guard is not None:
            data = code.guard.command(action, data)
        work = Work("manage", code, tenant, action=action, data=data)
        work.overrides = overrides(*self.managed.merge(code.ref, tenant, {}, {}))
        value = await self._outcome(work)
        return value, work.changes

    async def evaluate(
        self,
        code: PolicyCode,
        tenant: Tenant,
        input_data: JsonValue,
        *,
        parameters: JsonMapping,
        settings: JsonMapping,
        ids_only: bool = False,
        fleet: Fleet | None = None,
        proxied: bool = False,
    ) -> JsonValue:
        """Run the policy's `eval` on plain input and return its plain value.

        Limits, context and injected clients are those of a consultation; nothing is proposed.

        Args:
            code: The policy.
            tenant: The tenant of the evaluation and of its context.
            input_data: The argument of `eval`: JSON data, at most `INPUT_BYTES_MAX` packed.
            parameters: The parameters that replace the policy's defaults.
            settings: The settings that replace the policy's defaults.
            ids_only: Whether each object is returned as its `id`, with the keys that the policy
                added. So the given documents need not be sent back.
            fleet: The fleet that the policy finds in `input_data["fleet"]`.
            proxied: Whether the tenant stands for many tenants, as another server does; its
                circuits never open.

        Raises:
            PolicyFault: The policy failed as a consultation can, or the input cannot be sent; or
                its schemas refuse the input, parameters, settings or answer.
        """
        if code.guard is not None:
            parameters, settings = code.guard.overrides(parameters, settings)
            input_data = await code.guard.complete(input_data)
        try:
            packed = msgspec.msgpack.encode(input_data)
            settings, parameters = self.managed.merge(code.ref, tenant, settings, parameters)
            overriding = overrides(settings, parameters)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            refusal = Refusal(Code.BAD_MESSAGE, f"the input cannot be packed: {error}")
            raise PolicyFault(refusal) from error
        snapshot = None if fleet is None else msgspec.msgpack.encode(fleet.snapshot())
        if len(packed) + len(overriding) > INPUT_BYTES_MAX:
            reason = f"the policy's input has {len(packed) + len(overriding)} bytes; give less"
            expected = f"at most {INPUT_BYTES_MAX} bytes"
            raise PolicyFault(Refusal(Code.TOO_LARGE, reason, expected=expected))
        work = Work("apply", code, tenant)
        work.input_data, work.overrides, work.ids_only = packed, overriding, ids_only
        work.fleet, work.proxied = snapshot, proxied
        return await self._outcome(work)

    async def _outcome(self, work: Work) -> JsonValue:
        work.future = future = asyncio.get_running_loop().create_future()
        refusal = self._beyond(work) or self._submit(work)
        if refusal is not None:
            raise PolicyFault(refusal)
        try:
            return await future
        except asyncio.CancelledError:
            work.forgotten = True
            self._pool.withdraw(work)
            raise

    def output(self, ref: PolicyRef, tenant: Tenant) -> dict[str, str]:
        """Return recent output and logs of a policy version.

        Args:
            ref: The version.
            tenant: The tenant whose requests printed the text; text of other tenants is hidden.

        Returns:
            Text by occasion: `loading`, `requests` (with `management`), `aside` (as a shadow).
        """
        names = {"loading": "", "requests": tenant, "aside": f"{ASIDE} {tenant}"}
        printed = {
            each: self._output.get((ref.uri, ref.digest, name), "") for each, name in names.items()
        }
        return {each: text for each, text in printed.items() if text}

    def take_output(self, ref: PolicyRef, tenant: Tenant) -> str:
        """Return the lines that a policy printed at a tenant's requests, and forget them."""
        return self._output.pop((ref.uri, ref.digest, tenant), "")

    def open_circuit(self, ref: PolicyRef, tenant: Tenant) -> OpenCircuit | None:
        """Return the open circuit of a policy version for a tenant, if there is one."""
        return self._pool.circuits.current(ref, tenant, time.monotonic())

    def close_circuits(self, uri: str) -> None:
        """Close the circuits of a policy."""
        self._pool.circuits.end(uri)

    @property
    def deadline_seconds_max(self) -> float:
        """The longest deadline that a policy or a request may name."""
        return self._limits.evaluation_seconds_max

    @property
    def up(self) -> bool:
        """Whether cells can be started; while they cannot, policies without a cell are refused."""
        return self._pool.spawner.up

    def report(self) -> SandboxReport:
        """Return the state of the jail and the counters."""
        workers = self._pool.workers
        return SandboxReport(
            mode=self._mode,
            layers=dict(self._pool.spawner.layers),
            probes=dict(self._probes),
            cells=self._pool.cells(),
            counters={**self._pool.counters, "context_conflicts": self._pool.contexts.conflicts},
            circuits_open=self._pool.circuits.open_now(time.monotonic()),
            warning="" if self._mode == "jail" else _UNSAFE_WARNING,
            workers={} if workers is None else dict(workers.findings),
            workers_up=0 if workers is None else len(workers.up),
        )

    def _note_output(self, work: Work, text: str) -> None:
        if not text:
            return
        key = (work.code.ref.uri, work.code.ref.digest, work.tenant)
        text_before = self._output.pop(key, "") + text
        self._output[key] = text_before[-OUTPUT_RING_BYTES_MAX:]
        if len(self._output) > OUTPUT_RINGS_MAX:
            self._output.popitem(last=False)


async def check_once(pool: CellPool, code: PolicyCode, samples: Sequence[Sample]) -> CheckResult:
    """Check a policy once; see `sandbox.host.sandbox.Sandbox.check`.

    Raises:
        PolicyFault: No cell could be started, or the cell was killed from outside (UNAVAILABLE).
    """
    try:
        cell = await pool.spawner.blank()
    except (SpawnError, JailError) as error:
        refusal = Refusal(Code.UNAVAILABLE, f"no cell can be started: {error}")
        raise PolicyFault(refusal) from error
    future: asyncio.Future[frames.PolicyLoaded] = asyncio.get_running_loop().create_future()
    try:
        cell.load(Work("load", code, "", future=future), pool.limits.output_bytes_max, check=True)
        cell.flush()
        pool.watch_soon()
        loaded = await future
        outcomes = await _try(cell, code, () if loaded.faults else samples, pool.watch_soon)
    except PolicyFault as fault:
        if fault.refusal.code in {Code.UNAVAILABLE, Code.SHUTTING_DOWN}:
            raise
        return CheckResult((CodeFinding(fault.refusal.reason, code.entry),))
    finally:
        pool.spawner.destroy(cell)
    # The cell obeys these limits, too, but the policy may have written to the channel itself.
    findings = tuple(
        CodeFinding(
            fault.message[:MESSAGE_CHARACTERS_MAX],
            fault.file[:MESSAGE_CHARACTERS_MAX],
            fault.line,
            fault.column,
            fault.text[:MESSAGE_CHARACTERS_MAX],
        )
        for fault in loaded.faults[:FINDINGS_MAX]
    )
    warnings = tuple(each[:MESSAGE_CHARACTERS_MAX] for each in loaded.warnings[:FINDINGS_MAX])
    return CheckResult(findings, loaded.management, loaded.output, tuple(outcomes), warnings)


async def _try(
    cell: Cell, code: PolicyCode, samples: Sequence[Sample], watch_soon: Callable[[], None]
) -> Sequence[SampleOutcome]:
    """Run samples in a loaded cell, one after the other, until the cell ends."""
    outcomes: list[SampleOutcome] = []
    for sample in samples:
        if not cell.alive:
            lost = SampleOutcome(
                refusal=crash_refusal("it ended right after the policy was loaded", code.ref)
            )
            outcomes.append(outcomes[-1] if outcomes else lost)
            continue
        work = work_of(sample, code)
        work.future = asyncio.get_running_loop().create_future()
        refusal = cell.put(work)
        if refusal is None:
            cell.flush()
            watch_soon()
            try:
                outcomes.append(SampleOutcome(await work.future))
                continue
            except PolicyFault as fault:
                refusal = fault.refusal
                if refusal.code is Code.UNAVAILABLE:
                    raise
        outcomes.append(SampleOutcome(refusal=refusal))
    return outcomes

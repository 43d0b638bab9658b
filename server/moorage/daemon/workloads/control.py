"""Carries out `Start`, `Stop` and `KeepWarm` at the backends, and posts their reports.

Backends know a workload by the name of the lease for which it was started, even after another lease
has taken it over.

Backends also report a workload that ends by itself. Its lease then ends, or waits for another
place, as the core decides. A workload without a lease (its daemon was killed before the lease was
durable, or the ledger is gone) is stopped when the daemon starts.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import structlog
from msgspec import structs

from moorage.backends.base import (
    LOG_TAIL_LINES,
    Backend,
    BackendError,
    Order,
    Phase,
    Support,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.spec_documents import document_from_spec, spec_from_document
from moorage.backends.specs import BaseResourceSpec, SpecError
from moorage.core.state.facts import Refusal
from moorage.core.state.refusals import nearest
from moorage.core.turns.events import (
    Event,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.daemon.tasks import Tasks
from moorage.model import Code, Lease, Provision, RequestId

RETRY_SECONDS: Final = (0.5, 2.0, 10.0, 60.0)
"""Seconds before each retry of a failed stop; the last value repeats. Until the stop succeeds, the
lease keeps its capacity, since the workload may still use it."""
DISCOVER_SECONDS_MAX: Final = 5.0
"""Seconds that the daemon's start waits for a backend's list of workloads. A later list counts,
too."""
TAIL_CHARS_MAX: Final = 4_000
"""Maximum characters of a failed workload's last lines that are stored with its lease."""
TAIL_SECONDS_MAX: Final = 5.0
"""Maximum seconds that a backend may take to return the output of a workload that did not start."""

STOP_SECONDS_MAX: Final = 120.0
"""Maximum seconds between SIGTERM and SIGKILL, unless the operator sets another value."""
PREEMPTED_STOP_SECONDS: Final = 10.0
"""Seconds between SIGTERM and SIGKILL of a lease that is preempted without notice."""

INHERITED_MAX: Final = 1_000
"""Maximum remembered starts that took over a workload. The output of such a workload has the number
of another start."""
KEEP_SECONDS_MAX: Final = 30.0
"""Maximum seconds to reset a workload for its next user; after them, it is stopped."""
CLOSE_SECONDS_MAX: Final = 2.0
"""Maximum seconds that a stop of the daemon waits for cancelled orders, and then for backends to
close. The next start finds workloads of unfinished orders, as after a crash."""

_UNSERVED: Final = {
    "max_global_num": "only the library counts resources; in a daemon the fleet limits them",
    "gpus": "a workload gets the GPUs of its lease; request them in resources",
    "extra": "no backend of this server has additional fields",
    "ray_actor_options": "only actors of the backend ray have this field",
}
"""Fields of specs that a daemon does not accept, with the reasons."""
_HAVE_GPUS: Final = frozenset({"process", "service", "container", "pod", "job"})
"""Categories whose workloads use the GPUs of their lease; others use a whole machine."""

log = structlog.get_logger("moored")

_Order = Callable[[Backend | None, Lease], Awaitable[None]]


class OrderChains:
    """Runs the orders of each workload one at a time, in the order in which they were given.

    An order waits for all orders before it, not only for the last one: a cancelled order ends at
    once, even if orders before it still run.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._chains: dict[str, dict[asyncio.Task[None], bool]] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether a workload has an unfinished order."""
        return name in self._chains

    def add(self, name: str, work: Callable[[], Awaitable[None]], *, revocable: bool) -> None:
        """Queue an order after its workload's other orders; `revoke` cancels it if `revocable`."""
        chain = self._chains.setdefault(name, {})
        task = self._tasks.spawn(_run_after(tuple(chain), work))
        chain[task] = revocable
        task.add_done_callback(partial(self._remove, name))

    def revoke(self, name: str, stop_seconds_max: float) -> None:
        """Cancel the orders of a workload that its stop makes useless; see `Backend.start`."""
        for task, revocable in self._chains.get(name, {}).items():
            if revocable:
                task.cancel(stop_seconds_max)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all orders; return their tasks."""
        tasks = [task for chain in self._chains.values() for task in chain]
        for task in tasks:
            task.cancel()
        return tasks

    def _remove(self, name: str, task: asyncio.Task[None]) -> None:
        chain = self._chains[name]
        del chain[task]
        if not chain:
            del self._chains[name]


async def _run_after(
    earlier: tuple[asyncio.Task[None], ...], work: Callable[[], Awaitable[None]]
) -> None:
    if earlier:
        await asyncio.wait(earlier)
    await work()


class WorkloadControl:
    """Orders backends to start, stop and reset workloads, and posts their reports.

    An unexpected error in an order ends only the lease of its workload, with the reason.

    Args:
        backends: The backends, by the name that `provision.backend` uses.
        post: Posts an event to the core.
        tasks: Runs the orders.
        progress: Called with the progress of workloads.
        check: Called before each order to a backend; raises if this server no longer leads, as may
            happen while an order waits.
        stop_seconds_max: Longest time between SIGTERM and SIGKILL for any workload.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        post: Callable[[Event], None],
        tasks: Tasks,
        progress: Callable[[WorkloadReport], None],
        check: Callable[[], None],
        stop_seconds_max: float = STOP_SECONDS_MAX,
    ) -> None:
        self._backends = backends
        self._stop_seconds_max = stop_seconds_max
        self._post = post
        self._tasks = tasks
        self._progress = progress
        self._check = check
        self._orders = OrderChains(tasks)
        self._running: dict[str, Lease] = {}
        self._ends: dict[str, WorkloadReport] = {}
        self._seen: dict[str, WorkloadReport] = {}
        self._heirs: dict[str, RequestId] = {}
        self._looked: set[tuple[RequestId, int]] = set()
        self._inherited: dict[tuple[RequestId, int], str] = {}
        self._sweeps: list[asyncio.Future[None]] = []

    async def open(self, workloads: Collection[str]) -> None:
        """Open the backends, and stop running workloads that are not named in `workloads`."""
        loop = asyncio.get_running_loop()

        def take_report(workload: WorkloadReport) -> None:  # Called in any thread.
            loop.call_soon_threadsafe(self._note_report, workload)

        for backend in self._backends.values():
            backend.listen(take_report)
            try:
                async with asyncio.timeout(DISCOVER_SECONDS_MAX):
                    await self._sweep(backend, workloads)
            except (BackendError, TimeoutError) as error:  # The other backends need not wait.
                late = f"it did not list its workloads within {DISCOVER_SECONDS_MAX:g} s"
                log.warning("backend_sweep_failed", name=backend.name, finding=str(error) or late)
                self._sweeps.append(self._tasks.spawn(self._sweep_later(backend, workloads)))
            except Exception:
                log.exception("backend_failed", backend=backend.name)
                self._sweeps.append(self._tasks.spawn(self._sweep_later(backend, workloads)))

    async def _sweep(self, backend: Backend, workloads: Collection[str]) -> None:
        """Stop workloads that belong to no lease, old or new."""
        for workload in await backend.discover():
            name = workload.id
            if not (name in workloads or name in self._running or name in self._orders):
                self._orders.add(name, partial(self._stopped, backend, name), revocable=False)

    async def _sweep_later(self, backend: Backend, workloads: Collection[str]) -> None:
        for pause in itertools.chain(RETRY_SECONDS, itertools.repeat(RETRY_SECONDS[-1])):
            await asyncio.sleep(pause)
            try:
                await self._sweep(backend, workloads)
            except BackendError:
                continue  # The first failure was logged.
            except Exception:
                log.exception("backend_failed", backend=backend.name)
            else:
                return

    def resolve_provision(self, provision: Provision, nodes: int) -> Provision | Refusal:
        """Return a provision whose spec is in canonical form: equal specs become identical.

        Args:
            provision: The provision of a request.
            nodes: Number of nodes to run on.

        Returns:
            The provision; a refusal if it could never be started here.
        """
        backend = self._backends.get(provision.backend)
        if backend is None:
            there = sorted(self._backends)
            names = ", ".join(there)
            meant = nearest(provision.backend, there)
            reason = (
                f"provision.backend: there is no “{provision.backend}”{meant}; this server has"
                f" {names}, as its setting `backends` says."
            )
            expected, details = f"one of {names}", {"backends": there}
            return Refusal(Code.UNSUPPORTED, reason, "provision.backend", expected, details)
        if nodes > 1 and not backend.support.gangs:
            reason = (
                f"resources.nodes: the backend {backend.name} starts on one node, not on a gang"
            )
            if backend.name == "local":
                reason += "; with agents on other machines, it starts gangs (`moored agent token`)"
            reason += "."
            return Refusal(Code.UNSUPPORTED, reason, "resources.nodes", "1")
        try:
            spec = _spec(backend, provision)
            backend.refuse(spec)
        except SpecError as error:
            reason = f"provision.{error.path}: expected {error.expected}."
            return Refusal(Code.BAD_MESSAGE, reason, f"provision.{error.path}", error.expected)
        except UnsupportedSpecError as error:
            return Refusal(Code.UNSUPPORTED, f"provision.spec: {error}.", "provision.spec")
        for name, why in _UNSERVED.items():
            given = getattr(spec, name, None) not in (None, {})
            if name == "ray_actor_options" and spec.category == "ray_actor":
                continue  # The backend has checked them.
            if given and (name != "gpus" or spec.category in _HAVE_GPUS):
                field = f"provision.spec.{name}"
                return Refusal(Code.UNSUPPORTED, f"{field}: {why}.", field, "nothing")
        return structs.replace(provision, spec=document_from_spec(spec))

    def supports(self) -> dict[str, Support]:
        """Return the abilities of each backend, by name."""
        return {name: backend.support for name, backend in self._backends.items()}

    def look(self, lease: Lease) -> None:
        """Report at once that a workload that was taken over runs, if the backend knows that.

        Later reports about the workload go to this lease, so its start has nothing left to do.
        """
        name, backend = lease.workload, self.backend(lease)
        workload = (
            backend.glance(name) if backend is not None and name not in self._orders else None
        )
        if workload is not None:
            self._running[name], self._seen[name] = lease, workload
            self._looked.add((lease.id, lease.fencing))
            self._post(WorkloadStarted(lease.id, lease.fencing, workload.endpoint))

    def start(self, lease: Lease) -> None:
        """Start the workload of a lease."""
        if lease.inherited:
            self._inherited[lease.id, lease.attempt] = lease.inherited
            if len(self._inherited) > INHERITED_MAX:
                del self._inherited[next(iter(self._inherited))]
        if (lease.id, lease.fencing) in self._looked:
            self._looked.discard((lease.id, lease.fencing))
            if self._running.get(lease.workload) is lease:  # The workload still runs.
                self._heirs[lease.workload] = lease.id
            return
        self._order(lease, self._start)

    def stop(self, lease: Lease) -> None:
        """Stop the workload of a lease. Other orders for it are cancelled first."""
        self._orders.revoke(lease.workload, self._stop_seconds(lease))
        self._order(lease, self._stop, revocable=False)

    def keep(self, lease: Lease) -> None:
        """Reset the workload of a lease for its next user; stop it if that fails."""
        self._order(lease, self._keep)

    def backend(self, lease: Lease) -> Backend | None:
        """Return the backend of a lease's workload; None: no workload."""
        return self._backends.get(lease.provision.backend) if lease.provision else None

    def start_of(self, lease: Lease, attempt: int) -> tuple[str, int]:
        """Return the workload's name, and the start's number at the backend; 0: the last start."""
        name = self._inherited.get((lease.id, attempt))
        if name is None:
            name = lease.workload if attempt == lease.attempt else lease.id
        return name, attempt if name == lease.id else 0

    def report(self, lease: Lease) -> WorkloadReport | None:
        """Return the last report of a workload that starts or runs; None if there was no report."""
        running = self._running.get(lease.workload)
        return self._seen.get(lease.workload) if running and running.id == lease.id else None

    async def close(self) -> None:
        """Cancel orders under way; the next start of the daemon repeats them."""
        for sweep in self._sweeps:
            sweep.cancel()
        if under_way := [*self._orders.cancel(), *self._sweeps]:
            await asyncio.wait(under_way, timeout=CLOSE_SECONDS_MAX)
        closing = [asyncio.ensure_future(each.close()) for each in self._backends.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS_MAX)

    def _order(self, lease: Lease, order: _Order, *, revocable: bool = True) -> None:
        work = partial(self._carry_out, order, lease)
        self._orders.add(lease.workload, work, revocable=revocable)

    async def _carry_out(self, order: _Order, lease: Lease) -> None:
        """Carry out an order; an unexpected error ends the lease, not the daemon."""
        self._check()
        backend = self.backend(lease)
        try:
            await order(backend, lease)
        except Exception as error:
            name = lease.provision.backend if lease.provision else ""
            log.exception("backend_failed", backend=name, lease=str(lease.id))
            reason = f"the backend {name} failed: {type(error).__name__}: {error}"
            if backend is not None:  # The workload may run nevertheless.
                await self._stopped(backend, lease.workload)
            self._forget(lease.workload)
            self._post(WorkloadFailed(lease.id, lease.fencing, reason))

    async def _start(self, backend: Backend | None, lease: Lease) -> None:
        if backend is None or lease.provision is None:
            reason = "this server no longer has its backend"
            self._post(WorkloadFailed(lease.id, lease.fencing, reason))
            return
        name = lease.workload
        self._running[name] = lease
        if lease.inherited:
            self._heirs[name] = lease.id
        try:
            spec = _spec(backend, lease.provision)
            order = Order(
                name,
                spec,
                lease.placement,
                _environment(lease),
                spec.limit_seconds,
                lease.attempt,
                lease.fencing,
                lease.tenant,
                lease.devices,
                self._stop_seconds_max,
                lease.state == "active",
            )
            workload = await backend.start(order)
            if lease.inherited and lease.state == "starting" and not await _answers(backend, name):
                # The warm workload does not answer: the lease gets a new one.
                self._ends.pop(name, None)
                await self._stopped(backend, name)
                workload = await backend.start(order)
        except TimeoutError as error:
            reason = str(error) or "the workload was not ready in time"
            await self._report_failed_start(backend, lease, reason)
        except (BackendError, SpecError) as error:
            await self._report_failed_start(backend, lease, str(error))
        else:
            if workload.phase.over:  # The workload ended while the daemon was away.
                self._report_end(workload)
            else:
                self._seen[name] = workload
                self._post(WorkloadStarted(lease.id, lease.fencing, workload.endpoint))

    async def _report_failed_start(self, backend: Backend, lease: Lease, reason: str) -> None:
        name = lease.workload
        end = self._ends.get(name)  # The workload's last report says how it ended.
        code = end.exit_code if end else None
        tail = end.log_tail if end and end.log_tail else await self._tail(backend, lease)
        self._forget(name)
        self._post(WorkloadFailed(lease.id, lease.fencing, reason, code, _shorten(tail)))

    async def _tail(self, backend: Backend, lease: Lease) -> tuple[str, ...]:
        """Return the last output lines of an ended workload; () if they cannot be read."""
        name, start = self.start_of(lease, lease.attempt)
        with contextlib.suppress(BackendError, OSError):
            async with asyncio.timeout(TAIL_SECONDS_MAX):
                log = await backend.logs(name, -TAIL_CHARS_MAX, start)
            return tuple(log.text.splitlines()[-LOG_TAIL_LINES:])
        return ()

    def _forget(self, name: str) -> None:
        """Forget a workload that has ended: later reports about it are outdated."""
        for by_name in (self._running, self._ends, self._seen, self._heirs):
            by_name.pop(name, None)

    async def _stop(self, backend: Backend | None, lease: Lease, unfit: str = "") -> None:
        name = lease.workload
        self._forget(name)
        if lease.inherited:  # Its last reports are about this lease.
            self._heirs[name] = lease.id
        if backend is not None:
            await self._stopped(backend, name, self._stop_seconds(lease))
        asyncio.get_running_loop().call_soon(self._disown, name, lease.id)
        self._post(WorkloadStopped(lease.id, lease.fencing, unfit))

    def _disown(self, name: str, lease: RequestId) -> None:
        if self._heirs.get(name) == lease:
            del self._heirs[name]

    async def _keep(self, backend: Backend | None, lease: Lease) -> None:
        self._running[lease.workload] = lease
        unfit = "the backend no longer exists" if backend is None else await _unfit(backend, lease)
        if unfit:
            await self._stop(backend, lease, unfit)
        else:
            self._post(WorkloadKept(lease.id, lease.fencing))

    def stop_seconds(self, lease: Lease) -> float | None:
        """Return the longest time that the workload of a lease may take to stop; None: unknown."""
        backend = self.backend(lease)
        if backend is None or lease.provision is None:
            return None
        with contextlib.suppress(SpecError):
            named: float | None = getattr(_spec(backend, lease.provision), "stop_seconds", None)
            return None if named is None else min(named, self._stop_seconds(lease))
        return None

    def _stop_seconds(self, lease: Lease) -> float:
        """Return the longest time that a workload may take to stop; for a preempted lease, less."""
        if lease.notice is None:
            return self._stop_seconds_max
        notice = lease.terms.notice_seconds or PREEMPTED_STOP_SECONDS
        return min(notice, self._stop_seconds_max)

    async def _stopped(
        self, backend: Backend, name: str, stop_seconds_max: float | None = None
    ) -> None:
        """Try to stop a workload until that succeeds: it may run even after a failed order."""
        for pause in itertools.chain(RETRY_SECONDS, itertools.repeat(RETRY_SECONDS[-1])):
            self._check()
            try:
                await backend.stop(
                    name, self._stop_seconds_max if stop_seconds_max is None else stop_seconds_max
                )
            except (BackendError, OSError):
                await asyncio.sleep(pause)
            except Exception:
                log.exception("backend_failed", backend=backend.name, workload=name)
                await asyncio.sleep(pause)
            else:
                return

    def _note_report(self, workload: WorkloadReport) -> None:
        name = workload.id
        heir = self._heirs.get(name)
        self._progress(workload if heir is None else dataclasses.replace(workload, id=heir))
        if name not in self._running:
            return  # The stop, or the failed start, reports the end.
        self._seen[name] = workload
        if workload.phase in {Phase.SUCCEEDED, Phase.FAILED}:
            self._report_end(workload)

    def _report_end(self, workload: WorkloadReport) -> None:
        """Report that a workload ended by itself, then order its stop."""
        self._ends[workload.id] = workload
        self._order(self._running[workload.id], self._tell_end)

    async def _tell_end(self, backend: Backend | None, lease: Lease) -> None:
        name = lease.workload
        workload = self._ends.pop(name, None)
        if workload is None or backend is None:
            return  # The workload was stopped, or failed to start, meanwhile.
        with contextlib.suppress(BackendError, OSError):
            if (await backend.status(name)).phase is Phase.READY:
                return  # A late report about the previous start under the same name.
        lease = self._running.pop(name, lease)  # Another lease may have it by now.
        self._post(_end(lease, workload))


def _spec(backend: Backend, provision: Provision) -> BaseResourceSpec:
    return spec_from_document(provision.spec, backend.support.default, backend.support.kinds)


async def _answers(backend: Backend, name: str) -> bool:
    """Return whether a warm workload still answers its probe."""
    try:
        return (await backend.probe(name)).phase is Phase.READY
    except (BackendError, OSError):
        return False


async def _unfit(backend: Backend, lease: Lease) -> str:
    """Reset and probe a workload; return why it cannot be reused, or "" if it can.

    A workload that is warm already was reset before: after a restart it is only probed.
    """
    try:
        async with asyncio.timeout(KEEP_SECONDS_MAX):
            if lease.state != "warm":
                with contextlib.suppress(UnsupportedSpecError):
                    await backend.reset(lease.workload)
            seen = await backend.probe(lease.workload)
    except TimeoutError:
        return f"the reset took longer than {KEEP_SECONDS_MAX:g} s"
    except (BackendError, OSError) as error:
        return str(error)
    return "" if seen.phase is Phase.READY else seen.detail or f"it is {seen.phase}"


def _end(lease: Lease, workload: WorkloadReport) -> WorkloadEnded:
    """Return the event that a workload ended by itself."""
    code, detail = workload.exit_code, workload.detail
    if workload.phase is Phase.SUCCEEDED:
        return WorkloadEnded(lease.id, lease.fencing, "succeeded", detail, code)
    lines = "; ".join(workload.log_tail[-3:])
    reason = f"{detail}{': ' if lines else ''}{lines}"
    tail = _shorten(workload.log_tail)
    return WorkloadEnded(lease.id, lease.fencing, "failed", reason, code, tail)


def _shorten(lines: Sequence[str]) -> tuple[str, ...]:
    """Return as many last lines as the limit allows; cut the beginning of too long a line."""
    shown: list[str] = []
    left = TAIL_CHARS_MAX
    for line in reversed(lines):
        if left <= 0:
            break
        shown.append(line[-left:])
        left -= len(line) + 1
    return tuple(reversed(shown))


def _environment(lease: Lease) -> dict[str, str]:
    """Return the environment variables that describe a workload's lease, without its token."""
    share = lease.placement[0]
    return {
        "MOORAGE_LEASE_ID": lease.id,
        "MOORAGE_FENCING": str(lease.fencing),
        "MOORAGE_CLUSTER_ID": share.cluster_id,
        "MOORAGE_NODE_ID": share.node_id,
        "MOORAGE_NODES": ",".join(each.node_id for each in lease.placement),
    }

"""Serves the owners of leases: output and files of workloads, and commands run inside."""

import asyncio
import base64
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, assert_never

from moorage.backends.base import (
    Backend,
    BackendError,
    FileSource,
    Log,
    UnknownAttemptError,
    UnknownFileError,
    UnknownWorkloadError,
    UnsupportedSpecError,
)
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Information
from moorage.daemon import descriptors
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.workloads.control import WorkloadControl
from moorage.daemon.workloads.readers import LogView, Readers
from moorage.model import Code, Lease, RequestId, SessionId, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.records.json_values import JsonObject

NOT_RUN: Final = (126, 127)
"""Exit codes, as in shells, of a program that is not executable or does not exist."""
EXECUTIONS_MAX: Final = 8
"""Maximum commands at a time inside one workload; one more is refused as `busy`."""
EXECUTIONS_OF_TENANT_MAX: Final = 48
"""Maximum commands at a time that one tenant runs inside workloads."""
EXECUTIONS_ALL_MAX: Final = 64
"""Maximum commands at a time inside all workloads; each costs descriptors and a process."""
FILE_READS_MAX: Final = 3
"""Maximum reads of runs' files at a time; further reads wait. The limit of one tenant is lower by
one. Each read takes a thread, and starts and stops of workloads need threads, too."""


class WorkloadAccess:
    """Answers the messages `logs`, `exec` and `files` of lease owners.

    Args:
        backends: The backends by name.
        lease: Finds a lease that holds resources, or was one of the last to end.
    """

    def __init__(
        self, backends: WorkloadControl, lease: Callable[[RequestId], Lease | None]
    ) -> None:
        self._backends = backends
        self._lease = lease
        self._executing: Counter[str] = Counter()
        self._executing_of: Counter[Tenant] = Counter()
        self._file_turns = FairSemaphore(FILE_READS_MAX)
        self._readers = Readers()
        self.drop_session = self._readers.drop_session

    def stop_seconds(self, lease: Lease) -> float | None:
        """Return the longest time that the workload of a lease may take to stop; None: unknown."""
        return self._backends.stop_seconds(lease)

    async def answer(
        self, message: wire.Logs | wire.Exec | wire.Files, tenant: Tenant, session: SessionId
    ) -> Information | Refusal:
        """Carry out a message; every failure is a refusal.

        Args:
            message: The operation; without a token, the lease must be of the tenant.
            tenant: The caller's tenant.
            session: The session of the message; once it ends, waits end, too.
        """
        lease = self._find_owned(message, tenant)
        if isinstance(lease, Refusal):
            return lease
        backend = self._backends.backend(lease)
        if backend is None:
            reason = f"Lease {message.lease} has no workload: its request had no `provision`."
            return Refusal(Code.UNSUPPORTED, reason, "lease", "a lease with a workload")
        if (busy := self._busy(lease, message, tenant)) is not None:
            return busy
        try:
            return await self._look_into(backend, lease, message, tenant, session)
        except UnknownFileError as error:
            return Refusal(Code.NOT_FOUND, f"{error}.", "path", "a file that `files` lists")
        except UnknownWorkloadError:
            reason = f"Nothing runs for lease {message.lease}; it is {lease.state}."
            return Refusal(Code.NOT_FOUND, reason, "lease", "a lease whose workload was started")
        except UnsupportedSpecError as error:
            return Refusal(Code.UNSUPPORTED, f"{error}.", "op")
        except TimeoutError as error:
            return Refusal(Code.ENGINE_FAILED, f"{error}.", "timeout_seconds", "more time")
        except (BackendError, OSError) as error:
            return Refusal(Code.ENGINE_FAILED, f"{error}.")

    async def _look_into(
        self,
        backend: Backend,
        lease: Lease,
        message: wire.Logs | wire.Exec | wire.Files,
        tenant: Tenant,
        session: SessionId,
    ) -> Information | Refusal:
        match message:
            case wire.Logs():
                return await self._read(backend, lease, message, tenant, session)
            case wire.Exec():
                with self._count_command(lease, tenant):
                    return Information(await self._exec(backend, lease.workload, message))
            case wire.Files():
                async with self._file_turns.turn(tenant):
                    return Information(await self._files(backend, lease, message))
            case _:
                assert_never(message)

    @contextlib.contextmanager
    def _count_command(self, lease: Lease, tenant: Tenant) -> Iterator[None]:
        """Count a command inside a workload while it runs."""
        self._executing[lease.workload] += 1
        self._executing_of[tenant] += 1
        try:
            yield
        finally:
            self._executing[lease.workload] -= 1
            self._executing_of[tenant] -= 1
            self._executing += Counter()  # Removes counts of zero.
            self._executing_of += Counter()

    def _busy(
        self, lease: Lease, message: wire.Logs | wire.Exec | wire.Files, tenant: Tenant
    ) -> Refusal | None:
        """Return the refusal of a message beyond the limits of this server, or None."""
        reason = ""
        if not descriptors.spare():
            reason = "This server has almost no free file descriptors"
        elif not isinstance(message, wire.Exec):
            pass
        elif self._executing.total() >= EXECUTIONS_ALL_MAX:
            reason = f"{EXECUTIONS_ALL_MAX} commands run inside workloads already"
        elif self._executing_of[tenant] >= EXECUTIONS_OF_TENANT_MAX:
            reason = f"{EXECUTIONS_OF_TENANT_MAX} commands of your tenant run already"
        elif self._executing[lease.workload] >= EXECUTIONS_MAX:
            reason = f"{EXECUTIONS_MAX} commands run inside the workload of {lease.id} already"
        return Refusal(Code.BUSY, f"{reason}; try again in a moment.") if reason else None

    def _find_owned(
        self, message: wire.Logs | wire.Exec | wire.Files, tenant: Tenant
    ) -> Lease | Refusal:
        """Return the lease, or the refusal of a caller that may not look into its workload."""
        lease = self._lease(RequestId(message.lease))
        if lease is None or (message.token is None and lease.tenant != tenant):
            return refusals.unknown_lease(RequestId(message.lease))
        if message.token is not None and lease.token_digest != digest(message.token):
            return refusals.wrong_token(lease.id)
        if lease.over and lease.likeness and lease.outcome is None:
            reason = f"Lease {message.lease} was released, and others may use its workload now."
            return Refusal(Code.LEASE_ENDED, reason, "lease", "a lease that has not ended")
        if not isinstance(message, wire.Exec) and message.attempt > lease.attempt:
            reason = f"Lease {message.lease} has been started {lease.attempt} times."
            expected = f"at most {lease.attempt}"
            return Refusal(Code.NOT_FOUND, reason, "attempt", expected)
        return lease

    async def _read(
        self, backend: Backend, lease: Lease, message: wire.Logs, tenant: Tenant, session: SessionId
    ) -> Information | Refusal:
        """Read output; if there is none yet, wait for output within the bounds of `Readers`."""
        if not message.wait_seconds:
            return await self._logs(backend, lease, message)
        if (busy := self._readers.refusal(lease, tenant)) is not None:
            return busy
        async with self._readers.reading(lease, tenant, session):
            return await self._logs(backend, lease, message)

    async def _logs(
        self, backend: Backend, lease: Lease, message: wire.Logs
    ) -> Information | Refusal:
        """Read output of one start. At the end of this output, the reply names the next start.

        Output is returned only under the number of its own start. So a reader that continues from
        the attempt and offset of the previous reply loses nothing, however fast starts follow.
        """
        attempt, offset = message.attempt or lease.attempt, message.offset
        give_up_at = asyncio.get_running_loop().time() + message.wait_seconds

        async def look(seen: LogView) -> LogView:
            now = self._lease(seen.lease.id) or seen.lease
            log = await self._log(backend, now, attempt, seen.end)
            return LogView(log.offset, log.over, now)

        while True:
            late = asyncio.get_running_loop().time() >= give_up_at
            lease = self._lease(lease.id) or lease  # First: it must not be newer than the output.
            try:
                log = await self._log(backend, lease, attempt, offset)
            except UnknownWorkloadError as error:
                if attempt == lease.attempt:
                    raise
                return _missing_output(lease, attempt, error)
            if log.over and not log.text and attempt < lease.attempt:
                return Information(_part(Log("", 0), attempt + 1, message))
            over = log.over and lease.over and attempt == lease.attempt
            if log.text or over or late:
                part = _part(log, attempt, message)
                return Information(
                    part | {"over": True, "exit_code": _code(lease, log)} if over else part
                )
            offset = log.offset
            seen = LogView(offset, log.over, lease)
            await self._readers.grown(attempt, seen, look, give_up_at)

    async def _log(self, backend: Backend, lease: Lease, attempt: int, offset: int) -> Log:
        """Read output; return nothing if the start was ordered but has not begun."""
        name, start = self._backends.start_of(lease, attempt)
        try:
            return await backend.logs(name, offset, start)
        except UnknownWorkloadError:
            if attempt == lease.attempt and lease.state in {"starting", "queued"}:
                return Log("", 0)
            raise

    async def _files(self, backend: Backend, lease: Lease, message: wire.Files) -> JsonObject:
        if not isinstance(backend, FileSource):
            raise UnsupportedSpecError(
                f"the backend {backend.name} cannot return the files of a run"
            )
        attempt = message.attempt or lease.attempt
        name, start = self._backends.start_of(lease, attempt)
        if message.path:
            part = await backend.read_file(name, message.path, message.offset, start)
            text = base64.b64encode(part.data).decode()
            return {"base64": text, "offset": part.offset, "over": part.over}
        found = await backend.files(name, start)
        files = [{"path": path, "size": size} for path, size in found.files]
        left_out = [{"path": path, "reason": reason} for path, reason in found.left_out]
        return {"files": files, "left_out": left_out, "attempt": attempt}

    async def _exec(self, backend: Backend, workload: str, message: wire.Exec) -> JsonObject:
        done = await backend.execute(
            workload,
            message.command,
            timeout_seconds=message.timeout_seconds,
            workdir=message.workdir or None,
            user=message.user or None,
            environment=message.environment,
        )
        return {"exit_code": done.exit_code, "output": done.output}


def _part(log: Log, attempt: int, message: wire.Logs) -> JsonObject:
    """Return a piece of output for the reply, with the offset of the next piece."""
    if message.encoding == "base64":
        written = {"base64": base64.b64encode(log.data).decode()}
    else:
        written = {"text": log.text}
    where = {"offset": log.offset, "attempt": attempt}
    return {**written, **where, "over": False, "exit_code": None}


def _code(lease: Lease, log: Log) -> int | None:
    """Return the exit code of the last start; not every backend stores it beside the output."""
    outcome = lease.outcome
    if outcome is None or outcome.attempt != lease.attempt:
        return log.exit_code
    none_ran = outcome.exit_code is None and log.exit_code in NOT_RUN
    return log.exit_code if none_ran else outcome.exit_code


def _missing_output(lease: Lease, attempt: int, error: UnknownWorkloadError) -> Refusal:
    """Refuse a read of a start without stored output; name the starts with output."""
    attempts = error.attempts if isinstance(error, UnknownAttemptError) else ()
    others = sorted({*attempts, lease.attempt} - {attempt})
    reason = f"No output of start {attempt} of lease {lease.id} is stored"
    listed = ", ".join(map(str, others))
    return Refusal(
        Code.NOT_FOUND, f"{reason}.", "attempt", f"one of {listed}", {"attempts": others}
    )

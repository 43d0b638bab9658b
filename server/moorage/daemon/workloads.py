"""Looks into the workloads of leases for their owners: what they wrote, and commands inside."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, assert_never

from moorage.core.words import Refusal, Told
from moorage.daemon.engine_room import EngineRoom
from moorage.engines.base import (
    Engine,
    EngineError,
    Log,
    UnknownWorkloadError,
    UnsupportedSpecError,
)
from moorage.model import Code, Lease, RequestId
from moorage.protocol import messages as wire

LOOK_SECONDS: Final = 0.1
"""Between two looks for new output. Files and containers do not say when they have grown."""


class Workloads:
    """Answers `logs` and `exec`.

    Args:
        engines: Who runs what.
        lease: Finds a lease that holds, or one of the last that ended.

    """

    def __init__(self, engines: EngineRoom, lease: Callable[[RequestId], Lease | None]) -> None:
        self._engines = engines
        self._lease = lease

    async def answer(self, message: wire.Logs | wire.Exec) -> Told | Refusal:
        """Do what a message says; whatever goes wrong is a refusal."""
        lease = self._owned(message)
        if isinstance(lease, Refusal):
            return lease
        engine = self._engines.engine(lease)
        if engine is None:
            reason = f"Lease {message.lease} has no workload: it was asked for without `provision`."
            return Refusal(Code.UNSUPPORTED, reason, "lease", "a lease with a workload")
        try:
            match message:
                case wire.Logs():
                    return Told(await self._logs(engine, message))
                case wire.Exec():
                    return Told(await self._exec(engine, lease.workload, message))
                case _:
                    assert_never(message)
        except UnknownWorkloadError:
            reason = f"Nothing runs for lease {message.lease}; it is {lease.state}."
            return Refusal(Code.NOT_FOUND, reason, "lease", "a lease whose workload was started")
        except UnsupportedSpecError as error:
            return Refusal(Code.UNSUPPORTED, f"{error}.", "op")
        except TimeoutError as error:
            return Refusal(Code.ENGINE_FAILED, f"{error}.", "timeout_seconds", "more time")
        except EngineError as error:
            return Refusal(Code.ENGINE_FAILED, f"{error}.")

    def _owned(self, message: wire.Logs | wire.Exec) -> Lease | Refusal:
        """Return the lease, or why the caller may not look into its workload."""
        lease = self._lease(RequestId(message.lease))
        if lease is None:
            reason = f"There is no lease {message.lease}, or it ended long ago."
            return Refusal(Code.UNKNOWN_LEASE, reason, "lease", "the id of a lease")
        if lease.token != message.token:
            reason = f"This is not the token of lease {message.lease}."
            expected = "the `token` that came with the grant"
            return Refusal(Code.WRONG_TOKEN, reason, "token", expected)
        if lease.over and lease.likeness and lease.outcome is None:
            reason = f"Lease {message.lease} was released, and others may use its workload now."
            return Refusal(Code.LEASE_ENDED, reason, "lease", "a lease that still holds")
        return lease

    async def _logs(self, engine: Engine, message: wire.Logs) -> dict[str, Any]:
        attempt, offset = message.attempt, message.offset
        give_up_at = asyncio.get_running_loop().time() + message.wait_seconds
        while True:
            late = asyncio.get_running_loop().time() >= give_up_at
            lease = self._lease(RequestId(message.lease))
            if attempt and lease is not None and lease.attempt != attempt:
                offset = 0  # What came before was written by an earlier start.
            attempt = message.attempt if lease is None else lease.attempt
            log = await self._log(engine, message.lease, offset)
            lease = self._lease(RequestId(message.lease))
            if lease is not None and lease.attempt != attempt:
                continue  # It was started again meanwhile: whose output this is, nobody knows.
            over = log is not None and log.over and _is_last(lease, log)
            if log is not None and (log.text or over or late):
                return {
                    "text": log.text,
                    "offset": log.offset,
                    "attempt": attempt,
                    "over": over,
                    "exit_code": log.exit_code if over else None,
                }
            if log is None and late:
                return {
                    "text": "",
                    "offset": 0,
                    "attempt": attempt,
                    "over": False,
                    "exit_code": None,
                }
            if log is not None:
                offset = log.offset
            pause = LOOK_SECONDS
            await asyncio.sleep(pause)

    async def _log(self, engine: Engine, name: str, offset: int) -> Log | None:
        """Read output; None where the start it would be of was ordered, and has not begun.

        Raises:
            UnknownWorkloadError: There is none, and none to come.

        """
        lease = self._lease(RequestId(name))
        begins = lease is not None and lease.state == "starting"
        try:
            log = await engine.logs(name if lease is None else lease.workload, offset)
        except UnknownWorkloadError:
            if begins or (lease is not None and lease.state == "queued"):
                return None
            raise
        # What is over already is what the start before this one wrote.
        return None if begins and log.over and lease is not None and lease.attempt > 1 else log

    async def _exec(self, engine: Engine, workload: str, message: wire.Exec) -> dict[str, Any]:
        done = await engine.execute(
            workload,
            message.command,
            timeout_seconds=message.timeout_seconds,
            workdir=message.workdir or None,
            user=message.user or None,
            environment=message.environment,
        )
        return {"exit_code": done.exit_code, "output": done.output}


def _is_last(lease: Lease | None, log: Log) -> bool:
    """Return whether nothing can follow what is over, and the reason is there for who asks.

    A failure may bring another start. What never ran says nothing by itself: its lease will.
    """
    if lease is None or lease.over or log.exit_code == 0:
        return True
    return log.exit_code is not None and lease.state != "queued" and not lease.may_start_again

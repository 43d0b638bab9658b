"""Looks into the workloads of leases for their owners: what they wrote, and commands inside."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, assert_never

from moorage.core.words import Refusal, Told
from moorage.daemon.engine_room import EngineRoom
from moorage.engines.base import Engine, EngineError, UnknownWorkloadError, UnsupportedSpecError
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
        lease = self._lease(RequestId(message.lease))
        if lease is None:
            reason = f"There is no lease {message.lease}, or it ended long ago."
            return Refusal(Code.UNKNOWN_LEASE, reason, "lease", "the id of a lease")
        if lease.token != message.token:
            reason = f"This is not the token of lease {message.lease}."
            expected = "the `token` that came with the grant"
            return Refusal(Code.WRONG_TOKEN, reason, "token", expected)
        engine = self._engines.engine(lease)
        if engine is None:
            reason = f"Lease {message.lease} has no workload: it was asked for without `provision`."
            return Refusal(Code.UNSUPPORTED, reason, "lease", "a lease with a workload")
        try:
            match message:
                case wire.Logs():
                    return Told(await self._logs(engine, message))
                case wire.Exec():
                    return Told(await self._exec(engine, message))
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

    async def _logs(self, engine: Engine, message: wire.Logs) -> dict[str, Any]:
        offset = message.offset
        give_up_at = asyncio.get_running_loop().time() + message.wait_seconds
        while True:
            try:
                log = await engine.logs(message.lease, offset)
            except UnknownWorkloadError:
                lease = self._lease(RequestId(message.lease))
                if lease is None or lease.state != "starting":
                    raise
                log = None  # Ordered, and not begun.
            late = asyncio.get_running_loop().time() >= give_up_at
            if log is not None and (log.text or log.over or late):
                return {
                    "text": log.text,
                    "offset": log.offset,
                    "over": log.over,
                    "exit_code": log.exit_code,
                }
            if log is None and late:
                return {"text": "", "offset": 0, "over": False, "exit_code": None}
            if log is not None:
                offset = log.offset
            pause = LOOK_SECONDS
            await asyncio.sleep(pause)

    async def _exec(self, engine: Engine, message: wire.Exec) -> dict[str, Any]:
        done = await engine.execute(
            message.lease,
            message.command,
            timeout_seconds=message.timeout_seconds,
            workdir=message.workdir or None,
            user=message.user or None,
            environment=message.environment,
        )
        return {"exit_code": done.exit_code, "output": done.output}

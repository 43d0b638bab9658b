"""Runs work beside the daemon: a separate program that decides on its own core and cells.

The console's playground and what-ifs start it. The program gets only a few environment variables of
this process, runs at low priority, and ends when its time is over.
"""

import asyncio
import contextlib
import os
import signal
from typing import Final

import msgspec

from moorage import launch
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject

OUTCOME_BYTES_MAX: Final = 16 << 20
ERROR_CHARACTERS_MAX: Final = 2_000
_KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "HOME")


async def offline(command: str, job: bytes, seconds: float) -> JsonObject:
    """Run a job in a separate program, and return its result.

    Raises:
        ServiceError: The program refuses the job, takes too long, or fails; or its outcome is too
            large.
    """
    variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    program = ("nice", "-n", "10", *launch.command("moorage.lab.offline", command))
    process = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=variables,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(job)
    except TimeoutError as error:
        reason = f"the job did not end within {seconds:g} seconds; try a smaller job"
        raise ServiceError(Code.POLICY_TIMEOUT, reason, status=504) from error
    finally:
        # This also kills its cells; cells outside its group end when it ends.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if len(output) > OUTCOME_BYTES_MAX:
        raise ServiceError(Code.TOO_LARGE, "the outcome of the job is too large; try a smaller job")
    try:
        outcome: JsonObject = msgspec.json.decode(output, type=JsonObject)
    except msgspec.DecodeError as error:
        text = errors.decode("utf-8", "replace")[-ERROR_CHARACTERS_MAX:]
        raise ServiceError(Code.UNAVAILABLE, f"the job failed on the server: {text}") from error
    if "error" in outcome:
        code = Code(outcome.get("code", Code.BAD_MESSAGE))
        names = ("field", "expected", "details")
        about = {name: outcome[name] for name in names if name in outcome}
        raise ServiceError(code, outcome["error"], **about)
    return outcome

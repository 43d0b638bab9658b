"""The program behind `moorage policy test`, `backtest`, `push`, what-ifs and the playground.

The program reads a job from stdin, as JSON (a what-if as msgpack), and writes the result to stdout.

The command line is a client and may not import the server's packages; it starts this program
instead, with its own interpreter. So the jail's processes are children of this program.
"""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from moorage.lab import backtest, playground, policy_test, whatif
from moorage.lab.errors import CommandError, unknown
from moorage.lab.event_loop import run_until_sigterm
from moorage.lab.trace import TraceError
from moorage.launch import reason_of
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonValue
from moorage.sandbox.host.sandbox import SandboxError
from moorage_policies import catalog as shipped


def _test(text: bytes) -> JsonValue:
    return run_until_sigterm(
        policy_test.try_policy(msgspec.json.decode(text, type=policy_test.PolicyTestJob))
    )


def _backtest(text: bytes) -> JsonValue:
    return run_until_sigterm(
        backtest.backtest(msgspec.json.decode(text, type=backtest.BacktestJob))
    )


def _play(text: bytes) -> JsonValue:
    job = msgspec.json.decode(text, type=playground.PlaygroundJob)
    return run_until_sigterm(playground.play_trace(job) if job.trace else playground.play(job))


def _whatif(packed: bytes) -> JsonValue:
    return run_until_sigterm(whatif.whatif(msgspec.msgpack.decode(packed, type=whatif.WhatIfJob)))


def _read_shipped(text: bytes) -> JsonValue:
    name = msgspec.json.decode(text)["name"]
    if name not in shipped.shipped():
        raise CommandError(unknown(name, shipped.shipped()))
    return shipped.document(name)


COMMANDS: Final[dict[str, Callable[[bytes], JsonValue]]] = {
    "test": _test,
    "backtest": _backtest,
    "play": _play,
    "whatif": _whatif,
    "shipped": _read_shipped,
}
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run one job and print its result; the result of a failed job is `{"error": …}`."""
    # At SIGTERM, the job removes its folders. Linux sends SIGTERM when the parent ends, also by
    # kill -9.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        outcome = COMMANDS[sys.argv[1]](sys.stdin.buffer.read())
    except (CommandError, TraceError, ServiceError, SandboxError, OSError, ValueError) as error:
        outcome = {"error": reason_of(error)}
        if isinstance(error, ServiceError):
            wrong = {"field": error.field, "expected": error.expected, "details": error.details}
            outcome |= {"code": error.code, **wrong}
    with contextlib.suppress(BrokenPipeError):  # The caller ended meanwhile.
        sys.stdout.buffer.write(msgspec.json.encode(outcome))
        sys.stdout.flush()

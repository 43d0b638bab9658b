"""What `moorage policy test`, `backtest` and `push` run: JSON on stdin, its outcome on stdout.

The command line is a client and may not import the server's rooms; it starts this program instead,
with its own interpreter. So the jail's processes belong to a program of their own, too.

    python -m moorage.trials.offline test <job.json
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import uvloop

from moorage.protocol.faults import ServiceError
from moorage.sandbox.host import SandboxError
from moorage.trials import backtest, policy_test
from moorage.trials.process import TrialError
from moorage.trials.trace import TraceError
from moorage_policies import catalog as shipped


def _test(text: bytes) -> Any:
    return uvloop.run(policy_test.try_rule(msgspec.json.decode(text, type=policy_test.Job)))


def _backtest(text: bytes) -> Any:
    return uvloop.run(backtest.backtest(msgspec.json.decode(text, type=backtest.Job)))


def _shipped(text: bytes) -> Any:
    name = msgspec.json.decode(text)["name"]
    if name not in shipped.shipped():
        known = ", ".join(shipped.shipped())
        raise TrialError(f"there is no file and no shipped rule {name!r}; there are {known}")
    return shipped.document(name)


COMMANDS: Final[dict[str, Callable[[bytes], Any]]] = {
    "test": _test,
    "backtest": _backtest,
    "shipped": _shipped,
}


def main() -> None:
    """Do one job. A job that cannot be done is an outcome too: `{"error": …}`."""
    try:
        outcome = COMMANDS[sys.argv[1]](sys.stdin.buffer.read())
    except (TrialError, TraceError, ServiceError, SandboxError, OSError, ValueError) as error:
        outcome = {"error": str(error)}
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()

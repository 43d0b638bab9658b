"""Exit codes, on which scripts rely, and the errors for each code."""

from enum import IntEnum
from typing import Final

from moorage.launch import EXIT_INTERRUPTED, EXIT_UNWRITABLE
from moorage.model import Code
from moorage.protocol.codes import WORTH_RETRYING
from moorage_client.errors import (
    ConnectionFailed,
    LeaseEnded,
    LeaseLost,
    MoorageError,
    NotFound,
    RequestRefused,
    RuleFailed,
    SettingRefused,
    Timeout,
    Unauthorized,
)
from moorage_client.home import HomeMissing
from moorage_client.sign_in import SignInFailed
from moorage_client.state_file import StateUnusable


class Exit(IntEnum):
    """The exit codes of `moorage`."""

    OK = 0
    NOT_NOW = 1
    USAGE = 2
    NEVER = 3
    UNREACHABLE = 4
    UNKNOWN = 5
    RULE_FAILED = 6
    LEASE_LOST = 7
    INTERNAL = 70
    UNWRITABLE = EXIT_UNWRITABLE
    INTERRUPTED = EXIT_INTERRUPTED


MEANINGS: Final = {
    Exit.OK: "done",
    Exit.NOT_NOW: "refused, but may succeed later: no capacity, waited too long, server busy",
    Exit.USAGE: "the command line is wrong",
    Exit.NEVER: "refused for good: it never fits, or the request itself is wrong",
    Exit.UNREACHABLE: "no Moorage server answers (in time) at the URL",
    Exit.UNKNOWN: "no such lease, request, policy or cluster; or wrong or missing token",
    Exit.RULE_FAILED: "the policy itself failed",
    Exit.LEASE_LOST: "the lease has ended",
    Exit.INTERNAL: "a defect, of the server or of this program",
    Exit.UNWRITABLE: "the result cannot be written to stdout",
    Exit.INTERRUPTED: "interrupted with Ctrl-C",
}


class TokenMissing(MoorageError):  # noqa: N818  # As the rest of the tree.
    """The token of a lease is not stored on this machine."""


def exit_of(error: MoorageError) -> Exit:
    """Return the exit code for an error."""
    match error:
        case ConnectionFailed() | Timeout():
            return Exit.UNREACHABLE
        case LeaseLost() | LeaseEnded():
            return Exit.LEASE_LOST
        case NotFound() | Unauthorized() | TokenMissing() | StateUnusable() | SignInFailed():
            return Exit.UNKNOWN
        case HomeMissing() | SettingRefused():
            return Exit.USAGE
        case RuleFailed():
            return Exit.RULE_FAILED
        case RequestRefused(code=Code.INTERNAL):
            return Exit.INTERNAL
        case RequestRefused(code=code):
            later = code in WORTH_RETRYING or code in {Code.CANCELLED, Code.ENGINE_FAILED}
            return Exit.NOT_NOW if later else Exit.NEVER
        case _:  # An error without an exit code here is a defect.
            return Exit.INTERNAL

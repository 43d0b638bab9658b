"""Bounds on requests that one ask causes at external services; the mirrored catalog spends them."""

from dataclasses import dataclass
from typing import Final

__all__ = ["REQUESTS_MAX", "SPENT", "Allowance"]

REQUESTS_MAX: Final = 2
"""Requests that one ask may cause at external services, whatever its candidates."""
SPENT: Final = (
    f"An ask makes at most {REQUESTS_MAX} requests to external services, and this one made them;"
    " the next one finds what these brought."
)
"""What a warning or a refusal says of a question that was not put."""


@dataclass(slots=True)
class Allowance:
    """The requests that one ask may still cause at external services; it stays with the ask.

    Repetitions after a failure are not counted, nor the download of a policy's code, once for each
    version. Joining a request that is under way for another tenant counts.

    Args:
        left: Requests.

    """

    left: int = REQUESTS_MAX

    def spend(self) -> bool:
        """Take one request, if one is left; return whether one was."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

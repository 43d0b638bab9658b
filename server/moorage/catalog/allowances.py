"""The limit of requests to external services that one allocation request may cause."""

from dataclasses import dataclass
from typing import Final

REQUESTS_MAX: Final = 2
"""Maximum requests to external services that one allocation request may cause."""
SPENT: Final = (
    f"A request may cause at most {REQUESTS_MAX} requests to external services, and this "
    "request caused them. Their answers are stored for the next request."
)
"""The text of a warning or refusal if the limit stops a request to an external service."""


@dataclass(slots=True)
class Allowance:
    """The number of requests to external services that an allocation request may still cause.

    Repetitions after a failure do not count, nor does the download of a policy's code, once per
    version. Joining a request that already runs for another tenant counts.
    """

    left: int = REQUESTS_MAX

    def spend(self) -> bool:
        """Use one request; return False if none is left."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

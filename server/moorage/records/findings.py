"""The findings of `moored doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing looked at.

    Args:
        name: What.
        state: `ok`; `missing` for what `moored serve` does without; `broken` for what it needs.
        detail: What was found, or what to do.
    """

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str

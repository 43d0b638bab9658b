"""Holds what `moored doctor` found out about each thing that it examined."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The finding about one thing that `moored doctor` examined.

    Args:
        name: The name of the thing.
        state: `ok`; `missing` if `moored serve` can do without it; `broken` if not.
        detail: The result, or the remedy.
    """

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str

"""Holds what `moored doctor` found out about each thing that it examined."""

from dataclasses import dataclass
from typing import Literal

DoctorState = Literal["ok", "missing", "warning", "broken"]
"""`missing`: `moored serve` can do without it. `warning`: it needs attention soon."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The finding about one thing that `moored doctor` examined.

    Args:
        name: The name of the thing.
        detail: The result, or the remedy.
    """

    name: str
    state: DoctorState
    detail: str

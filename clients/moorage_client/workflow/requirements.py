"""Requirements of a node, and the arithmetic of amounts.

Amounts are ints or floats, and are counted in whole millionths: ten tenths are one, exactly, after
any number of acquisitions and releases.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from moorage_client.workflow.errors import ResourceError

UNITS: Final = 1_000_000
"""Units in an amount of 1. Amounts are rounded to the nearest unit."""

ALIASES: Final = {"cpu": "cpu_slots"}
"""Alternative names of resources, for users who declare only the alternative."""


def finite(number: object) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if math.isfinite(number) else None


def units(amount: float, what: str) -> int:
    """Return an amount in units.

    Args:
        amount: At least 0.
        what: The name of the amount, for the message.

    Raises:
        ResourceError: The amount is negative, or not a finite number.
    """
    if finite(amount) is None:
        raise ResourceError(f"{what} is {amount!r}; expected a finite number")
    if amount < 0:
        raise ResourceError(f"{what} is {amount!r}; expected 0 or more")
    return round(amount * UNITS)


def read_amount(amount: float, what: str) -> int:
    """Return a requested amount in units, as `units` does.

    Raises:
        ResourceError: The amount is above 0 and below a unit, so that it would count as 0.
    """
    count = units(amount, what)
    if 0 < amount * UNITS < 1:
        raise ResourceError(f"{what} is {amount!r}; expected 0, or {1 / UNITS:f} or more")
    return count


def amount_of(count: int) -> float:
    """Return an amount from its units: an int if it is whole."""
    whole, rest = divmod(count, UNITS)
    return count / UNITS if rest else whole


def resource_name(name: str, declaring: Mapping[str, object]) -> str:
    """Return the name that a pool uses for a resource: its own name, or its alias."""
    alias = ALIASES.get(name, name)
    return alias if alias in declaring and name not in declaring else name


@dataclass(frozen=True)
class ResourceRequirements:
    """The resources that a node needs while it runs.

    Args:
        resources: Amounts by name, such as `{"gpu": 2, "cpu": 4, "memory_mb": 8000}`.

    Raises:
        ResourceError: An amount is negative, not a finite number, or so small that it would
            count as 0 (a ValueError).
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        own = dict(self.resources)
        for name, amount in own.items():
            if not name:
                raise ResourceError("a resource's name is a text of at least one character")
            read_amount(amount, f"resources[{name!r}]")
        object.__setattr__(self, "resources", own)
        # Pools look up requirements at every acquisition.
        object.__setattr__(self, "_hash", hash(frozenset(own.items())))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def gpu(cls, n: float = 1, *, count: float | None = None) -> "ResourceRequirements":
        """Return a requirement for `n` GPUs; `count` is another name of `n`."""
        return cls({"gpu": n if count is None else count})

    @classmethod
    def cpu(cls, n: float = 1, *, count: float | None = None) -> "ResourceRequirements":
        """Return a requirement for `n` CPU cores; `count` is another name of `n`."""
        return cls({"cpu": n if count is None else count})

    @classmethod
    def memory(cls, mb: float) -> "ResourceRequirements":
        """Return a requirement for `mb` megabytes of memory."""
        return cls({"memory_mb": mb})

    def fits(self, available: Mapping[str, float]) -> bool:
        """Return whether all amounts are available; a missing resource counts as 0."""
        wanted = Counter[str]()
        for name, amount in self.resources.items():
            wanted[resource_name(name, available)] += units(amount, name)
        return all(want <= units(available.get(name, 0), name) for name, want in wanted.items())

"""Numbers of slots: ints and floats for users, exact fractions inside the pool.

A pool that adds and subtracts floats drifts: 0.3 - 0.1 - 0.1 - 0.1 is not 0. So the pool counts in
units, of which a slot has 10**24, and stores whole numbers of units. A float counts as the decimal
that it is written as: 0.1 is one tenth.
"""

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final, NewType

Slots = int | float
"""A number of slots as the user writes it."""
Amount = NewType("Amount", int)
"""A number of slots in internal units. Only `exact` makes an `Amount` of a user's number."""

SLOTS_MAX: Final = 10**9
"""Largest number of slots of one instance, or of one member of a request."""
DECIMALS_MAX: Final = 24
"""Maximum digits after the decimal point; Python writes a third with 16."""

_UNITS: Final = 10**DECIMALS_MAX
"""Internal units per slot."""

ONE: Final = Amount(_UNITS)
NONE: Final = Amount(0)


def exact(slots: Any) -> Amount | None:
    """Return a number of slots as an exact number; None if the value is not a number of slots.

    Args:
        slots: An int or a float; anything else, NaN, infinity, a negative number, more than
            `SLOTS_MAX` and more than `DECIMALS_MAX` digits behind the point are not numbers of
            slots.
    """
    if type(slots) is int:  # bool is not a number here.
        return Amount(slots * _UNITS) if 0 <= slots <= SLOTS_MAX else None
    if not isinstance(slots, float) or not math.isfinite(slots) or not 0 <= slots <= SLOTS_MAX:
        return None
    # `repr` gives the shortest decimal for this float, as its user wrote it.
    numerator, denominator = Decimal(float.__repr__(slots)).as_integer_ratio()
    amount, rest = divmod(numerator * _UNITS, denominator)
    return None if rest else Amount(amount)


def plain(amount: Amount) -> Slots:
    """Return a number of slots for users: an int if it is whole, else a float."""
    whole, rest = divmod(amount, _UNITS)
    return amount / _UNITS if rest else whole


def total(amounts: Iterable[Amount]) -> Amount:
    """Return the sum of numbers of slots."""
    return Amount(sum(amounts))

"""The values of an index's documents at one path, in arrays, for `index` and `ranking`.

A row has the values of one document; a leaf is a condition on one path. A column checks a leaf for
all rows at once. It stores the smallest and the largest number of each row for `<` and `>`, and
each distinct number and text of a row for equality and patterns. Rows with values that arrays
cannot store exactly (integers beyond 2**53, objects, lists within lists) are marked; for them, the
index reads the document.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt

from moorage.model import Code
from moorage.query.conditions import Among, Exists, Leaf, Matches, Ordered, OrderName, TextPattern
from moorage.query.errors import QueryError
from moorage.query.evaluate import ORDERS, spread
from moorage.query.limits import SEARCH_CHARS_MAX
from moorage.query.patterns import Expression
from moorage.query.values import Mark, is_number, keys_of, number_in
from moorage.records.json_values import JsonValue

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

# Codes of the values that are not texts; texts have the codes after them.
_MARKS: Final[dict[Hashable, int]] = {Mark.NULL: 0, Mark.TRUE: 1, Mark.FALSE: 2}


class Cells:
    """The values of rows in two arrays; a row may have any number of values.

    Args:
        rows: The largest number of rows, until `grow`.
        hole: Marks a removed value; no value equals it.
    """

    def __init__(self, rows: int, hole: float) -> None:
        self._hole = hole
        self._starts = np.zeros(rows, np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._values = np.zeros(0, np.int32 if isinstance(hole, int) else np.float64)
        self._rows = np.zeros(0, np.int32)
        self._used = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> npt.NDArray[Any]:
        """All values in one array, with `hole` in place of removed values."""
        return self._values[: self._used]

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The row of each value."""
        return self._rows[: self._used]

    def of(self, rows: Rows) -> npt.NDArray[Any]:
        """Return the values of some rows, one row after another."""
        return self._values[self._places(rows)]

    def set(self, rows: Rows, values: Sequence[Collection[float]]) -> None:
        """Replace the values of some rows; no row may appear twice."""
        lengths = np.fromiter(map(len, values), np.int32, len(values))
        # A row with as many values as before keeps its place; the others move to the end.
        moves = lengths != self._lengths[rows]
        moved, wanted = rows[moves], lengths[moves]
        self._values[self._places(moved)] = self._hole
        self._lengths[moved] = 0
        total = int(wanted.sum())
        if self._used + total > len(self._values):
            self._compact(total)
        self._starts[moved] = self._used + np.cumsum(wanted) - wanted
        self._lengths[moved] = wanted
        self._rows[self._used : self._used + total] = np.repeat(moved, wanted)
        self._used += total
        flat = np.fromiter(chain.from_iterable(values), self._values.dtype)
        self._values[self._places(rows)] = flat

    def _places(self, rows: Rows) -> Rows:
        """Return the array positions of the values of some rows."""
        lengths = self._lengths[rows].astype(np.intp)
        before = np.cumsum(lengths) - lengths
        return np.repeat(self._starts[rows] - before, lengths) + np.arange(lengths.sum())

    def grow(self, rows: int) -> None:
        """Enlarge the arrays for more rows."""
        self._starts = _longer(self._starts, rows, 0)
        self._lengths = _longer(self._lengths, rows, 0)

    def _compact(self, wanted: int) -> None:
        """Remove the holes, and leave as much free space as is used."""
        held = np.flatnonzero(self._lengths)
        lengths = self._lengths[held]
        places = self._places(held)
        size = max(16, 2 * (len(places) + wanted))
        self._values = _longer(self._values[places], size, self._hole)
        self._rows = _longer(self._rows[places], size, 0)
        self._starts[held] = np.cumsum(lengths) - lengths
        self._used = len(places)


def _longer(array: npt.NDArray[Any], size: int, fill: float) -> npt.NDArray[Any]:
    longer = np.full(size, fill, array.dtype)
    longer[: len(array)] = array
    return longer


class Column:
    """The values of documents at one path.

    Args:
        rows: The largest number of rows, until `grow`.
    """

    def __init__(self, rows: int) -> None:
        self.low = np.full(rows, np.nan)
        self.high = np.full(rows, np.nan)
        self.present: Mask = np.zeros(rows, np.bool_)
        self.structured: Mask = np.zeros(rows, np.bool_)
        """Rows with an object or a list among their values."""
        self.inexact: Mask = np.zeros(rows, np.bool_)
        """Rows with a number that no float can represent exactly."""
        self.numbers = Cells(rows, np.nan)
        self.codes = Cells(rows, -1)
        self._codes: dict[str, int] = {}
        self._texts = [""] * len(_MARKS)
        self._uses = [0] * len(_MARKS)
        self._free: list[int] = []
        self._vocabulary: _Vocabulary | None = None

    @property
    def size(self) -> int:
        """The number of values for which the column has memory."""
        return len(self.numbers) + len(self.codes) + len(self.present)

    def grow(self, rows: int) -> None:
        """Enlarge the arrays for more rows."""
        self.low, self.high = _longer(self.low, rows, np.nan), _longer(self.high, rows, np.nan)
        self.present = _longer(self.present, rows, 0)
        self.structured = _longer(self.structured, rows, 0)
        self.inexact = _longer(self.inexact, rows, 0)
        self.numbers.grow(rows)
        self.codes.grow(rows)

    def set(self, rows: Sequence[int], founds: Iterable[Sequence[JsonValue]]) -> None:
        """Replace the values of some rows by those of their documents."""
        held = [_split_array(found) for found in founds]
        at = np.array(rows, np.intp)
        self.present[at] = [each.present for each in held]
        self.structured[at] = [each.structured for each in held]
        self.inexact[at] = [each.inexact for each in held]
        self.low[at] = [min(each.numbers, default=np.nan) for each in held]
        self.high[at] = [max(each.numbers, default=np.nan) for each in held]
        self.numbers.set(at, [each.numbers for each in held])
        self._set_codes(at, [each.distinct for each in held])

    def _set_codes(self, rows: Rows, values: Sequence[Iterable[Hashable]]) -> None:
        before: list[int] = self.codes.of(rows).tolist()
        codes = [[self._code(value) for value in each] for each in values]
        # Added first: a text that stays is not forgotten in between.
        for code in chain.from_iterable(codes):
            self._uses[code] += 1
        self.codes.set(rows, codes)
        for code in before:
            self._uses[code] -= 1
            if code >= len(_MARKS) and not self._uses[code]:
                del self._codes[self._texts[code]]
                self._texts[code] = ""
                self._free.append(code)
                self._vocabulary = None

    def _code(self, value: Hashable) -> int:
        if not isinstance(value, str):
            return _MARKS[value]
        code = self._codes.get(value)
        if code is None:
            if self._free:
                code = self._free.pop()
                self._texts[code] = value
            else:
                code = len(self._texts)
                self._texts.append(value)
                self._uses.append(0)
            self._codes[value] = code
            self._vocabulary = None
        return code

    # Answers ---------------------------------------------------------------------------------

    def mask(self, leaf: Leaf) -> Mask:
        """Return the rows that meet a simple condition, except the rows in `unsure`.

        Raises:
            QueryError: `too_large`: a `$regex` would read more than `SEARCH_CHARS_MAX`.
        """
        match leaf:
            case Exists():
                return self.present.copy()
            case Among():
                return self._among(leaf.values)
            case Ordered(operator=name, operand=operand):
                return self._compare(name, operand)
            case Matches():
                return self._with_codes(self.vocabulary.matching(leaf.pattern, leaf.place))
            case _:
                assert_never(leaf)

    def unsure(self, leaf: Leaf) -> Mask | None:
        """Return the rows whose documents must be read to check a condition; None: no rows."""
        match leaf:
            case Among(values=values) if any(isinstance(value, (dict, list)) for value in values):
                return self.structured | self.inexact
            case Among() | Ordered():
                return self.inexact
            case Exists() | Matches():
                return None
            case _:
                assert_never(leaf)

    def _among(self, operands: Sequence[JsonValue]) -> Mask:
        keys: set[Hashable] = set().union(*map(keys_of, operands))
        numbers = [
            exact
            for key in keys
            if isinstance(key, (int, float)) and (exact := _exact(key)) is not None
        ]
        codes = [
            _MARKS[key] if isinstance(key, Mark) else self._codes[key]
            for key in keys
            if isinstance(key, Mark) or (isinstance(key, str) and key in self._codes)
        ]
        mask = self._with_codes(codes)
        if len(numbers) == 1:
            mask[self.numbers.rows[self.numbers.values == numbers[0]]] = True
        elif numbers:
            mask[self.numbers.rows[np.isin(self.numbers.values, numbers)]] = True
        return mask | ~self.present if Mark.NULL in keys else mask

    def _compare(self, name: OrderName, operand: float | str) -> Mask:
        number = number_in(operand)
        if isinstance(operand, str):
            mask = self._with_codes(self.vocabulary.beyond(name, operand))
        else:
            mask = np.zeros(len(self.present), np.bool_)
        if number is not None:
            mask |= _beyond(self.high if name.startswith(">") else self.low, name, number)
        return mask

    def _with_codes(self, codes: Sequence[int]) -> Mask:
        mask = np.zeros(len(self.present), np.bool_)
        if len(codes) == 1:
            mask[self.codes.rows[self.codes.values == codes[0]]] = True
        elif codes:
            wanted = np.zeros(len(self._uses) + 1, np.bool_)
            wanted[codes] = True
            # A hole is -1, which is the last place: no text's code.
            mask[self.codes.rows[wanted[self.codes.values]]] = True
        return mask

    @property
    def vocabulary(self) -> "_Vocabulary":
        """The distinct texts, prepared for searches."""
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._codes)
        return self._vocabulary

    def common(self, texts: Iterable[str]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return how many of these texts each row has, and how many texts each row has in total."""
        values, rows = self.codes.values, self.codes.rows
        wanted = np.zeros(len(self._uses) + 1, np.bool_)
        wanted[[self._codes[text] for text in texts if text in self._codes]] = True
        size = len(self.present)
        shared = np.bincount(rows[wanted[values]], minlength=size)
        return shared, np.bincount(rows[values >= len(_MARKS)], minlength=size)


@dataclass(slots=True)
class _Held:
    """The values of one row, split by the array of a column that stores them."""

    present: bool
    numbers: AbstractSet[float] = frozenset()
    distinct: AbstractSet[Hashable] = frozenset()
    structured: bool = False
    inexact: bool = False


def _split_array(found: Sequence[JsonValue]) -> _Held:
    """Split the values of a document for the arrays of a column."""
    values = spread(found) if any(isinstance(value, list) for value in found) else found
    kinds = set(map(type, values))
    # Most rows hold values of one kind, and only those are a set at once: to Python, True is 1.
    if kinds <= {str}:
        return _Held(bool(found), distinct=frozenset(values))
    held = _Held(present=True)
    numbers: set[float] = set()
    distinct: set[Hashable] = set()
    for value in set(values) if kinds <= {int, float} else values:
        if isinstance(value, str):
            distinct.add(value)
        elif is_number(value):
            exact = _exact(value)
            if exact is None:
                held.inexact = True
            else:
                numbers.add(exact)
        elif isinstance(value, bool) or value is None:
            distinct.add(Mark(value))
        elif isinstance(value, (dict, list)):
            held.structured = True
    held.numbers, held.distinct = numbers, distinct
    return held


class _Vocabulary:
    """Sorted texts, also joined into one long text; a change makes a new vocabulary.

    Args:
        codes: The number by which the column refers to each text.
    """

    def __init__(self, codes: Mapping[str, int]) -> None:
        self._texts = sorted(codes)
        self._codes = [codes[text] for text in self._texts]
        self._whole = "\0".join(self._texts)
        self._ends = [end + at for at, end in enumerate(accumulate(map(len, self._texts)))]

    def beyond(self, name: OrderName, text: str) -> list[int]:
        """Return the codes of the texts that sort before or after a text."""
        at = (bisect_left if name in {">=", "<"} else bisect_right)(self._texts, text)
        return self._codes[at:] if name.startswith(">") else self._codes[:at]

    def matching(self, pattern: TextPattern, place: str) -> list[int]:
        """Return the codes of the texts that match a pattern."""
        likely = self._with_needle(pattern.needles)
        if pattern.costly and sum(len(self._texts[at]) for at in likely) > SEARCH_CHARS_MAX:
            expected = "a pattern with more fixed text, or LIKE or $in instead"
            reason = f"would read more than {SEARCH_CHARS_MAX} characters"
            raise QueryError(place, expected, reason, Code.TOO_LARGE)
        if isinstance(pattern, Expression) and len(likely) == len(self._texts):
            return [self._codes[at] for at in pattern.occurring(self._texts, self._shared)]
        return [self._codes[at] for at in likely if pattern.matches(self._texts[at])]

    @cached_property
    def _shared(self) -> list[int]:
        """The length of the common prefix of each text and the previous one."""
        return [0, *(_common(one, other) for one, other in pairwise(self._texts))]

    def _with_needle(self, needles: Sequence[str]) -> Sequence[int]:
        """Return the positions of the texts that may contain all needles."""
        counts = [(self._whole.count(needle), needle) for needle in needles]
        # A needle in almost every text saves nothing, and costs more than matching each text.
        occurrences, needle = min(counts, default=(len(self._texts), ""))
        if not needle or occurrences > len(self._texts) // 4:
            return range(len(self._texts))
        found: list[int] = []
        at = self._whole.find(needle)
        while at >= 0:
            # A needle across the border of two texts is in neither, which the pattern will see.
            found.append(bisect_right(self._ends, at))
            at = self._whole.find(needle, self._ends[found[-1]] + 1)
        return found


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    for place, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return place
    return min(len(one), len(other))


def _exact(number: float) -> float | None:
    """Return a number as an equal float, or None if there is none."""
    try:
        exact = float(number)
    except OverflowError:
        return None
    return exact if exact == number else None


def _beyond(values: npt.NDArray[np.float64], name: OrderName, number: float) -> Mask:
    """Compare numbers exactly, also with an integer that no float can represent."""
    near = float(number)
    if near != number:
        # Values beyond the integer are beyond, or equal to, the float nearest to it.
        upper = near > number
        above: OrderName = ">=" if upper else ">"
        below: OrderName = "<" if upper else "<="
        name = above if name.startswith(">") else below
    found: Mask = ORDERS[name](values, near)
    return found

r"""`$regex`: a safe subset of regular expressions, compiled to a table.

The language: characters, `.`, `[a-z]`, `[^…]`, `\d \w \s` and their capitals, groups, `|`, `^`,
`$`, and `* + ? {m} {m,} {m,n}`, lazy or not, which makes no difference to whether it matches.
Look-around, back references and flags within the pattern are refused. `parse` calls `expression`.

A pattern becomes a tree, the tree a non-deterministic automaton, and the automaton a deterministic
table, by the subset construction. Its steps can grow exponentially, so a pattern that needs more
than `EXPRESSION_WORK_MAX` steps is refused. A match then reads each character of a text once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NoReturn, assert_never

from moorage.model import Code
from moorage.query.errors import QueryError
from moorage.query.limits import EXPRESSION_NODES_MAX, EXPRESSION_WORK_MAX
from moorage.query.patterns import ACCEPTED, REJECTED, Expression, TransitionRow

GROUPS_DEPTH_MAX: Final = 16
REPEATS_MAX: Final = 100
"""Largest number inside `{}`."""
_LAST_CODE_POINT: Final = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends included."""


@dataclass(frozen=True, slots=True)
class _OneOf:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class _Edge:
    side: Literal["^", "$"]


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: "tuple[_Tree, ...]"


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: "tuple[_Tree, ...]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: "_Tree"
    least: int
    most: int | None


_Tree = _OneOf | _Edge | _Sequence | _Choice | _Repeat


def expression(text: str, options: str, place: str) -> Expression:
    """Compile a `$regex`.

    Args:
        text: The pattern, of at most `PATTERN_CHARS_MAX` characters.
        options: `i` to ignore the case of the letters a to z, or empty.
        place: The place of the expression in the query, for errors.

    Raises:
        QueryError: The expression is malformed, not in the safe part, or too costly.
    """
    tree = _Reader(text, options == "i", place).whole()
    machine = _Machine(place)
    entry = machine.build(tree, machine.final)
    rows, last = _determine(machine, entry)
    return Expression(text, options, rows, last, _needles(tree))


# From text to tree ------------------------------------------------------------------------------


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    edges = [(-1, -1), *sorted(ranges), (_LAST_CODE_POINT + 1, _LAST_CODE_POINT + 1)]
    gaps: list[tuple[int, int]] = []
    reached = -1
    for (_, before), (after, _) in pairwise(edges):
        reached = max(reached, before)
        if reached + 1 < after:
            gaps.append((reached + 1, after - 1))
    return tuple(gaps)


_DIGITS: Final[Ranges] = ((48, 57),)
_WORDS: Final[Ranges] = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Final[Ranges] = ((9, 13), (32, 32))
_CLASSES: Final[dict[str, Ranges]] = {
    "d": _DIGITS,
    "D": _complement(_DIGITS),
    "w": _WORDS,
    "W": _complement(_WORDS),
    "s": _SPACES,
    "S": _complement(_SPACES),
    "n": ((10, 10),),
    "r": ((13, 13),),
    "t": ((9, 9),),
}
_ANY: Final = _complement(((10, 10),))
_EXPECTED: Final = (
    r"characters, . [a-z] [^a-z] \d \w \s ( ) | ^ $ * + ? {m,n}; a special character after a \ "
    "stands for itself"
)


@dataclass(slots=True)
class _Reader:
    """Parses a pattern into a tree."""

    text: str
    ignores_case: bool
    place: str
    at: int = 0

    def whole(self) -> _Tree:
        tree = self._choice(0)
        if self.at < len(self.text):
            self._refuse("is a ) without a (")
        return tree

    def _refuse(self, reason: str, code: Code = Code.BAD_MESSAGE) -> NoReturn:
        raise QueryError(self.place, _EXPECTED, f"character {self.at + 1} {reason}", code)

    def _next(self) -> str:
        """Return the next character, or an empty text."""
        return self.text[self.at : self.at + 1]

    def _takes(self, prefix: str) -> bool:
        taken = self.text.startswith(prefix, self.at)
        self.at += len(prefix) * taken
        return taken

    def _choice(self, depth: int) -> _Tree:
        parts = [self._sequence(depth)]
        while self._takes("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self, depth: int) -> _Tree:
        parts: list[_Tree] = []
        while self._next() not in {"", "|", ")"}:
            part = self._atom(depth)
            parts.append(part if isinstance(part, _Edge) else self._repeated(part))
        return _Sequence(tuple(parts))

    def _atom(self, depth: int) -> _Tree:
        character = self._next()
        if character in {"*", "+", "?", "{"}:
            self._refuse(f"is a {character} with nothing to repeat")
        if character in {"]", "}"}:
            self._refuse(f"is a {character} without its opening bracket")
        if self._takes("("):
            return self._group(depth)
        if self._takes("["):
            return self._set()
        if self._takes("\\"):
            return _OneOf(self._fold(self._escape()))
        self.at += 1
        if character == "^":
            return _Edge("^")
        if character == "$":
            return _Edge("$")
        return _OneOf(_ANY if character == "." else self._fold(_only(character)))

    def _group(self, depth: int) -> _Tree:
        if depth >= GROUPS_DEPTH_MAX:
            self._refuse(f"opens more than {GROUPS_DEPTH_MAX} groups", Code.TOO_LARGE)
        if not self._takes("?:") and self._next() == "?":
            self._refuse("starts a look-around, a name or a flag", Code.UNSUPPORTED)
        tree = self._choice(depth + 1)
        if not self._takes(")"):
            self._refuse("should be a ) that closes the group")
        return tree

    def _escape(self) -> Ranges:
        character = self._next()
        if character in _CLASSES:
            self.at += 1
            return _CLASSES[character]
        if not character or character.isalnum():
            self._refuse(f"is not an escape: \\{character}", Code.UNSUPPORTED)
        self.at += 1
        return _only(character)

    def _set(self) -> _OneOf:
        negative = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            ranges += self._member()
        if not ranges:
            self._refuse("ends an empty [] (write \\] for a bracket)")
        folded = self._fold(ranges)
        return _OneOf(_complement(folded) if negative else folded)

    def _member(self) -> Ranges:
        first = self._one()
        if self._next() != "-" or self.text[self.at + 1 : self.at + 2] in {"]", ""}:
            return first
        self.at += 1
        last = self._one()
        low, high = first[0][0], last[-1][1]
        # A class such as \d is not the end of a range.
        if first != ((low, low),) or last != ((high, high),) or low > high:
            self._refuse("ends a range without a start")
        return ((low, high),)

    def _one(self) -> Ranges:
        if self._takes("\\"):
            return self._escape()
        character = self._next()
        if not character or character == "[":
            self._refuse("should be a ] that closes the set (write \\[ for a bracket)")
        self.at += 1
        return _only(character)

    def _fold(self, ranges: Iterable[tuple[int, int]]) -> Ranges:
        """Return the ranges; if case is ignored, add the other case of their letters."""
        given = tuple(ranges)
        if not self.ignores_case:
            return given
        other = [
            (max(low, start) + shift, min(high, start + 25) + shift)
            for low, high in given
            for start, shift in ((65, 32), (97, -32))
            if max(low, start) <= min(high, start + 25)
        ]
        return (*given, *other)

    def _repeated(self, part: _Tree) -> _Tree:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        character = self._next()
        if character in simple:
            self.at += 1
            least, most = simple[character]
        elif self._takes("{"):
            least, most = self._counts()
        else:
            return part
        self._takes("?")
        if self._next() in {"*", "+", "?", "{"} and self._next():
            self._refuse("repeats a repetition; use a group")
        return _Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        inside, closed, _ = self.text[self.at :].partition("}")
        least, comma, most = inside.partition(",")
        numbers = [number for number in (least, most) if number]
        if (
            not closed
            or not least
            or not all(number.isascii() and number.isdigit() for number in numbers)
            or max(map(int, numbers)) > REPEATS_MAX
            or int(numbers[0]) > int(numbers[-1])
        ):
            self._refuse(f"should start {{m}}, {{m,}} or {{m,n}}, up to {REPEATS_MAX}")
        self.at += len(inside) + 1
        return int(least), (int(most) if most else None) if comma else int(least)


def _only(character: str) -> Ranges:
    return ((ord(character), ord(character)),)


def _needles(tree: _Tree) -> tuple[str, ...]:
    """Return the longest texts that every match contains."""
    runs = [""]
    for part in tree.parts if isinstance(tree, _Sequence) else (tree,):
        match part:
            case _OneOf(ranges=((low, high),)) if low == high:
                runs[-1] += chr(low)
            case _Repeat(part=_OneOf(ranges=((low, high),)), least=least) if low == high:
                # Every match has at least this many; more may follow.
                runs[-1] += chr(low) * least
                runs.append("")
            case _Edge():
                pass
            case _OneOf() | _Sequence() | _Choice() | _Repeat():
                runs.append("")
            case _:
                assert_never(part)
    return tuple(run for run in runs if run)


# From tree to machine to table --------------------------------------------------------------------


@dataclass(slots=True)
class _Machine:
    """A non-deterministic automaton: each state has at most one move on a character."""

    place: str
    moves: list[tuple[Ranges, int] | None] = field(default_factory=list)
    free: list[list[tuple[str, int]]] = field(default_factory=list)
    work: int = 0
    final: int = field(init=False)

    def __post_init__(self) -> None:
        self.final = self._state()

    def _state(self) -> int:
        if len(self.moves) >= EXPRESSION_NODES_MAX:
            self._refuse()
        self.moves.append(None)
        self.free.append([])
        return len(self.moves) - 1

    def _refuse(self) -> NoReturn:
        raise QueryError(
            self.place,
            "a pattern with fewer repetitions and choices",
            "this pattern takes too many steps to match",
            Code.TOO_LARGE,
        )

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > EXPRESSION_WORK_MAX:
            self._refuse()

    def build(self, tree: _Tree, after: int) -> int:
        """Add states for `tree` that lead to the state `after`; return the first one."""
        match tree:
            case _OneOf(ranges):
                state = self._state()
                self.moves[state] = (ranges, after)
                return state
            case _Edge(side):
                state = self._state()
                self.free[state].append((side, after))
                return state
            case _Sequence(parts):
                for part in reversed(parts):
                    after = self.build(part, after)
                return after
            case _Choice(parts):
                state = self._state()
                self.free[state] += [("", self.build(part, after)) for part in parts]
                return state
            case _Repeat(part, least, most):
                return self._repeat(part, least, most, after)
            case _:
                assert_never(tree)

    def _repeat(self, part: _Tree, least: int, most: int | None, after: int) -> int:
        entry = after
        if most is None:
            entry = self._state()
            self.free[entry] += [("", self.build(part, entry)), ("", after)]
        else:
            for _ in range(most - least):
                state = self._state()
                self.free[state] += [("", self.build(part, entry)), ("", after)]
                entry = state
        for _ in range(least):
            entry = self.build(part, entry)
        return entry

    def closure(self, states: Iterable[int], edges: str) -> frozenset[int]:
        """Return the states that are reachable without a character, at these edges of the text."""
        reached = set(states)
        waiting = list(reached)
        while waiting:
            for edge, state in self.free[waiting.pop()]:
                if (not edge or edge in edges) and state not in reached:
                    reached.add(state)
                    waiting.append(state)
        self.spend(len(reached))
        return frozenset(reached)


def _determine(machine: _Machine, entry: int) -> tuple[tuple[TransitionRow, ...], frozenset[int]]:
    """Return the table of the deterministic automaton, and its final states."""
    starts, members = _alphabet(machine)
    # The search may start anywhere, so every later state has the entry in it once more.
    again = machine.closure([entry], "")
    # A state of the table: states of the machine, and whether this is where the text starts.
    first = (machine.closure([entry], "^"), "^")
    numbers = {first: 0}
    waiting = [first]
    rows: list[tuple[int, ...]] = []
    last: set[int] = set()
    while len(rows) < len(waiting):
        states, edge = waiting[len(rows)]
        if machine.final in machine.closure(states, edge + "$"):
            last.add(len(rows))
        if machine.final in states:
            rows.append((ACCEPTED,) * len(starts))
            continue
        row: list[int] = []
        for reached in _reach(machine, states, members, len(starts)):
            key = (machine.closure(reached, "") | again, "")
            if key not in numbers:
                numbers[key] = len(waiting)
                waiting.append(key)
            row.append(numbers[key])
        rows.append(tuple(row))
    return tuple(TransitionRow(starts, row) for row in _reject_early(rows, last)), frozenset(last)


def _alphabet(machine: _Machine) -> tuple[list[int], list[list[int]]]:
    """Return where each class of characters begins, and on which classes each state moves."""
    ranges = [move[0] if move else () for move in machine.moves]
    edges = {edge for each in ranges for low, high in each for edge in (low, high + 1)}
    starts = sorted((edges | {0}) - {_LAST_CODE_POINT + 1})
    number = {start: number for number, start in enumerate([*starts, _LAST_CODE_POINT + 1])}
    members = [
        [each for low, high in own for each in range(number[low], number[high + 1])]
        for own in ranges
    ]
    return starts, members


def _reach(
    machine: _Machine, states: frozenset[int], members: list[list[int]], classes: int
) -> list[set[int]]:
    """Return the states that a character leads to from `states`, for each class of characters."""
    reached: list[set[int]] = [set() for _ in range(classes)]
    machine.spend(classes)
    for state in states:
        machine.spend(len(members[state]))
        if move := machine.moves[state]:
            for number in members[state]:
                reached[number].add(move[1])
    return reached


def _reject_early(rows: list[tuple[int, ...]], last: set[int]) -> list[tuple[int, ...]]:
    """Return the table with `REJECTED` for states from which no match can be reached."""
    dead = {
        number
        for number, row in enumerate(rows)
        if number not in last and all(following == number for following in row)
    }
    return [tuple(REJECTED if each in dead else each for each in row) for row in rows]

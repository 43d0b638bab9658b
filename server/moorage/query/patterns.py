"""Matches patterns in texts, always in time linear in the text.

`LIKE` is a sequence of pieces, found one after another. The parser turns a `$regex` into a table of
limited size (`moorage.query.expressions`), which then reads each character once. Neither
backtracks, so no pattern of a user can stall the server.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from moorage.query.limits import EXPRESSION_TEXT_CHARS_MAX

ACCEPTED: Final = -1
"""A state of a table: the pattern matches, whatever follows."""
REJECTED: Final = -2
"""A state of a table: the pattern cannot match, whatever follows."""


@dataclass(frozen=True)
class Like:
    """A LIKE pattern: `*` matches any text; the pattern may occur anywhere in a text.

    Matching is case-sensitive. The documented form is a regular expression without anchors and
    flags, which is equivalent.
    """

    text: str

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The texts between `*`, which must occur in this order."""
        return tuple(piece for piece in self.text.split("*") if piece)

    @property
    def needles(self) -> tuple[str, ...]:
        """The pieces of the pattern."""
        return self.pieces

    @property
    def costly(self) -> bool:
        """Whether a match is slow: no, `str.find` searches the text."""
        return False

    def matches(self, text: str) -> bool:
        """Return whether the pattern occurs in a text."""
        at = 0
        # The first place of each piece is best: it leaves the most text for the other pieces.
        for piece in self.pieces:
            found = text.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        return True


class TransitionRow(dict[str, int]):
    """The next state for each character; may be `ACCEPTED` or `REJECTED`.

    Args:
        starts: Code points at which a class of characters starts, ascending, the first one 0.
        following: The next state, by class of character; characters that no row tells apart are one
            class.
    """

    def __init__(self, starts: Sequence[int], following: Sequence[int]) -> None:
        super().__init__()
        self._starts = starts
        self._following = following

    def __missing__(self, character: str) -> int:
        found = self._following[bisect_right(self._starts, ord(character)) - 1]
        self[character] = found  # Python's own lookup finds the next one.
        return found


@dataclass(frozen=True)
class Expression:
    """A `$regex` as a deterministic table.

    Args:
        text: The pattern as written.
        options: `i` or empty.
        rows: Transitions by state; the first state is the start.
        last: The accepting states at the end of a text.
        needles: Texts that every match contains.
    """

    text: str
    options: str
    rows: tuple[TransitionRow, ...] = field(compare=False, repr=False)
    last: frozenset[int] = field(compare=False, repr=False)
    needles: tuple[str, ...] = field(compare=False, repr=False)

    @property
    def costly(self) -> bool:
        """Whether a match is slow: yes, it looks up each character in Python."""
        return True

    def matches(self, text: str) -> bool:
        """Return whether the pattern occurs in a text up to `EXPRESSION_TEXT_CHARS_MAX` long."""
        if len(text) > EXPRESSION_TEXT_CHARS_MAX:
            return False
        rows, state = self.rows, 0
        for character in text:
            state = rows[state][character]
            if state < 0:
                return state == ACCEPTED
        return state in self.last

    def occurring(self, texts: Sequence[str], shared: Sequence[int]) -> list[int]:
        """Return the positions of the texts in which the pattern occurs.

        Args:
            texts: The texts in an order in which neighbours begin alike.
            shared: For each text, the length of the prefix that it shares with the previous text;
                the prefix is not read again.
        """
        rows, found = self.rows, list[int]()
        states = [0]  # After each character of the text before, up to its verdict.
        for place, text in enumerate(texts):
            del states[shared[place] + 1 :]
            if len(text) > EXPRESSION_TEXT_CHARS_MAX:
                continue
            state = states[-1]
            if state >= 0:
                for character in text[len(states) - 1 :]:
                    state = rows[state][character]
                    states.append(state)
                    if state < 0:
                        break
            if state == ACCEPTED or state in self.last:
                found.append(place)
        return found

"""Chooses the next address to try among a fleet's servers, one of which leads.

`Link`, `Services`, `Watch` and the agent of a machine each have one `Addresses`, and report to it
what happened at an address. `Addresses` opens no connection itself.

A standby names the leader, and the client then sends its token to the leader's address. So the
client follows a standby's answer only if the user named the standby's address, and both addresses
use TLS or neither does.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from moorage_client.endpoint import Endpoint
from moorage_client.errors import (
    AddressesFailed,
    ConnectionFailed,
    MoorageError,
    ProtocolViolated,
    RequestRefused,
)

_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0)
"""Seconds between attempts, times a random factor of 0.5 to 1; the last pause is repeated."""
_PAUSES_OF_SEVERAL: Final = (*[0.05] * 6, *[0.1] * 4, *[0.2] * 8, 0.4, 0.8, 1.6, 3.0)
"""The same for several servers, where a standby takes over from a lost leader in about 1 second."""


class Addresses:
    """The addresses of a fleet's servers, and the server that led last.

    Args:
        named: The addresses that the user gave, in this order; at least one.
    """

    def __init__(self, named: Sequence[Endpoint]) -> None:
        self._named = tuple(named)
        self._first = 0
        self._leader: Endpoint | None = None
        self._said: dict[str, str] = {}

    @property
    def several(self) -> bool:
        """Whether there is more than one address."""
        return len(self._named) > 1

    @property
    def shown(self) -> str:
        """All addresses that the user gave, without credentials, for messages."""
        return ",".join(each.shown for each in self._named)

    def order(self) -> list[Endpoint]:
        """Return the addresses to try, the most promising first."""
        turned = [*self._named[self._first :], *self._named[: self._first]]
        if self._leader is None:
            return turned
        return [self._leader, *(each for each in turned if each.url != self._leader.url)]

    def note_open(self, at: Endpoint) -> None:
        """Record that a server answers at an address, which is tried first from now on."""
        self._said.pop(at.shown, None)
        if at in self._named:
            self._first = self._named.index(at)

    def note_failure(self, at: Endpoint, error: MoorageError) -> None:
        """Record the error of an attempt at an address."""
        self._said[at.shown] = error.reason if isinstance(error, ConnectionFailed) else str(error)

    def note_loss(self, at: Endpoint, error: MoorageError) -> None:
        """Record that a connection was lost: the next address is tried first from now on."""
        self.note_failure(at, error)
        self._leader = None
        self._pass_over(at)

    def redirected(self, by: Endpoint, refused: RequestRefused, key: str = "leader") -> bool:
        """Record that a server is a standby; return whether to try another address at once.

        Args:
            by: The address of the standby.
            refused: The standby's refusal.
            key: The key of the leader's address in the refusal's details.
        """
        self._leader = None
        self._pass_over(by)
        found = refused.details.get(key)
        if not found:
            self._said[by.shown] = refused.reason
            return False
        leader = str(found)[:500].rstrip("/")
        objection = self._objection(by, leader)
        if objection:
            self._said[by.shown] = f"is a standby, and names {leader}, {objection}"
            return False
        known = (each for each in self._named if each.url.rstrip("/") == leader)
        self._leader = next(known, replace(by, url=leader, named_by=by.url))
        # Drop old entries, since a false server could name a new leader each time.
        here = {each.shown for each in (*self._named, by, self._leader)}
        self._said = {each: said for each, said in self._said.items() if each in here}
        self._said[by.shown] = f"is a standby, and names {leader} as the writer"
        return True

    def word_of(self, by: Endpoint) -> str:
        """Return the last answer of the standby at an address, as a clause for messages."""
        return self._said.get(by.shown, "is a standby")

    def _objection(self, by: Endpoint, leader: str) -> str:
        """Return why the token must not go to the leader that a standby names; "": no objection."""
        if any(each.url.rstrip("/") == leader for each in self._named):
            return "which is itself" if by.url.rstrip("/") == leader else ""
        if by not in self._named:
            return "which is not followed: the answer came from an address that you did not name"
        try:
            ours, theirs = urlsplit(by.url), urlsplit(leader)
            theirs.port  # noqa: B018  # Reading it verifies it.
        except ValueError:
            return "which is not a URL"
        if not theirs.hostname or not leader.isprintable():
            return "which is not a URL"
        if theirs.scheme.lower() != ours.scheme.lower():
            return f"which is not followed: it is not {ours.scheme}://; name it yourself"
        if theirs.username is not None:
            return "which is not followed: it has a user's name"
        if Endpoint(leader, None).is_here and not by.is_here:
            return "which is not followed: it is this machine"
        return ""

    def _pass_over(self, at: Endpoint) -> None:
        if at == self._named[self._first]:
            self._first = (self._first + 1) % len(self._named)

    def failure(self, error: MoorageError, tried: Iterable[MoorageError] = ()) -> MoorageError:
        """Return the error to raise when every address failed.

        Args:
            error: The last address's error.
            tried: The errors of one round in which every address failed.
        """
        if len(self._said) <= 1 and not self.several:
            return error
        return AddressesFailed(
            self._said, final=not any(map(is_worth_another_try, tried or [error]))
        )

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each further attempt, without end."""
        known = _PAUSES_OF_SEVERAL if self.several else _PAUSES
        for pause in itertools.chain(known, itertools.repeat(known[-1])):
            yield pause * random.uniform(0.5, 1.0)  # noqa: S311  # Jitter.


def is_worth_another_try(error: MoorageError) -> bool:
    """Return whether an attempt that failed with this error may succeed later."""
    if isinstance(error, AddressesFailed):
        return not error.final
    return isinstance(error, ConnectionFailed) and not isinstance(error, ProtocolViolated)

"""Names of the leases, waiters and clusters in a ledger, by which `repair` counts losses."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from moorage.core.state.facts import (
    Carried,
    ClusterRemoved,
    ClusterSet,
    Dequeued,
    Ended,
    Fact,
    Granted,
    Queued,
    Requeued,
)

Noun = Literal["lease", "waiting request", "cluster"]
NAMED_MAX: Final = 20


class ContentChange(NamedTuple):
    """A name that a fact adds or removes."""

    noun: Noun
    id: str
    is_there: bool


def _here(noun: Noun, name: str) -> ContentChange:
    return ContentChange(noun, name, is_there=True)


def _removal(noun: Noun, name: str) -> ContentChange:
    return ContentChange(noun, name, is_there=False)


def changes_of(fact: Fact) -> tuple[ContentChange, ...]:
    """Return the names that a fact adds and removes."""
    match fact:
        case Granted(lease):
            return _removal("waiting request", lease.id), _here("lease", lease.id)
        case Carried(lease) if lease.state == "queued":
            return (_here("waiting request", lease.id),)
        case Carried(lease):
            return (ContentChange("lease", lease.id, is_there=lease.state != "ended"),)
        case Requeued(lease):
            return _removal("lease", lease), _here("waiting request", lease)
        case Ended(lease):
            return _removal("lease", lease), _removal("waiting request", lease)
        case Queued(ask):
            return (_here("waiting request", ask.id),)
        case Dequeued(request):
            return (_removal("waiting request", request),)
        case ClusterSet(cluster):
            return (_here("cluster", cluster.id),)
        case ClusterRemoved(cluster):
            return (_removal("cluster", cluster),)
        case _:  # Each other fact changes an existing object.
            return ()


@dataclass(slots=True)
class LedgerContents:
    """The names of each kind, in the order of the facts."""

    names: dict[Noun, dict[str, None]] = field(
        default_factory=lambda: {"lease": {}, "waiting request": {}, "cluster": {}}
    )

    def take(self, changes: Iterable[ContentChange]) -> None:
        """Apply the changes of a fact to the names."""
        for noun, name, is_there in changes:
            if is_there:
                self.names[noun][name] = None
            else:
                self.names[noun].pop(name, None)

    def without(self, others: "LedgerContents") -> "LedgerContents":
        """Return the names that the other contents lack."""
        return LedgerContents(
            {
                noun: {name: None for name in names if name not in others.names[noun]}
                for noun, names in self.names.items()
            }
        )

    def sentences(self) -> list[str]:
        """Return, for each kind, a text with the number of names and the first few of them."""
        return [count_names(noun, list(names)) for noun, names in self.names.items() if names]


def count_names(noun: str, names: list[str]) -> str:
    """Return the number of names, and the first few of them."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    ending = "es" if noun.endswith("s") else "s"
    plural = (
        noun
        if len(names) == 1
        else noun.removesuffix("y") + ("ies" if noun.endswith("y") else ending)
    )
    return f"{len(names)} {plural}: {', '.join(names[:NAMED_MAX])}{more}."

"""The number of a database's format: a release refuses formats that it does not know."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, slots=True)
class Format:
    """The number of a database's format.

    Args:
        current: What this release writes.
        steps: By an older number, the statements that make a database of the next one.
    """

    current: int
    steps: Mapping[int, Sequence[str]]

    def refusal(self, found: int, writer: str) -> str:
        """Return why a database with this format number is refused; empty if it is accepted.

        Args:
            found: The number.
            writer: The release that wrote it; empty if that is unknown.
        """
        here = f"moored {version('moorage')} reads formats up to {self.current}"
        if found > self.current:
            return (
                f"has format {found}, and {here}: start moored {writer or 'of a newer release'}, "
                "or restore the data directory from a backup that an older release wrote"
            )
        if any(number not in self.steps for number in range(found, self.current)):
            return f"has format {found}, and {here}, but not this one"
        return ""

    def migration(self, found: int) -> Iterator[str]:
        """Return the statements that bring an older database to the current format."""
        for number in range(found, self.current):
            yield from self.steps[number]

"""The number of a database's format: a release refuses formats that it does not know."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, slots=True)
class Format:
    """The number of a database's format.

    Args:
        current: Number of the format that this release writes.
        steps: Per older format, the statements that convert a database to the next format.
    """

    current: int
    steps: Mapping[int, Sequence[str]]

    def refusal(self, found: int, writer: str) -> str:
        """Return why a database with this format number is refused; empty if it is accepted.

        Args:
            found: Number of the database's format.
            writer: The release that wrote the database; empty: unknown.
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
        """Return the statements that convert an older database to the current format."""
        for number in range(found, self.current):
            yield from self.steps[number]

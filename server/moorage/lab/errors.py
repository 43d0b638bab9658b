"""Errors that stop a command: one line for its user, and exit code 1."""

from collections.abc import Iterable
from difflib import get_close_matches


class CommandError(Exception):
    """A command cannot be carried out; the text says why."""


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the error message for a policy that is neither a file nor shipped."""
    names = list(known)
    near = get_close_matches(name.replace("-", "_"), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
    return f"there is no file and no shipped policy {name!r}; {hint}"

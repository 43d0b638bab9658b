"""The home folder of this user; users in containers may have none.

The command lines use the folder only for paths that default to a place in it.
"""

from collections.abc import Sequence
from pathlib import Path

from moorage_client.errors import MoorageError


class HomeMissing(MoorageError):  # noqa: N818  # As the rest of the tree.
    """A path defaults to a place in the home folder, but this user has no home folder."""


def home(remedy: str) -> Path:
    """Return the home folder.

    Args:
        remedy: Advice in the error for a user without a home folder.

    Raises:
        HomeMissing: `HOME` is not set, and the system's list of users has no entry.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise HomeMissing(
            f"this user has no home folder: HOME is not set, and /etc/passwd has no entry; {remedy}"
        ) from None


def check_completion(arguments: Sequence[str]) -> None:
    """Refuse to install shell completion without a home folder, where its files belong.

    Raises:
        HomeMissing: This user has no home folder.
    """
    if "--install-completion" in arguments:
        home("set HOME, or use the output of --show-completion")

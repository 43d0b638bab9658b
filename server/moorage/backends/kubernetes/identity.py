"""Makes the server's name, with which it labels its own pods and claims."""

import uuid
from collections.abc import Callable
from pathlib import Path

from moorage.backends.kubernetes.errors import ConfigurationError


def server_name(folder: Path) -> str:
    """Return the server's own random name, which a folder stores across restarts.

    Raises:
        ConfigurationError: The file cannot be read or written.
    """
    path = folder / "server"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _write(path, uuid.uuid4().hex)
        if name := path.read_text(encoding="ascii").strip():
            return name
        raise ConfigurationError(
            f"{path} is empty: restore the file, since its text marks this server's pods"
        )
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def take_common_name(folder: Path, agree: Callable[[str], str]) -> None:
    """Store the name on which all servers of one database agree; see `SharedNames`.

    Raises:
        ConfigurationError: The file cannot be read or written.
    """
    own = server_name(folder)
    if (name := agree(own)) != own:
        try:
            _write(folder / "server", name)
        except OSError as error:
            raise ConfigurationError(f"{folder}: {error}") from error


def _write(path: Path, name: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(name, encoding="ascii")
    draft.replace(path)

"""Finds the socket of this machine's container engine, for backends and `moored doctor`."""

import importlib.util
import os
import socket
from pathlib import Path
from typing import Final

from moorage.backends.base import UnsupportedSpecError
from moorage.extras import install_command

CONNECT_SECONDS_MAX: Final = 0.5
"""How long a socket that is there may take to be connected to."""


def find_socket() -> Path:
    """Return the socket of a container engine that takes connections.

    `DOCKER_HOST` alone where it is set; else Docker's and Podman's usual places.

    Raises:
        UnsupportedSpecError: There is none, or no library to speak with it.
    """
    if importlib.util.find_spec("docker") is None:
        reason = f"containers need the Docker SDK: {install_command('containers')}"
        raise UnsupportedSpecError(reason)
    tried = []
    for place in _places():
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_SECONDS_MAX)
                probe.connect(os.fspath(place))
        except OSError as error:
            tried.append(f"{place}: {error.strerror or error}")
        else:
            return place
    reason = f"no container engine is reachable ({'; '.join(tried)})"
    raise UnsupportedSpecError(f"{reason}: start Docker, or `podman system service`")


def _places() -> list[Path]:
    given = os.environ.get("DOCKER_HOST")
    if given:
        scheme, _, path = given.rpartition("://")
        if scheme not in {"", "unix"}:
            reason = f"DOCKER_HOST is {given}, and the backend local takes unix://PATH"
            raise UnsupportedSpecError(f"{reason}: its containers run on this machine")
        return [Path(path)]
    own = os.environ.get("XDG_RUNTIME_DIR")
    mine = [Path(own) / "docker.sock", Path(own) / "podman" / "podman.sock"] if own else []
    return [Path("/var/run/docker.sock"), Path("/run/podman/podman.sock"), *mine]

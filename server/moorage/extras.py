"""How to install what an extra of this distribution brings."""

import json
from importlib.metadata import PackageNotFoundError, distribution

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where this Moorage is from.

    Args:
        extra: Its name in pyproject.toml.

    Source: PEP 610, which has pip note the folder or file that was installed.

    """
    try:
        noted = distribution("moorage").read_text("direct_url.json")
    except PackageNotFoundError:  # Not installed: its folder is on the path.
        noted = None
    origin = json.loads(noted) if noted else {}
    path = origin.get("url", "").removeprefix("file://")
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{path if path.startswith('/') else 'moorage'}[{extra}]'"

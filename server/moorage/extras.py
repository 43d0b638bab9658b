"""Tells how to install the packages of an extra."""

import json
import os
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote


def install_command(extra: str, of: str = "moorage") -> str:
    """Return the command that installs an extra, from the source of this installation if it exists.

    Args:
        extra: The name of the extra in pyproject.toml.
        of: The distribution that has the extra.

    Source: PEP 610: pip records the folder or file from which it installed.
    """
    try:
        noted = distribution(of).read_text("direct_url.json")
    except PackageNotFoundError:  # Not installed: only its folder is on the path.
        noted = None
    origin = json.loads(noted) if noted else {}
    path = unquote(origin.get("url", "").removeprefix("file://"))
    if not (path.startswith("/") and os.path.exists(path)):  # noqa: PTH110  # A folder may be locked.
        return f"pip install '{of}[{extra}]'"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{path}[{extra}]'"

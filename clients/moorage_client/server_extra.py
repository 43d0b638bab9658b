"""Tells whether the extra `server` is installed, before `moored` or `moorage` use it."""

from importlib.util import find_spec
from typing import Final

MODULES: Final = (
    "httpx",
    "numpy",
    "packaging",
    "prometheus_client",
    "pydantic",
    "starlette",
    "structlog",
    "uvicorn",
    "uvloop",
)
"""Modules that the extra `server` installs."""


def missing() -> bool:
    """Return whether the extra `server` is not installed."""
    return any(find_spec(name) is None for name in MODULES)

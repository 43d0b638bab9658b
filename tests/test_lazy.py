"""The import of a client or a program loads few modules, and the rest at first use."""

import subprocess
import sys

import pytest

from moorage.lazy import LazyModule

SLOW = {"asyncio", "dataclasses", "http", "logging", "numpy", "requests", "ssl", "websockets"}
SLOW |= {"moorage.model", "moorage_client.link", "moorage_client.services"}
SLOW_IN_SERVERS = {"httpx", "packaging", "rich"}
COMMAND = "import typer.main, {0}; typer.main.get_command({0}.app)"  # The imports at each start.
SERVER = "from moorage.launch import import_structlog; import_structlog(); import moorage.{}"


@pytest.mark.parametrize(
    ("imported", "slow"),
    [
        ("from moorage_client import BlockingClient, Client", SLOW),
        ("import moorage_client.services", {"asyncio", "requests", "ssl", "urllib3"}),
        ("import moorage.commands.program", SLOW_IN_SERVERS | {"numpy", "asyncio", "structlog"}),
        (COMMAND.format("moorage.commands.program"), SLOW_IN_SERVERS),
        (COMMAND.format("moorage_client.cli.program"), SLOW_IN_SERVERS),
        (SERVER.format("daemon.main"), SLOW_IN_SERVERS | {"moorage_client"}),
        (SERVER.format("commands.agent_program"), SLOW_IN_SERVERS | {"starlette"}),
    ],
)
def test_imported_modules_are_unused_at_first(imported, slow):
    code = f"import sys; {imported}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert slow & {*done.stdout.split()} == set()


def test_a_lazy_module_is_imported_at_its_first_use():
    colors = LazyModule("colorsys")
    assert colors.rgb_to_hls is sys.modules["colorsys"].rgb_to_hls
    assert "rgb_to_hls" in vars(colors)  # From then on it is as quick as any attribute.
    with pytest.raises(AttributeError, match="colorsys"):
        _ = colors.no_such_function

"""`moored demo`."""

import time

from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag, SandboxOption


def demo(as_json: JsonFlag = False, sandbox: SandboxOption = None) -> None:
    """Start a daemon, register a small fleet, request GPUs, and show the lease and its reason."""
    started = time.perf_counter()
    from moorage.commands import display  # noqa: PLC0415  # As in serve.
    from moorage.commands.demonstration import demo as play  # noqa: PLC0415  # As in serve.

    with command_errors():
        options = ("--sandbox", sandbox) if sandbox else ()
        display.demo(play(started, options=options), as_json=as_json)

"""Runs a daemon as a process: logging, signals, the ready line, the exit code."""

import asyncio
import json
import logging
import signal
import sys
from typing import Final

import structlog
import uvloop

from moorage.config import Config, is_loopback
from moorage.daemon.daemon import Daemon
from moorage.ledger.base import LedgerError, LedgerLocked
from moorage.sandbox.host import JailError

EXIT_OK: Final = 0
EXIT_CANNOT_START: Final = 3
"""An address, the data directory, the ledger or the jail: something here must be mended first."""
EXIT_BROKEN: Final = 70
"""A broken invariant or a failed ledger ended the process; the last line on stderr says what."""


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    configure_log(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: Config) -> int:
    # First of all: who asks for a stop while the daemon starts gets a clean one.
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    daemon = Daemon(config)
    try:
        port, http_port = await daemon.start()
    except (LedgerError, JailError, OSError) as failure:
        advice = " (exit code 3: mend this, then start again)"
        if isinstance(failure, LedgerLocked):
            advice = ""
        sys.stderr.write(f"moored: cannot start: {failure}{advice}\n")
        return EXIT_CANNOT_START
    ready = {
        "event": "ready",
        "ws": f"ws://{_authority(config.host)}:{port}",
        "http": f"http://{_authority(config.http_host)}:{http_port}",
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    running = asyncio.ensure_future(daemon.run())
    waiting = asyncio.ensure_future(stopping.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    error = running.exception() if running.done() and not running.cancelled() else None
    if error is not None:
        structlog.get_logger("moored").error("broken", exc_info=error)
    try:
        await daemon.stop()
    except LedgerError as failure:
        error = error or failure
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    if error is None:
        return EXIT_OK
    sys.stderr.write(f"moored: ended, so that no answer is wrong: {error!r}\n")
    return EXIT_BROKEN


def _authority(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def configure_log(config: Config) -> None:
    """Send structlog and the libraries' logging to stderr, in one format."""
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    console = config.log_format == "console"
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))  # Libraries speak when something is wrong.
    if not is_loopback(config.host):
        structlog.get_logger("moored").info("open", host=config.host, tokens=len(config.tokens))

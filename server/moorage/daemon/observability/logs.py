"""Configures a program's log: structlog and the libraries' logging, on stderr, in one format."""

import logging
import sys
from collections.abc import Sequence
from functools import partial

import structlog

from moorage.config.settings import Config
from moorage.daemon.observability.standard_streams import StandardStream
from moorage.protocol.origins import is_loopback
from moorage.records.json_values import JsonValue


def configure_log(config: Config, log: StandardStream) -> None:
    """Send structlog and the libraries' logging to stderr, in one format."""
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,  # Of which request: see `traces`.
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    readable = config.log_format == "console" or (config.log_format == "auto" and log.is_terminal)
    renderer: structlog.typing.Processor = (
        # Values are quoted, so that no name of a tenant can move a terminal's cursor.
        structlog.dev.ConsoleRenderer(colors=log.is_terminal, repr_native_str=True)
        if readable
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    log.report = partial(_line_about_drops, [*shared, renderer])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))  # Of libraries, only warnings and errors.
    if not is_loopback(config.host):
        structlog.get_logger("moored").info("open", host=config.host, tokens=len(config.tokens))


def _line_about_drops(processors: Sequence[structlog.typing.Processor], lines: int) -> bytes:
    finding = f"{lines} lines before this one could not be written, and were dropped"
    line: JsonValue = {"event": "log", "dropped": lines, "finding": finding}
    for processor in processors:
        line = processor(None, "warning", line)
    return f"{line}\n".encode()

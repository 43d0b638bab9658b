"""Runs a daemon as a process: logging, signals, the ready line, the exit code."""

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import uvloop

from moorage.backends.base import BackendError
from moorage.config.settings import Config
from moorage.daemon import descriptors
from moorage.daemon.access.token_refresh import Rereading
from moorage.daemon.agents.roster import AgentRoster
from moorage.daemon.daemon import Daemon
from moorage.daemon.doors import Doors
from moorage.daemon.observability import gauges
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.logs import configure_log
from moorage.daemon.observability.standard_streams import StandardStream
from moorage.daemon.start import Stopped, Waiting, start
from moorage.ledger.base import EXIT_BROKEN, LedgerError, LedgerLocked
from moorage.protocol.faults import ServiceError
from moorage.protocol.origins import authority_of
from moorage.records.json_values import JsonObject
from moorage.sandbox.cell import jail
from moorage.sandbox.host.sandbox import JailError
from moorage.storage.base import StorageError

EXIT_OK: Final = 0
EXIT_CANNOT_START: Final = 3
"""Exit code: the ports, the data folder, its contents or the jail cannot be used."""
STOP_SECONDS_MAX: Final = 25.0
"""Seconds that a stop may take. Then the process ends as it is, and the next start continues from
the ledger, as after a crash."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_NOT_LEADER: Final = 75
"""Exit code (`EX_TEMPFAIL` of sysexits.h): another server leads, or should; a restart helps."""
_CANNOT_START: Final = (LedgerError, StorageError, ServiceError, JailError, BackendError, OSError)
_ENVIRONMENT: Final = (47, 48)
"""Indexes of the fields of `/proc/self/stat` that bound the environment; the state has index 0."""
GARBAGE_THRESHOLDS: Final = (50_000, 20, 50)
"""When garbage is collected, as `gc.set_threshold` takes it. The interpreter's own values (700, 10,
10) take half of the time in which a large document is decoded, and find nothing."""
SWITCH_SECONDS: Final = 0.001
"""Seconds that a busy event loop keeps the interpreter lock from the commit thread, which needs
it some ten times per commit. The interpreter's own 5 ms give a grant beside a flood of empty frames
a p99 of 430 ms, this value 80 ms; a smaller value costs grants."""

Register = Callable[[JsonObject, tuple[str, str] | None], tuple[str, str]]
"""Function that registers this machine. The function takes a cluster document with this machine as
its only node, and the cluster and node id of an earlier registration, if any; it returns the ids of
the registration."""
Stock = Callable[[str, str, Register], None]
"""Called with the URL of the HTTP port, the server's own token, and the `Register` function."""


def serve(
    config: Config,
    log: StandardStream,
    read: Callable[[], Config],
    file: Path | None,
    stock: Stock | None = None,
    links: Collection[str] = (),
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Args:
        config: All settings.
        log: The stream of stderr.
        read: Reads the settings again; raises `ConfigError`.
        file: The TOML file with settings.
        stock: Fills the catalog before the ready line, in a thread.
        links: Variables that a Kubernetes Service or a linked container sets; not settings.
    """
    configure_log(config, log)
    if links:
        finding = (
            "ignored: a Service or a container of this name set them, so they are not settings"
        )
        structlog.get_logger("moored").info(
            "service_links", variables=sorted(links), finding=finding
        )
    descriptors.raise_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    StandardStream(sys.stdout.fileno())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, log, Rereading(config, read, file), stock))


async def _serve(
    config: Config,
    log: StandardStream,
    rereading: Rereading,
    stock: Stock | None,
) -> int:
    # Handle signals before all else: then a stop signal during the start stops the daemon cleanly.
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, rereading.hang_up, stopping.set)
    jail.hide()  # Tokens live in this process: no core dumps, and only root may look into it.
    _hide_environment()
    # The objects of a start stay. Collecting garbage among them, again and again while they grow,
    # would take a third of a start with a million GPUs.
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.disable()
    measures = Measures()
    measures.watch(partial(gauges.log_counters, log))
    waiting = Waiting(partial(_say_ready, config, role="standby"), stopping)
    try:
        daemon = await start(config, measures, waiting)
    except Stopped:
        return EXIT_OK
    except _CANNOT_START as failure:
        advice = " (exit code 3: correct this, then start again)"
        if isinstance(failure, LedgerLocked):
            advice = ""
        reason = getattr(failure, "strerror", None) or failure
        sys.stderr.write(f"moored: cannot start: {reason}{advice}\n")
        return EXIT_CANNOT_START
    except Exception as failure:  # noqa: BLE001  # Something broke before it served.
        structlog.get_logger("moored").error("broken", exc_info=failure)
        return _explain_end(failure)
    finally:
        gc.enable()
    running = asyncio.ensure_future(daemon.run())
    if stock is not None:
        async with daemon.doors.serve_itself(daemon.tokens.own) as url:
            register = partial(_register_own, daemon.agents, loop)
            await asyncio.to_thread(stock, url, daemon.tokens.own, register)
    if not waiting.announced:
        _say_ready(config, daemon.doors)
    return await _until_end(daemon, running, stopping, rereading, log)


def _register_own(
    agents: AgentRoster,
    loop: asyncio.AbstractEventLoop,
    document: JsonObject,
    noted: tuple[str, str] | None,
) -> tuple[str, str]:
    """Register this machine from another thread; see `Register`."""
    return asyncio.run_coroutine_threadsafe(agents.register_own(document, noted), loop).result()


async def _until_end(
    daemon: Daemon,
    running: asyncio.Future[None],
    stopping: asyncio.Event,
    rereading: Rereading,
    log: StandardStream,
) -> int:
    """Serve until a stop signal or a failure; return the exit code."""
    following = asyncio.ensure_future(rereading.run(daemon.change_tokens))
    stopped = asyncio.ensure_future(stopping.wait())
    resigning = asyncio.ensure_future(daemon.trust.wanted.wait())
    ends = (running, following, stopped, resigning)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    error = next((e for e in map(_exception, (running, following)) if e is not None), None)
    following.cancel()
    if error is not None:
        structlog.get_logger("moored").error("broken", exc_info=error)
    _bound_stop(error, log)
    try:
        await daemon.stop()
    except LedgerError as failure:
        error = error or failure
    for each in ends[1:]:
        each.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    code = _code(daemon, error)
    if asyncio.all_tasks() - {asyncio.current_task()}:
        # Python would wait for threads in which a backend finishes an order, even if it is
        # cancelled. So end now: the next start finds the workloads, as after a crash.
        log.end_process(code)
    # The signal handlers end with the loop; a further signal would then change the exit code.
    for number in (*_STOP_SIGNALS, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    return code


def _code(daemon: Daemon, error: BaseException | None) -> int:
    """Return the exit code; print to stderr why it is not 0."""
    election = daemon.trust.election
    if election is not None and election.is_deposed:
        sys.stderr.write(
            "moored: ended, since another server leads: unacknowledged changes are not stored. "
            "Start again, to stand by (exit code 75)\n"
        )
        return EXIT_NOT_LEADER
    if error is not None:
        return _explain_end(error)
    if daemon.trust.wanted.is_set():
        sys.stderr.write(
            "moored: resigned on the order of `moored lead --resign`. Start again, to stand by "
            "(exit code 75)\n"
        )
        return EXIT_NOT_LEADER
    return EXIT_OK


def _say_ready(config: Config, doors: Doors, role: str = "") -> None:
    """Print the ready line: the addresses of the WebSocket, HTTP and the console."""
    s = "" if config.tls_cert is None else "s"
    http = f"http{s}://{authority_of(config.http_host, doors.http_port)}"
    ws = f"ws{s}://{authority_of(config.host, doors.port)}"
    ready = {"event": "ready", "ws": ws, "http": http}
    if config.console:
        ready["console"] = f"{http}/console"
    if role:
        ready["role"] = role
    os.write(sys.stdout.fileno(), json.dumps(ready).encode() + b"\n")  # The parent may not read.


def _bound_stop(error: BaseException | None, log: StandardStream) -> None:
    """End the process after `STOP_SECONDS_MAX`; without an `error`, the exit code is 0.

    The timer is never cancelled: Python waits for threads at exit, and a hung disk can block one.
    """
    late = threading.Timer(STOP_SECONDS_MAX, _cut_short, (error, log))
    late.daemon = True
    late.start()


def _cut_short(error: BaseException | None, log: StandardStream) -> None:
    sys.stderr.write(f"moored: the stop took more than {STOP_SECONDS_MAX:g} s, and is cut short\n")
    log.end_process(EXIT_OK if error is None else _explain_end(error))


def _exception(task: "asyncio.Future[None]") -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _hide_environment() -> None:
    """Hide the environment of this process from other processes; this process keeps it.

    Since Linux 6.12, a process that may trace the system's performance can read the environments of
    others. A workload of root could do so, although it can read nothing else of this process.
    """
    for name, text in os.environ.items():
        os.putenv(name, text)  # A copy elsewhere, for C libraries that read the environment.
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    begin, end = (int(fields[number]) for number in _ENVIRONMENT)
    ctypes.memset(begin, 0, end - begin)


def _explain_end(error: BaseException) -> int:
    sys.stderr.write(f"moored: ended to avoid wrong answers: {error!r}\n")
    return EXIT_BROKEN

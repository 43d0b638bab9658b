"""Checks whether workloads are ready."""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from moorage.backends.specs import Readiness
from moorage.lazy import LazyModule
from moorage.protocol.origins import authority_of

if TYPE_CHECKING:
    import httpx
else:  # Slow to import, and few probes need it.
    httpx = LazyModule("httpx")

HANG_UP_SECONDS: Final = 0.2
"""Seconds within which a proxy without a server behind it closes a connection."""
STILL_SECONDS_MAX: Final = 10.0
"""Longest time in seconds of a call of `still`, whatever times the probe sets."""
_FAILED_FROM: Final = 400
"""The lowest HTTP status that counts as not ready."""

RunCommand = Callable[[Sequence[str], float], Awaitable[int]]
"""A function that runs a command in the workload within some seconds; returns its exit status."""


async def still(ask: Callable[[], Awaitable[bool]], probe: Readiness | None) -> bool:
    """Return whether a workload is still ready; if the workload does not answer, try a second time.

    Args:
        ask: Runs the readiness check once.
        probe: The check, with the pause before the second try; None: no second try.
    """
    pauses = (0.0,) if probe is None else (0.0, probe.every_seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STILL_SECONDS_MAX):
            for pause in pauses:
                await asyncio.sleep(pause)
                if await ask():
                    return True
    return False


async def answers(
    probe: Readiness, host: str, port: int | None, run: RunCommand, *, proxied: bool = False
) -> bool:
    """Return whether a workload passes the command and HTTP checks of its probe, each run once.

    If the probe has neither, the workload's port must accept a connection.

    Args:
        probe: The checks to run.
        host: Address at which the workload listens.
        port: Port of the workload, if the probe names none.
        run: Runs the probe's command in the workload.
        proxied: Whether a proxy in between may accept connections before the workload does, and
            then closes them, like Docker's at the ports of containers.
    """
    at = probe.port or port
    if probe.command is not None:
        with contextlib.suppress(Exception):  # Any error counts as not ready.
            if await run(probe.command, probe.timeout_seconds) != 0:
                return False
            return probe.path is None or await _http(probe, host, at)
        return False
    if probe.path is not None:
        return await _http(probe, host, at)
    return at is not None and await accepts(host, at, probe.timeout_seconds, proxied=proxied)


async def _http(probe: Readiness, host: str, port: int | None) -> bool:
    url = f"http://{authority_of(host, port or 80)}/{(probe.path or '').lstrip('/')}"
    try:
        async with (
            asyncio.timeout(probe.timeout_seconds),
            _client() as client,
            client.stream("GET", url) as reply,
        ):
            # Only the status counts: the body is not read, and a redirect counts as ready.
            return reply.status_code < _FAILED_FROM
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
        return False


def _client() -> "httpx.AsyncClient":
    return httpx.AsyncClient(
        timeout=None,  # The deadline above covers all, even slow answers.
        trust_env=False,
        verify=_no_certificates(),
    )


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    """Return an empty TLS context for clients that use no TLS.

    Loading certificates would take longer than all the rest of a probe.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def accepts(host: str, port: int, timeout_seconds: float, *, proxied: bool = False) -> bool:
    """Return whether a server, not only a proxy, accepts a TCP connection within some seconds."""
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    hung_up = False
    if proxied:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(HANG_UP_SECONDS):
                hung_up = not await reader.read(1)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return not hung_up

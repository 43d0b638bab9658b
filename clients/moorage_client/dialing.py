"""Opens a socket to one of several addresses, for `Link` and `Watch`."""

import asyncio
from typing import Final

from moorage_client.addresses import Addresses
from moorage_client.connection import Connection
from moorage_client.endpoint import Endpoint
from moorage_client.errors import ConnectionFailed, MoorageError, RequestRefused

OPEN_SECONDS_MAX: Final = 10.0
"""Seconds that one attempt to connect may take."""

PATIENCE_SECONDS: Final = 0.25
"""Seconds that an address may take before the next one is tried in parallel."""


class Dialer:
    """Opens a socket to the first address that answers, starting with the most promising.

    A dialer tries the next address when an attempt fails, and also in parallel when an attempt
    takes long, so an address that never answers only causes a short delay. Slow attempts continue,
    so that a slow writer is reached even if a standby answers sooner.
    """

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._opening: dict[Endpoint, asyncio.Task[Connection]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether there are open attempts that `settle` would cancel."""
        return bool(self._opening)

    async def dial(self) -> Connection:
        """Open a socket.

        Raises:
            AddressesFailed: None of several addresses answers.
            ConnectionFailed: The only address does not answer; or another error of
                `Connection.open`.
        """
        left = self._addresses.order()
        tried: list[Endpoint] = []
        problems: list[MoorageError] = []
        while True:
            if left:
                endpoint = left.pop(0)
                tried.append(endpoint)
                if endpoint not in self._opening:
                    opening = Connection.open(endpoint, OPEN_SECONDS_MAX)
                    self._opening[endpoint] = asyncio.create_task(opening)
            if tasks := [self._opening[each] for each in tried if each in self._opening]:
                patience = PATIENCE_SECONDS if left else None
                await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for each in tried:
                if each in self._opening and self._opening[each].done():
                    connection = self._open(each, problems)
                    if connection is not None:
                        return connection
            if not left and not any(each in self._opening for each in tried):
                raise self._failure(problems)

    def _open(self, at: Endpoint, problems: list[MoorageError]) -> Connection | None:
        """Remove an attempt that has ended; return its socket if the socket is open."""
        try:
            connection = self._opening.pop(at).result()
            if connection.ended:
                raise connection.end
        except (ConnectionFailed, RequestRefused) as error:
            self._addresses.note_failure(at, error)
            problems.append(error)
            return None
        self._addresses.note_open(at)
        return connection

    def _failure(self, problems: list[MoorageError]) -> MoorageError:
        if all(isinstance(each, RequestRefused) for each in problems):
            return problems[0]
        return self._addresses.failure(problems[-1], problems)

    async def settle(self) -> None:
        """Cancel the open attempts: a connection works, or the caller no longer needs one."""
        tasks = [*self._opening.values()]
        self._opening.clear()
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Connection):
                await ended.close()

"""Objects of Kubernetes that a client creates, and whose state a watch reports.

Subclasses of `ObjectSession` say which objects these are, and how to read them.
"""

import asyncio
import contextlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx

from moorage.bench.placements import UNDER_WAY, Booking
from moorage.bench.scheduler_plane import READY_SECONDS_MAX, SchedulerPlane
from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject

NO_DELAY: Final = {"gracePeriodSeconds": "0"}


class ObjectSession(ABC):
    """A client's session in which each request is an object of Kubernetes."""

    path: str
    """URL path of the collection of the objects."""

    def __init__(self, pids: list[int], client: httpx.AsyncClient) -> None:
        self.pids = pids
        self._client = client
        self._numbers = itertools.count()
        self._placed: dict[str, asyncio.Future[str]] = {}
        self._refused: dict[str, asyncio.Event] = {}

    @abstractmethod
    def body(self, name: str) -> JsonObject:
        """Return an object to create."""

    @abstractmethod
    def place_of(self, found: JsonObject) -> str | None:
        """Return the node of a placed object, "" if the peer names none; None: not placed."""

    @abstractmethod
    def is_refused(self, found: JsonObject) -> bool:
        """Return whether the peer finds no room for an object now."""

    async def place(self) -> Booking | None:
        """Create an object; return its booking once it is placed, or None if it does not fit."""
        name = await self._create()
        refused = asyncio.ensure_future(self._refused[name].wait())
        placed = self._placed[name]
        await asyncio.wait((refused, placed), return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if placed.done():
            return Booking(name, placed.result())
        await self.delete(name)
        return None

    async def release(self, booking: Booking) -> None:
        """Delete the object of a booking, so that its GPU is free."""
        await self.delete(booking.handle)

    async def wait(self, parked: asyncio.Event) -> Booking:
        """Create an object that has to wait; set `parked` once it waits; return its booking."""
        name = await self._create()
        await self._refused[name].wait()
        parked.set()
        return Booking(name, await self._placed[name])

    async def delete(self, name: str) -> None:
        """Delete an object."""
        answer = await self._client.delete(f"{self.path}/{name}", params=NO_DELAY)
        answer.raise_for_status()

    async def _create(self) -> str:
        name = f"request-{next(self._numbers)}"
        self._placed[name] = asyncio.get_running_loop().create_future()
        self._refused[name] = asyncio.Event()
        answer = await self._client.post(self.path, json=self.body(name))
        if answer.is_error:
            raise CommandError(f"the API server created no object: {answer.text[:500]}")
        return name

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Watch the objects until the block ends; first wait for a decision on one object.

        Raises:
            CommandError: The peer refused to create the first object, or decided nothing in time.
        """
        watching = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(watching))
                try:
                    async with asyncio.timeout(READY_SECONDS_MAX):
                        await watching.wait()
                        first = await self.place()  # The peer has started when this returns.
                except TimeoutError:
                    raise CommandError(f"no object placed within {READY_SECONDS_MAX:g} s") from None
                if first is not None:
                    await self.release(first)
                yield
                watch.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _watch(self, watching: asyncio.Event) -> None:
        """Watch the objects. If the server ends a watch, the next watch starts with all objects."""
        query = {"watch": "true"}
        while True:
            async with self._client.stream("GET", self.path, params=query, timeout=None) as stream:
                watching.set()
                async for line in stream.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        break
                    self._see(event["object"])

    def _see(self, found: dict[str, Any]) -> None:
        name = found["metadata"]["name"]
        node = self.place_of(found)
        if node is not None and not self._placed[name].done():
            self._placed[name].set_result(node)
        if self.is_refused(found):
            self._refused[name].set()


def has_condition(found: dict[str, Any], kind: str, status: str) -> bool:
    """Return whether an object has the condition `kind` with the status `status`."""
    conditions = found.get("status", {}).get("conditions") or ()
    return any((each["type"], each["status"]) == (kind, status) for each in conditions)


@contextlib.asynccontextmanager
async def client_of(plane: SchedulerPlane) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an HTTP client for the plane's API server, with a connection per request under way."""
    limits = httpx.Limits(max_connections=UNDER_WAY + 2, max_keepalive_connections=None)
    async with httpx.AsyncClient(**plane.client_options(), limits=limits) as client:
        yield client

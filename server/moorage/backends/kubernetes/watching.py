"""Keeps records of all objects of one kind: lists them once, then watches them.

A watch that ends, breaks or hangs is resumed from its last version. If the API server no longer has
that version (410), all objects are listed again, and vanished ones are reported as gone. The
library's own `Watch` is not used: it repeats the version that got a 410, hides broken connections,
and decodes each object twice.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NoReturn, TypeVar

import msgspec

from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import KubernetesError, NoAnswerError, RefusedError
from moorage.backends.kubernetes.objects import ApiEvent, ApiItem, ApiMeta, ApiPage, ApiStatus

PAGE_OBJECTS: Final = 500
WATCH_SECONDS: Final = 20
"""Seconds after which the API server ends a watch, or up to 50 % later; the watch is then resumed.

Just before the end, the API server sends the last version. A watch that is silent for longer than
that hangs, e.g. behind a network that dropped its connection.
"""
STEADY_SECONDS: Final = 5.0
"""A watch that has lasted for more than these seconds does not count as failed when it ends."""
WATCH_SILENCE_SECONDS_MAX: Final = 45.0
"""Longest time without data on a watch; after that, the watch is aborted and resumed."""
PAUSE_SECONDS: Final = 0.1
"""Pause before a failed watch is repeated; it doubles with each failure in a row."""
PAUSE_SECONDS_MAX: Final = 10.0
_GONE: Final = 410
_NOT_FOUND: Final = 404

_ITEM: Final = msgspec.json.Decoder(ApiItem)
_PAGE: Final = msgspec.json.Decoder(ApiPage)
_EVENT: Final = msgspec.json.Decoder(ApiEvent)
_STATUS: Final = msgspec.json.Decoder(ApiStatus)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Kind(Generic[R]):
    """A kind of object to watch, and how to make a record of an object.

    Args:
        name: Name of the kind in errors and reports, e.g. `pods`.
        path: Path of the list of objects at the API server.
        read: Returns the record of an object's JSON; None: the object is ignored.
        fields: A field selector; the API server reports objects that no longer match as deleted.
        labels: A label selector; objects that no longer match count as deleted, too.
    """

    name: str
    path: str
    read: Callable[[msgspec.Raw], R | None]
    fields: str = ""
    labels: str = ""


class ObjectWatcher(Generic[R]):
    """Keeps the records of all objects of one kind.

    Args:
        changed: Called at each change with a record's key, the former record and the new record;
            None stands for a missing record.

    Attributes:
        records: The objects' records, by `namespace/name`.
        listed: Set once all objects have been read.
        lists: Number of complete lists so far.
        error: Why the objects cannot be read now; None: no error.
        heard_at: Time of the API server's last message, by `time.monotonic`.
    """

    def __init__(
        self,
        connection: ClusterConnection,
        kind: Kind[R],
        changed: Callable[[str, R | None, R | None], None],
    ) -> None:
        self.kind = kind
        self.records: dict[str, R] = {}
        self.listed = asyncio.Event()
        self.lists = 0
        self.error: KubernetesError | None = None
        self.heard_at = 0.0
        self._connection = connection
        self._changed = changed
        self._version = ""

    async def run(self) -> NoReturn:
        """Keep the records up to date until cancelled; repeat after failures."""
        failures = 0
        while True:
            began, before = time.monotonic(), self._version
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except Exception as error:  # noqa: BLE001  # An escaped error would end all news.
                self._note(error)
                if before and not self._version:
                    failures = min(failures, 1)  # A new list is not a connection failure.
            # A watch that lasted or brought news is resumed at once; one that keeps ending without
            # news is resumed after ever longer pauses.
            lasted = time.monotonic() - began > STEADY_SECONDS
            had_news = bool(before and self._version) and self._version != before
            failures = 0 if lasted or had_news else failures + 1
            if failures > 1:
                pause = min(PAUSE_SECONDS * 2.0 ** min(failures, 10), PAUSE_SECONDS_MAX)
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  # Spreads load.

    def _note(self, error: Exception) -> None:
        if isinstance(error, RefusedError) and error.status == _GONE:
            self._version = ""
        if isinstance(error, RefusedError) and error.status == _NOT_FOUND:
            self._version = ""
            self._replace({})  # The cluster does not have this kind.
            self.listed.set()
        if not isinstance(error, KubernetesError):  # An object has an undocumented form.
            self._version = ""
            error = NoAnswerError(f"{self.kind.name} cannot be read: {error}")
        self.error = error

    async def _list(self) -> None:
        found: dict[str, R] = {}
        token = ""
        while True:
            page = _PAGE.decode(
                await self._connection.read(
                    self.kind.path,
                    **{
                        "limit": PAGE_OBJECTS,
                        "continue": token,
                        "fieldSelector": self.kind.fields,
                        "labelSelector": self.kind.labels,
                    },
                )
            )
            for raw in page.items or ():
                record = self.kind.read(raw)
                if record is not None:
                    found[_key(_ITEM.decode(raw).metadata)] = record
            token = page.metadata.token
            if not token:
                break
        self._replace(found)
        self._version = page.metadata.resource_version
        self.lists += 1
        self._note_answer()
        self.listed.set()

    def _replace(self, found: dict[str, R]) -> None:
        for key in self.records.keys() | found.keys():
            self._put(key, found.get(key))

    async def _watch(self) -> None:
        async with self._connection.stream(
            self.kind.path,
            WATCH_SILENCE_SECONDS_MAX,
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=self._version,
            timeoutSeconds=round(WATCH_SECONDS * random.uniform(1, 1.5)),  # noqa: S311  # As above.
            fieldSelector=self.kind.fields,
            labelSelector=self.kind.labels,
        ) as lines:
            self._note_answer()
            while line := await lines.readline():
                if not line.endswith(b"\n"):
                    raise NoAnswerError(f"{self.kind.name}: the connection was cut")
                self._take(_EVENT.decode(line))

    def _take(self, event: ApiEvent) -> None:
        if event.type == "ERROR":
            status = _STATUS.decode(event.object)
            raise RefusedError(status.code, status.reason, status.message)
        meta = _ITEM.decode(event.object).metadata
        if event.type != "BOOKMARK":
            gone = event.type == "DELETED"
            self._put(_key(meta), None if gone else self.kind.read(event.object))
        self._version = meta.resource_version
        self._note_answer()

    def _note_answer(self) -> None:
        self.error = None
        self.heard_at = time.monotonic()

    def _put(self, key: str, record: R | None) -> None:
        old = self.records.get(key)
        if record == old:
            return
        if record is None:
            del self.records[key]
        else:
            self.records[key] = record
        self._changed(key, old, record)


def _key(meta: ApiMeta) -> str:
    return f"{meta.namespace}/{meta.name}"

"""A list on the server, fetched page by page while it is read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Generic, TypeVar

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage_client.answers import read_as, read_from, read_object
from moorage_client.errors import MoorageError

T = TypeVar("T")

PAGES_MAX: Final = 10_000
"""Maximum pages of one list; more is an error: the server seems to repeat pages."""

ITEMS_MAX: Final = 1_000_000
"""Maximum items of one list that `all` returns; more is an error."""


class Listing(Generic[T]):
    """Reads a list on the server: `async for item in listing`, or `await listing.all()`.

    Args:
        fetch: Returns the page after the given mark, and the mark of the next page. Mark None: the
            first page; returned mark None: the last page.
    """

    def __init__(
        self, fetch: Callable[[str | None], Awaitable[tuple[list[T], str | None]]]
    ) -> None:
        self._fetch = fetch

    async def pages(self) -> AsyncIterator[list[T]]:
        """Yield one page after the other."""
        mark: str | None = None
        for _ in range(PAGES_MAX):
            before = mark
            page, mark = await self._fetch(mark)
            yield page
            if mark is None:
                return
            if mark == before:
                raise MoorageError("the list does not end: two of its pages have the same `next`")
        raise MoorageError(f"the list did not end within {PAGES_MAX} pages; filter it")

    async def __aiter__(self) -> AsyncIterator[T]:
        async for page in self.pages():
            for item in page:
                yield item

    async def all(self) -> list[T]:
        """Return the whole list."""
        items: list[T] = []
        async for page in self.pages():
            items += page
            if len(items) > ITEMS_MAX:
                raise MoorageError(f"the list has more than {ITEMS_MAX} items; filter it")
        return items


def pages(
    url: str,
    call: Callable[[JsonObject], Awaitable[JsonValue]],
    names: tuple[str, str],
    read: Callable[[JsonValue], T],
    fields: JsonMapping,
) -> Listing[T]:
    """Return a list that an operation of the server returns in pages.

    Args:
        url: The server's URL, for errors.
        call: Sends a message, and returns the data in its reply.
        names: Names of the operation, and of the items in its reply.
        read: Decodes an item.
        fields: Further fields of the message.
    """
    op, key = names

    async def fetch(after: str | None) -> tuple[list[T], str | None]:
        page = {"op": op, **fields} if after is None else {"op": op, **fields, "after": after}
        data = read_from(url, read_object, await call(page))
        rows = read_from(url, _rows, data.get(key) or [])
        following = read_from(url, _mark, data.get("next"))
        return [read_from(url, read, item) for item in rows], following or None

    return Listing(fetch)


def _rows(value: JsonValue) -> list[JsonValue]:
    return read_as(list[JsonValue], value)


def _mark(value: JsonValue) -> str | None:
    return read_as(str | None, value)  # type: ignore[arg-type]  # A union is not a class.

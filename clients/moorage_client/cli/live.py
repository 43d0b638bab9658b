"""Prints listings once, or with `--watch` again after each change.

On a terminal the table is redrawn in place; elsewhere each state is printed after the previous one,
as a table with its time or as one line of JSON.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moorage.model import Code
from moorage.records.json_values import JsonObject
from moorage_client.cli.output import (
    console,
    local_time,
    make_table,
    note,
    plain,
    print_json,
    render,
    table,
    to_line,
)
from moorage_client.cli.session import CommandSession
from moorage_client.errors import ConnectionFailed, RequestRefused, Timeout

if TYPE_CHECKING:
    from rich.table import Table

    from moorage_client.client import Client

REFRESH_SECONDS: Final = 2.0
"""Seconds after which a listing is drawn again without news, since "ends in 5 s" changes."""
PAUSE_SECONDS: Final = 0.25
"""Shortest time between two updates, in seconds, since news comes in bursts."""
RETRY_SECONDS: Final = 1.0
"""Seconds between two attempts to reach a lost server."""

Fetch = Callable[["Client"], Coroutine[object, object, list[JsonObject]]]
"""Reads the rows of a listing, as documents, through a client."""
WatchFlag = Annotated[
    bool,
    typer.Option("--watch", "-w", help="Repeat the listing after each change, until interrupted"),
]


def show_listing(
    session: CommandSession,
    fetch: Fetch,
    columns: Sequence[str],
    cells: Callable[[list[JsonObject]], Sequence[Sequence[object]]],
    *,
    empty: str,
    watch: bool,
    notes: Callable[[list[JsonObject]], Sequence[str]] = lambda _: (),
) -> None:
    """Show a listing.

    Args:
        session: The server and the output format.
        fetch: Gets the rows from a client.
        columns: Headings, in the form of `table`.
        cells: Returns the cells of rows, by column.
        empty: The sentence to print if there are no rows.
        watch: Whether to print again after changes.
        notes: Returns the lines below the table.
    """
    view = _View(columns, cells, notes, empty)
    if watch:
        _watch(session, fetch, view)
        return
    rows = session.run(fetch)
    if session.json:
        print_json(rows)
        return
    table(columns, cells(rows), empty=empty)
    for line in notes(rows):
        note(line)


@dataclass
class _View:
    columns: Sequence[str]
    cells: Callable[[list[JsonObject]], Sequence[Sequence[object]]]
    notes: Callable[[list[JsonObject]], Sequence[str]]
    empty: str
    last: list[JsonObject] | None = None
    """The rows that were shown last."""


def _watch(session: CommandSession, fetch: Fetch, view: _View) -> None:
    terminal = sys.stdout.isatty() and not session.json
    show = _Drawn(view) if terminal else _Printed(view, as_json=session.json)
    try:
        while True:
            try:
                session.run(lambda client: _follow(client, fetch, show.rows))
            except (ConnectionFailed, Timeout) as error:
                if not show.began:
                    raise
                show.stale(str(error))
            except RequestRefused as refused:
                if refused.code is not Code.SHUTTING_DOWN:
                    raise
                show.stale(str(refused))
            time.sleep(RETRY_SECONDS)  # No event tells a client that a lost server is back.
    finally:
        show.end()


async def _follow(
    client: "Client",
    fetch: Fetch,
    show: Callable[[list[JsonObject]], None],
) -> None:
    news = await client.begin_watch("leases", "fleet")
    try:
        while True:
            show(await fetch(client))
            await asyncio.sleep(PAUSE_SECONDS)
            await news.next(REFRESH_SECONDS)
    finally:
        await news.close()


class _Drawn:
    """A listing that is redrawn in place on a terminal."""

    def __init__(self, view: _View) -> None:
        from rich.live import Live  # noqa: PLC0415  # Slow to import.

        self._view = view
        self._live = Live(console=console(), auto_refresh=False, vertical_overflow="ellipsis")
        self._live.start()
        self.began = False

    def rows(self, rows: list[JsonObject]) -> None:
        self.began = True
        self._view.last = rows
        self._draw(f"as of {local_time(time.time())}")

    def stale(self, why: str) -> None:
        """Mark the drawing as outdated."""
        self._draw(f"reconnecting: {why}")

    def end(self) -> None:
        """Stop redrawing, and leave the last state on the screen."""
        self._live.stop()

    def _draw(self, below: str) -> None:
        from rich.console import Group  # noqa: PLC0415  # As above.
        from rich.text import Text  # noqa: PLC0415  # As above.

        view, rows = self._view, self._view.last or []
        body: Table | Text = (
            make_table(view.columns, view.cells(rows)) if rows else Text(view.empty)
        )
        lines = [Text(plain(line), "dim") for line in (*view.notes(rows), below)]
        self._live.update(Group(body, *lines), refresh=True)


class _Printed:
    """A listing that is printed again when its text changes."""

    def __init__(self, view: _View, *, as_json: bool) -> None:
        self._view = view
        self._as_json = as_json
        self.began = False

    def rows(self, rows: list[JsonObject]) -> None:
        """Print these rows if they differ from the last ones."""
        view, self.began = self._view, True
        if rows == view.last:
            return
        view.last = rows
        if self._as_json:
            sys.stdout.write(to_line(rows) + "\n")
        else:
            body = render(make_table(view.columns, view.cells(rows))) if rows else view.empty
            sys.stdout.write(f"{local_time(time.time())}\n{body}\n")
        sys.stdout.flush()  # The reader of a pipe gets each listing at once.

    def stale(self, why: str) -> None:
        """Mark the printed text as outdated."""
        note(f"reconnecting: {why}")

    def end(self) -> None:
        """Do nothing: all rows are printed already."""

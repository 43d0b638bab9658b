"""Lets the tests of this package import `faulty_service`, and provides storages for them."""

import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.storage.base import RecordStore
from moorage.storage.sqlite.records import SqliteRecords

sys.path.insert(0, str(Path(__file__).parent))


class SqlitePlace:
    """The SQLite file of a catalog, which a test can damage while no catalog has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> RecordStore:
        return SqliteRecords(self.path)

    def followed(self) -> RecordStore:
        """Return the records of the catalog as another process reads them."""
        return self.records()

    def spoil(self, document: bytes) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("UPDATE records SET document = CAST(? AS TEXT)", (document,))


class PostgresPlace:
    """The storage of a catalog in a PostgreSQL database."""

    def __init__(self, server) -> None:
        self.server, self.address = server, server.database()

    def records(self) -> RecordStore:
        from moorage.storage.postgres.storage import PostgresStorage  # noqa: PLC0415  # An extra.

        return PostgresStorage(self.address).records()

    def followed(self) -> RecordStore:
        from moorage.storage.postgres.storage import (  # noqa: PLC0415  # An extra.
            PostgresFollowedRecords,
        )

        return PostgresFollowedRecords(self.address)

    def spoil(self, document: bytes) -> None:
        name = self.address.rpartition("/")[2]
        self.server.execute("UPDATE moorage.record SET document = %s", name, (document,))


@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=(pytest.mark.heavy, pytest.mark.postgres))]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> SqlitePlace | PostgresPlace:
    if request.param == "postgres":
        return PostgresPlace(request.getfixturevalue("postgres"))
    return SqlitePlace(tmp_path / "catalog.db")


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    """An empty catalog in a file."""
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    yield catalog
    await catalog.close()

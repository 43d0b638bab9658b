"""Reads tables of nodes with the columns of the openb trace (Alibaba, 2023), as CSV.

`moorage fleet import` uses this module, as does `moorage.lab`, which replays requests against the
machines of a table.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Final

from moorage_client.inventory.documents import (
    Document,
    InventoryError,
    cluster_document,
    device,
    node_document,
)

ROWS_MAX: Final = 1_000_000
"""Maximum rows of one CSV file; a longer file is refused instead of read into memory."""
_HEADER_CHARS_MAX: Final = 200
COLUMNS: Final = ("sn", "cpu_milli", "memory_mib", "gpu", "model")


class TableError(InventoryError):
    """A line of a CSV file does not match its header.

    Args:
        path: The file.
        line: Number of the line, from 1; 0: the whole file.
        column: Name of the column; empty: the whole line.
        expected: The expected content of the line or column.
    """

    def __init__(self, path: Path, line: int, column: str, expected: str) -> None:
        places = (f"line {line}" if line else "", f"column {column}" if column else "")
        super().__init__(str(path), ", ".join(filter(None, places)), expected)
        self.path = path
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One machine: CPU in milli, memory in MiB, `gpus` devices of one model."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class TableLine:
    """One line of a table: its number, and its fields by column."""

    path: Path
    number: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a field that must not be empty, or raise `TableError`."""
        if not self.values[column]:
            raise TableError(self.path, self.number, column, "a name, not an empty field")
        return self.values[column]

    def whole(self, column: str, most: int | None = None) -> int:
        """Return a whole number from 0, up to `most`, or raise `TableError`."""
        value = self.values[column]
        limit = f" up to {most}" if most is not None else ""
        # `isdecimal` alone would accept digits of other scripts.
        if not (value.isascii() and value.isdecimal()) or (most is not None and int(value) > most):
            raise TableError(
                self.path, self.number, column, f"a whole number{limit}, not {value!r}"
            )
        return int(value)


def read_nodes(path: Path) -> list[TraceNode]:
    """Read a node file: columns `sn, cpu_milli, memory_mib, gpu, model`.

    Raises:
        TableError: A column is missing, or a value does not fit its column.
        OSError: The file cannot be opened.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        return nodes_in(path, file)


def nodes_in(path: Path, file: IO[str]) -> list[TraceNode]:
    """Read an open node file, as `read_nodes` does; errors name the file `path`."""
    nodes = []
    names = set[str]()
    for line in lines(path, file, COLUMNS):
        name = line.text("sn")
        if name in names:
            raise TableError(path, line.number, "sn", f"each node once, not {name!r} again")
        names.add(name)
        nodes.append(
            TraceNode(
                name=name,
                cpu_milli=line.whole("cpu_milli"),
                memory_mib=line.whole("memory_mib"),
                gpus=line.whole("gpu"),
                model=line.values["model"],
            )
        )
    return nodes


def lines(path: Path, file: IO[str], columns: Sequence[str]) -> Iterator[TableLine]:
    """Yield the lines of a table that has at least these columns, or raise `TableError`.

    Fields may be separated by commas, semicolons or tabs: spreadsheets choose by their locale.
    """
    try:
        above, header = 0, file.readline()
        if header.lower().startswith("sep="):  # A line that Excel writes above the header.
            above, header = 1, file.readline()
        separator = max(",;\t", key=header.count)
        whole = chain([header], file)
        reader = csv.DictReader(whole, strict=True, delimiter=separator, skipinitialspace=True)
        present = reader.fieldnames or ()
        if missing := [column for column in columns if column not in present]:
            found = f"; it has {', '.join(present)}"[:_HEADER_CHARS_MAX] if present else ""
            named = ", ".join(missing)
            raise TableError(path, above + 1, named, f"this in the header{found}")
        for values in reader:
            number = above + reader.line_num
            if number > ROWS_MAX + 1:
                raise TableError(path, number, "", f"at most {ROWS_MAX} rows")
            if None in values or None in values.values():
                raise TableError(path, number, "", f"{len(present)} fields, as in the header")
            yield TableLine(path, number, values)
    except UnicodeDecodeError:
        raise TableError(path, 0, "", "text in UTF-8") from None
    except csv.Error as error:
        # The inner reader also counts the line that failed; the outer reader does not.
        line = above + reader.reader.line_num
        raise TableError(path, line, "", f"valid CSV ({error})") from None


def trace_document(
    nodes: Sequence[TraceNode], cluster_id: str = "openb", names: Mapping[str, str] | None = None
) -> Document:
    """Return the body of `POST /clusters` that describes the nodes as one cluster.

    Args:
        nodes: The machines of the cluster.
        cluster_id: Id of the cluster.
        names: The node ids by machine name; default: the machine names are the ids.
    """
    rename: Callable[[str], str] = names.__getitem__ if names else str
    return cluster_document(
        cluster_id,
        [
            node_document(
                rename(node.name),
                cpu_milli=node.cpu_milli,
                memory_mib=node.memory_mib,
                devices=[device(node.model) for _ in range(node.gpus)],
            )
            for node in nodes
        ],
        tag="trace",
        description="Nodes of a request trace",
    )

"""Aggregation pipelines: lists of stages, each of which turns documents into new documents.

The catalog runs what `parse_pipeline` read for `POST /cluster/aggregate`. The stages are simple
ones of Mongo; no stage runs code, joins or writes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from moorage.model import Code
from moorage.query.conditions import Fold, Path
from moorage.query.errors import QueryError, missing, too_deep, under, wrong
from moorage.query.evaluate import predicate
from moorage.query.limits import DEPTH_MAX, ROWS_MAX, STAGES_MAX, VALUES_MAX
from moorage.query.parse import Parser
from moorage.query.paths import reader
from moorage.query.shapes import a_list, an_object, check_keys, one_of
from moorage.query.values import is_number, number_in
from moorage.records.json_values import JsonMapping, JsonValue

Stage = Callable[[list[JsonMapping]], list[JsonMapping]]
_Expression = Callable[[JsonMapping], JsonValue]

_FOLDS: Final = ("$sum", "$avg", "$min", "$max", "$first", "$last", "$push", "$addToSet", "$count")
_STAGES: Final = ("$match", "$unwind", "$group", "$project", "$sort", "$skip", "$limit", "$count")


_OPTIONS: Final = ("sort", "skip", "limit")
"""The options of a page, in the order in which Mongo applies them; a query may have any order."""


class Pipeline:
    """A parsed list of stages.

    Args:
        stages: The stages, in their order.
        at: The place of the list, for errors.
    """

    def __init__(self, stages: Sequence[Stage], at: str) -> None:
        self._stages = stages
        self._at = at

    def run(self, documents: Iterable[JsonMapping]) -> list[JsonMapping]:
        """Return the documents of the last stage; the input documents stay unchanged.

        Raises:
            QueryError: `too_large`: a stage would make more than `ROWS_MAX` documents.
        """
        rows = list(documents)
        for number, stage in enumerate(self._stages):
            try:
                rows = stage(rows)
            except _TooManyError as error:
                place = f"{self._at}[{number}]"
                expected = f"at most {ROWS_MAX} documents after each stage"
                raise QueryError(place, expected, "makes more", Code.TOO_LARGE) from error
        return rows


class _TooManyError(Exception):
    """A stage makes more documents or lists than allowed. Internal to this module."""


def parse_pipeline(stages: JsonValue) -> Pipeline:
    """Parse a list of stages to a pipeline.

    Args:
        stages: At most `STAGES_MAX` objects of one key each, such as `{"$match": filter}`.

    Raises:
        QueryError: The pipeline is malformed, refused or too large.
    """
    listed = a_list(stages, "pipeline", "a list of stages", STAGES_MAX, least=0)
    parser, read = Parser(), list[Stage]()
    for number, each in enumerate(listed):
        place = f"pipeline[{number}]"
        stage = an_object(each, place, "a stage (an object of one key)")
        if len(stage) != 1:
            raise wrong(each, "a stage (an object of one key)", place)
        ((name, value),) = stage.items()
        if name not in _STAGES:
            expected = "one of " + ", ".join(_STAGES)
            raise QueryError(under(place, name), expected, "is not served", Code.UNSUPPORTED)
        read.append(_stage(parser, name, value, under(place, name)))
    return Pipeline(read, "pipeline")


def parse_page(options: JsonValue) -> Pipeline:
    """Return the pipeline for a query's `options`: sort, skip and limit.

    Args:
        options: `{"sort": {path: 1 or -1}, "skip": number, "limit": number}`, each optional; a
            limit of 0 is none, as in Mongo.

    Raises:
        QueryError: The options are malformed, or one of them is unknown.
    """
    given = {} if options is None else options
    given = an_object(given, "options", "an object with sort, skip, limit")
    for name in given.keys() - set(_OPTIONS):
        expected = "one of " + ", ".join(_OPTIONS)
        raise QueryError(under("options", name), expected, "is not served", Code.UNSUPPORTED)
    wanted = [name for name in _OPTIONS if given.get(name) not in (None, 0)]
    parser = Parser()
    stages = [_stage(parser, f"${name}", given[name], under("options", name)) for name in wanted]
    return Pipeline(stages, "options")


def _stage(parser: Parser, name: str, value: JsonValue, at: str) -> Stage:
    if name == "$match":
        test = predicate(parser.mongo(value, at))
        return lambda rows: [row for row in rows if test(row)]
    if name == "$unwind":
        return _unwound(parser, value, at)
    if name == "$group":
        return _group(parser, value, at)
    if name == "$project":
        return _project(parser, value, at)
    if name == "$sort":
        return _sort(parser, value, at)
    if name == "$count":
        if not isinstance(value, str) or not value or value.startswith("$") or "." in value:
            raise wrong(value, "the name of a field, without $ and dots", at)
        return lambda rows: [{value: len(rows)}] if rows else []
    count = number_in(value)
    least = 1 if name == "$limit" else 0
    if count is None or count != int(count) or not least <= count <= ROWS_MAX:
        raise wrong(value, f"a whole number from {least} to {ROWS_MAX}", at)
    limit = int(count)
    return (lambda rows: rows[:limit]) if name == "$limit" else (lambda rows: rows[limit:])


def _unwound(parser: Parser, value: JsonValue, at: str) -> Stage:
    keep_empty = False
    if isinstance(value, dict):
        check_keys(value, ("path", "preserveNullAndEmptyArrays"), at)
        keep_empty = value.get("preserveNullAndEmptyArrays") is True
        at, value = under(at, "path"), value.get("path")
    path = _path(parser, value, at)
    parts = path.split(".")
    read = reader(Path(path))

    def stage(rows: list[JsonMapping]) -> list[JsonMapping]:
        made: list[JsonMapping] = []
        for row in rows:
            found = read(row)
            elements = [e for each in found for e in (each if isinstance(each, list) else [each])]
            if not elements and keep_empty:
                made.append(row)
            made += [_place(row, parts, element) for element in elements]
            if len(made) > ROWS_MAX:
                raise _TooManyError
        return made

    return stage


def _group(parser: Parser, value: JsonValue, at: str) -> Stage:
    given = an_object(value, at, "an object with _id and the fields to compute")
    if "_id" not in given:
        raise missing(
            under(at, "_id"), "a key for the groups, which is a $path, an object of $paths, or null"
        )
    key = _expression(parser, given["_id"], under(at, "_id"))
    made: dict[str, Callable[[list[JsonMapping]], JsonValue]] = {}
    for name, each in given.items():
        if name == "_id":
            continue
        place = under(at, name)
        if name.startswith("$") or "." in name:
            raise QueryError(place, "a field's name, without $ and dots", "is none")
        fold = an_object(each, place, "an object such as {$sum: $path}")
        if len(fold) != 1:
            raise wrong(each, "an object of one key, such as {$sum: $path}", place)
        ((how, what),) = fold.items()
        one_of(how, place, _FOLDS)
        made[name] = _fold(how, _expression(parser, what, under(place, how)))

    def stage(rows: list[JsonMapping]) -> list[JsonMapping]:
        groups: dict[str, tuple[JsonValue, list[JsonMapping]]] = {}
        for row in rows:
            value = key(row)
            # As text, objects and lists can be keys; groups keep the order of first documents.
            text = json.dumps(value, sort_keys=True, default=str)
            groups.setdefault(text, (value, []))[1].append(row)
        return [
            {"_id": value, **{name: fold(held) for name, fold in made.items()}}
            for value, held in groups.values()
        ]

    return stage


def _fold(how: str, read: _Expression) -> Callable[[list[JsonMapping]], JsonValue]:
    """Return one field of a group; `$sum` and similar operators also read the elements of lists."""
    if how == "$count":
        return len
    if how in {"$first", "$last"}:
        place = 0 if how == "$first" else -1
        return lambda rows: read(rows[place])
    if how in {"$push", "$addToSet"}:

        def collect_rows(rows: list[JsonMapping]) -> list[JsonValue]:
            if len(rows) > VALUES_MAX:
                raise _TooManyError
            values = [value for row in rows if (value := read(row)) is not None]
            if how == "$push":
                return values
            seen = {json.dumps(each, sort_keys=True, default=str): each for each in values}
            return list(seen.values())

        return collect_rows
    folded = reader(Fold(how[1:], Path("values")))  # type: ignore[arg-type]  # Four folds are left.

    def number(rows: list[JsonMapping]) -> JsonValue:
        values: list[JsonValue] = []
        for row in rows:
            value = read(row)
            values += value if isinstance(value, list) else [value]
        found = folded({"values": values})
        return found[0] if found else None

    return number


def _project(parser: Parser, value: JsonValue, at: str) -> Stage:
    given = an_object(value, at, "an object of fields, each 1 or $path; _id may be 0")
    reads: list[tuple[list[str], _Expression]] = []
    for name, each in given.items():
        place = under(at, name)
        path = parser.path(name, place).text
        if name == "_id" and each in (0, False):
            continue
        if each not in (1, True) and not (isinstance(each, str) and each.startswith("$")):
            raise wrong(
                each, "1, or a $path; list the fields to include, not the fields to exclude", place
            )
        wanted = f"${name}" if each in (1, True) else each
        reads.append((path.split("."), _expression(parser, wanted, place)))

    def stage(rows: list[JsonMapping]) -> list[JsonMapping]:
        made: list[JsonMapping] = []
        for row in rows:
            document: JsonMapping = {}
            for parts, read in reads:
                found = read(row)
                if found is not None:
                    document = _place(document, parts, found)
            made.append(document)
        return made

    return stage


def _sort(parser: Parser, value: JsonValue, at: str) -> Stage:
    given = an_object(value, at, "an object of paths, each 1 or -1")
    keys: list[tuple[_Expression, bool]] = []
    for name, each in given.items():
        if each not in (1, -1) or isinstance(each, bool):
            raise wrong(each, "1 or -1", under(at, name))
        keys.append((_expression(parser, f"${name}", under(at, name)), each == -1))

    def stage(rows: list[JsonMapping]) -> list[JsonMapping]:
        for read, descending in reversed(keys):  # Sorting is stable, so sort by the first key last.
            ranks = [_rank(read(row)) for row in rows]
            order = sorted(range(len(rows)), key=ranks.__getitem__, reverse=descending)
            rows = [rows[place] for place in order]
        return rows

    return stage


def _rank(value: JsonValue) -> tuple[int, float, str]:
    """Return the rank of a value's type for sorting: missing, numbers, texts, others."""
    if value is None:
        return 0, 0.0, ""
    if is_number(value):
        return 1, value, ""
    return (2, 0.0, value) if isinstance(value, str) else (3, 0.0, str(value))


def _expression(parser: Parser, value: JsonValue, at: str, depth: int = 0) -> _Expression:
    """Return a function that reads a value: a `$path`, a constant, or an object of these."""
    if isinstance(value, str) and value.startswith("$"):
        read = reader(Path(_path(parser, value, at)))

        def find_value(row: JsonMapping) -> JsonValue:
            values = read(row)
            return values[0] if len(values) == 1 else values or None

        return find_value
    if isinstance(value, dict):
        if depth >= DEPTH_MAX:
            raise too_deep(at)
        parts: dict[str, _Expression] = {}
        for name, each in value.items():
            if name.startswith("$"):
                expected = "$path, a constant, or an object of $paths and constants"
                raise QueryError(under(at, name), expected, "is not served", Code.UNSUPPORTED)
            parts[name] = _expression(parser, each, under(at, name), depth + 1)
        return lambda row: {name: read(row) for name, read in parts.items()}
    if isinstance(value, list):
        raise wrong(value, "$path, a constant, or an object of $paths and constants", at)
    return lambda _: value


def _path(parser: Parser, value: JsonValue, at: str) -> str:
    if not isinstance(value, str) or not value.startswith("$") or value.startswith("$$"):
        raise wrong(value, "a path with a $ before it", at)
    return parser.path(value[1:], at).text


def _place(document: JsonMapping, parts: Sequence[str], value: JsonValue) -> JsonMapping:
    """Return a copy of a document with a value at a path; create missing objects on the way."""
    head, rest = parts[0], parts[1:]
    if not rest:
        return {**document, head: value}
    inner = document.get(head)
    return {**document, head: _place(inner if isinstance(inner, dict) else {}, rest, value)}

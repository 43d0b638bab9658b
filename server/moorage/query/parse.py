"""Parses a query in any of its forms to a `Condition`.

The documented conditions, the aggregate conditions (docs/reference/allocation-server.md, "Aggregate
conditions") and Mongo filters express the same tests. So one `Parser` makes one tree of them,
counts their costs, and names the place of an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast, get_args

from moorage.model import Code
from moorage.query import limits
from moorage.query.conditions import (
    EVERYTHING,
    AllOf,
    Among,
    AnyOf,
    Condition,
    Exists,
    Fold,
    FoldName,
    Leaf,
    Matches,
    Not,
    Ordered,
    OrderName,
    Path,
    Source,
    TextPattern,
)
from moorage.query.errors import QueryError, missing, too_deep, too_long, too_many, under, wrong
from moorage.query.expressions import expression
from moorage.query.patterns import Like
from moorage.query.shapes import a_list, a_number, a_text, an_object, one_of, only
from moorage.query.values import number_in
from moorage.records.json_values import JsonMapping, JsonValue

OPERATORS: Final = ("==", "!=", "IN", ">", ">=", "<", "<=", "LIKE")
FOLDS: Final[tuple[FoldName, ...]] = get_args(FoldName)
_SIMPLE: Final = ("variable", "operator", "value")
_FOLDED: Final = ("aggOperator", "target", "operator", "value")
_LOGICAL: Final = ("logicalOperator", "conditions")
_DOCUMENTED: Final = frozenset({*_SIMPLE, *_FOLDED, *_LOGICAL})

_MONGO_ORDERS: Final[Mapping[str, OrderName]] = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_MONGO_FIELD: Final = (
    "$eq", "$ne", "$in", "$nin", *_MONGO_ORDERS, "$exists", "$regex", "$options", "$not",
)  # fmt: skip
_MONGO_LOGIC: Final = ("$and", "$or", "$nor")
_SCRIPTS: Final = frozenset({"$where", "$function", "$accumulator", "$expr"})


def parse_condition(query: JsonValue) -> Condition:
    """Parse a query in documented form, or a Mongo filter, to a condition.

    A query without any key of the documented conditions is a Mongo filter. An empty query or null
    matches all documents.

    Args:
        query: Parsed JSON.

    Raises:
        QueryError: The condition is malformed, refused or too large; its path starts with `query`.
    """
    return Parser().condition(query, "query")


def parse_mongo(query: JsonValue, at: str = "query") -> Condition:
    """Parse a Mongo filter with any field names to a condition; see `parse_condition`."""
    return Parser().mongo(query, at)


@dataclass(slots=True)
class Parser:
    """Parses the queries of one body, with common limits."""

    _conditions: int = 0
    _values: int = 0
    _expressions: int = 0
    _paths: set[str] = field(default_factory=set[str])

    def condition(self, query: JsonValue, at: str) -> Condition:
        """Return the condition of a query; see `parse_condition`."""
        if query is None or query == {}:
            return EVERYTHING
        given = an_object(query, at, "a condition or a Mongo filter (an object)")
        if _DOCUMENTED.isdisjoint(given):
            return self._filter(given, at, 0)
        return self._parse_condition_form(given, at, 0)

    def mongo(self, query: JsonValue, at: str) -> Condition:
        """Return the condition of a Mongo filter; see `parse_mongo`."""
        return self._filter({} if query is None else query, at, 0)

    # The documented conditions ---------------------------------------------------------------

    def _parse_condition_form(self, query: JsonValue, at: str, depth: int) -> Condition:
        given = an_object(query, at, "a condition (an object)")
        if not given.keys().isdisjoint(_LOGICAL):
            return self._logical(given, at, depth)
        if "aggOperator" in given or "target" in given:
            return self._fold(given, at)
        only(given, _SIMPLE, at)
        path = self.path(given["variable"], under(at, "variable"))
        return self._simple(path, given, at)

    def _logical(self, given: JsonMapping, at: str, depth: int) -> Condition:
        only(given, _LOGICAL, at)
        self._deep(at, depth)
        name = one_of(given["logicalOperator"], under(at, "logicalOperator"), ("AND", "OR", "NOT"))
        place = under(at, "conditions")
        most = 1 if name == "NOT" else limits.CONDITIONS_MAX
        expected = "a list of one condition" if name == "NOT" else "a non-empty list of conditions"
        listed = a_list(given["conditions"], place, expected, most)
        parts = tuple(
            self._parse_condition_form(part, f"{place}[{number}]", depth + 1)
            for number, part in enumerate(listed)
        )
        if name == "NOT":
            return Not(parts[0])
        return AllOf(parts) if name == "AND" else AnyOf(parts)

    def _fold(self, given: JsonMapping, at: str) -> Condition:
        only(given, _FOLDED, at)
        how = one_of(given["aggOperator"], under(at, "aggOperator"), FOLDS)
        target = self.path(given["target"], under(at, "target"))
        source = Fold(cast("FoldName", how), target)
        operators = tuple(name for name in OPERATORS if name != "LIKE")
        name = one_of(given["operator"], under(at, "operator"), operators)
        place = under(at, "value")
        # An aggregate is a number, so the query must mean a number.
        if name == "IN":
            listed = a_list(given["value"], place, "a list of numbers", limits.VALUES_MAX, least=0)
            self._count(place)
            self._count_values(place, len(listed))
            numbers = [a_number(value, f"{place}[{n}]") for n, value in enumerate(listed)]
            return Among(source, tuple(numbers))
        return self._simple(source, {**given, "value": a_number(given["value"], place)}, at)

    def _simple(self, source: Source, given: JsonMapping, at: str) -> Condition:
        name = one_of(given["operator"], under(at, "operator"), OPERATORS)
        place, value = under(at, "value"), given["value"]
        if name in {"==", "!="}:
            equal = self._among(source, [value], place, place)
            return Not(equal) if name == "!=" else equal
        if name == "IN":
            return self._among(source, value, place)
        if name == "LIKE":
            return Matches(source, self._like(value, place), place)
        return self._ordering_leaf(source, cast("OrderName", name), value, place)

    # Mongo filters ---------------------------------------------------------------------------

    def _filter(self, query: JsonValue, at: str, depth: int) -> Condition:
        given = an_object(query, at, "a Mongo filter (an object)")
        return _all(tuple(self._clause(key, value, at, depth) for key, value in given.items()))

    def _clause(self, key: str, value: JsonValue, at: str, depth: int) -> Condition:
        place = under(at, key)
        if key in _MONGO_LOGIC:
            self._deep(place, depth)
            listed = a_list(value, place, "a non-empty list of filters", limits.CONDITIONS_MAX)
            parts = tuple(
                self._filter(part, f"{place}[{number}]", depth + 1)
                for number, part in enumerate(listed)
            )
            if key == "$and":
                return AllOf(parts)
            return AnyOf(parts) if key == "$or" else Not(AnyOf(parts))
        if key.startswith("$"):
            raise _unknown_operator(key, ("a field", *_MONGO_LOGIC), place)
        return self._field(self.path(key, place), value, place, depth)

    def _field(self, path: Path, value: JsonValue, at: str, depth: int) -> Condition:
        """Read the condition on one field: the value to equal, or an object of operators."""
        if not isinstance(value, dict) or not any(
            isinstance(name, str) and name.startswith("$") for name in value
        ):
            if isinstance(value, str) and value in _MONGO_FIELD:  # HTTP libraries send only a key.
                raise wrong(value, f'a value, or the operator with its own: {{"{value}": …}}', at)
            return self._among(path, [value], at, at)
        operators = an_object(value, at, "an object of operators")
        if "$options" in operators and "$regex" not in operators:
            raise missing(under(at, "$regex"), "a pattern for $options to apply to")
        return _all(
            tuple(
                self._operator(path, name, operand, at, depth, operators)
                for name, operand in operators.items()
                if name != "$options"
            )
        )

    def _operator(
        self, path: Path, name: str, operand: JsonValue, at: str, depth: int, beside: JsonMapping
    ) -> Condition:
        place = under(at, name)
        if name in {"$eq", "$ne"}:
            equal = self._among(path, [operand], place, place)
            return equal if name == "$eq" else Not(equal)
        if name in {"$in", "$nin"}:
            among = self._among(path, operand, place)
            return among if name == "$in" else Not(among)
        if name in _MONGO_ORDERS:
            return self._ordering_leaf(path, _MONGO_ORDERS[name], operand, place)
        if name == "$exists":
            if operand not in (True, False):  # Mongo accepts 1 and 0, too.
                raise wrong(operand, "true or false", place)
            self._count(place)
            return Exists(path) if operand else Not(Exists(path))
        if name == "$regex":
            pattern = self._expression(operand, beside.get("$options", ""), at)
            return Matches(path, pattern, place)
        if name == "$not":
            if not isinstance(operand, dict) or not operand:
                raise wrong(operand, "an object of operators", place)
            self._deep(place, depth)
            if not any(isinstance(key, str) and key.startswith("$") for key in operand):
                raise _unknown_operator(str(next(iter(operand))), _MONGO_FIELD, place)
            return Not(self._field(path, operand, place, depth + 1))
        raise _unknown_operator(name, _MONGO_FIELD, place)

    # Leaves, whatever the spelling -----------------------------------------------------------

    def _among(self, source: Source, values: JsonValue, place: str, one: str = "") -> Leaf:
        """Parse the values to compare for equality; `one` is the place of a single value."""
        self._count(one or place)
        listed = a_list(values, place, "a list of values", limits.VALUES_MAX, least=0)
        for number, value in enumerate(listed):
            self._operand(value, one or f"{place}[{number}]", 0)
        return Among(source, tuple(listed))

    def _ordering_leaf(self, source: Source, name: OrderName, value: JsonValue, place: str) -> Leaf:
        self._count(place)
        if not isinstance(value, str) and number_in(value) is None:
            raise wrong(value, "a number or a text", place)
        self._operand(value, place, 0)
        return Ordered(source, name, value)

    def _like(self, value: JsonValue, place: str) -> TextPattern:
        self._count(place)
        return Like(a_text(value, place, "a text, * in it standing for any text"))

    def _expression(self, value: JsonValue, options: JsonValue, at: str) -> TextPattern:
        place = under(at, "$regex")
        self._count(place)
        self._expressions += 1
        if self._expressions > limits.EXPRESSIONS_MAX:
            raise too_many(limits.EXPRESSIONS_MAX, "$regex", place)
        if not isinstance(options, str) or options not in {"", "i"}:
            raise wrong(options, '"i" or ""', under(at, "$options"))
        return expression(a_text(value, place, "a regular expression (a text)"), options, place)

    def _operand(self, value: JsonValue, place: str, depth: int) -> None:
        """Check a value to compare with, including all nested values."""
        self._count_values(place, 1)
        if isinstance(value, str):
            if len(value) > limits.TEXT_CHARS_MAX:
                raise too_long(limits.TEXT_CHARS_MAX, place)
        elif isinstance(value, (dict, list)):
            if depth >= limits.DEPTH_MAX:
                raise too_deep(place)
            parts = (
                ((under(place, str(key)), part) for key, part in value.items())
                if isinstance(value, dict)
                else ((f"{place}[{number}]", part) for number, part in enumerate(value))
            )
            for inner, part in parts:
                self._operand(part, inner, depth + 1)
        elif not isinstance(value, bool) and value is not None and number_in(value) is None:
            raise wrong(value, "a JSON value with finite numbers", place)

    def path(self, value: JsonValue, place: str) -> Path:
        """Return a path of a query, or refuse it."""
        if not isinstance(value, str):
            raise wrong(value, "a path (a text)", place)
        parts = value.split(".")
        if not all(parts) or any(part.startswith("$") for part in parts):
            raise QueryError(
                place, "names with single dots between, without $", f"is {value[:80]!r}"
            )
        if len(value) > limits.PATH_CHARS_MAX or len(parts) > limits.PATH_PARTS_MAX:
            expected = (
                f"at most {limits.PATH_PARTS_MAX} names and {limits.PATH_CHARS_MAX} characters"
            )
            raise QueryError(place, expected, "is too long", Code.TOO_LARGE)
        self._paths.add(value)
        if len(self._paths) > limits.PATHS_MAX:
            raise too_many(limits.PATHS_MAX, "different paths", place)
        return Path(value)

    # What it costs ---------------------------------------------------------------------------

    def _count(self, place: str) -> None:
        self._conditions += 1
        if self._conditions > limits.CONDITIONS_MAX:
            raise too_many(limits.CONDITIONS_MAX, "conditions (IN and $in take lists)", place)

    def _count_values(self, place: str, values: int) -> None:
        self._values += values
        if self._values > limits.VALUES_MAX:
            raise too_many(limits.VALUES_MAX, "values", place)

    def _deep(self, place: str, depth: int) -> None:
        if depth >= limits.DEPTH_MAX:
            raise too_deep(place)


def _all(parts: tuple[Condition, ...]) -> Condition:
    return parts[0] if len(parts) == 1 else AllOf(parts)


def _unknown_operator(name: str, accepted: Sequence[str], place: str) -> QueryError:
    if name in _SCRIPTS:
        reason = f"{name} would run code, which is not allowed in queries"
    else:
        reason = f"{name[:80]} is not an operator here"
    return QueryError(place, "one of " + ", ".join(accepted), reason, Code.UNSUPPORTED)

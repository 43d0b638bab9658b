"""The language of filters and searches: from JSON to the matching documents.

Pure values and functions. `parse_filter` and `parse_search` read bodies, `parse_condition` and
`parse_mongo` single queries, `parse_pipeline` aggregations, `parse_page` the order and size of an
answer; `evaluate` and `predicate` apply conditions to a document, `DocumentIndex` to ten thousand;
`nearest` ranks by similarity; `expression` compiles the safe regular expressions. README.md shows
the language by examples. `DocumentIndex` and `nearest` need numpy, which the extra
`moorage[policy]` brings.

All faults of a query raise one exception:

    QueryError   the place, what was expected there, what was found, and a code
"""

from importlib import import_module
from typing import TYPE_CHECKING

from moorage.query.bodies import (
    COMPANIONS,
    SEARCHED,
    Filter,
    MatchType,
    Search,
    parse_filter,
    parse_search,
)
from moorage.query.conditions import EVERYTHING, Condition, restrict, text_at
from moorage.query.errors import QueryError
from moorage.query.evaluate import Predicate, evaluate, predicate
from moorage.query.expressions import expression
from moorage.query.parse import parse_condition, parse_mongo
from moorage.query.pipelines import Pipeline, parse_page, parse_pipeline

if TYPE_CHECKING:
    from moorage.query.index import DocumentIndex
    from moorage.query.ranking import DEFAULT_WEIGHTS, nearest

__all__ = [
    "COMPANIONS",
    "DEFAULT_WEIGHTS",
    "EVERYTHING",
    "SEARCHED",
    "Condition",
    "DocumentIndex",
    "Filter",
    "MatchType",
    "Pipeline",
    "Predicate",
    "QueryError",
    "Search",
    "evaluate",
    "expression",
    "nearest",
    "parse_condition",
    "parse_filter",
    "parse_mongo",
    "parse_page",
    "parse_pipeline",
    "parse_search",
    "predicate",
    "restrict",
    "text_at",
]

_HOMES = {"DEFAULT_WEIGHTS": "ranking", "DocumentIndex": "index", "nearest": "ranking"}
"""Names that need numpy; their modules are imported when first used."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        from moorage.extras import install_command  # noqa: PLC0415  # Rarely needed.

        reason = f"moorage.query.{name} needs {error.name}: {install_command('policy')}"
        raise ModuleNotFoundError(reason, name=error.name) from error
    return value

"""Mongo filters of the `/query` endpoints and of policies' clients."""

from moorage.catalog.search import refusal_of
from moorage.protocol.faults import ServiceError
from moorage.query import Condition, Predicate, QueryError, parse_mongo, predicate
from moorage.records.json_values import JsonValue


def parse_filter(query: JsonValue) -> Condition:
    """Return the condition of a Mongo filter; an empty filter, or None, matches all documents.

    Raises:
        ServiceError: `bad_message`, `unsupported` or `too_large`, naming the place in the filter.
    """
    if query is not None and not isinstance(query, dict):
        raise ServiceError.wrong_field("query", "a filter (an object of fields and conditions)")
    try:
        return parse_mongo(query, "")
    except QueryError as error:
        raise refusal_of(error) from error


def compile_filter(query: JsonValue) -> Predicate:
    """Return the function that says whether a document matches; see `parse_filter`."""
    return predicate(parse_filter(query))

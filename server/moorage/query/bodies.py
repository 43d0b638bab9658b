"""Parses the bodies of filters and similarity searches, bare or in their envelope.

The catalog and the daemon call `parse_filter` and `parse_search` for the `filter` and `search` of
an allocation request and for the search service's endpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from moorage.model import Code
from moorage.query.conditions import EVERYTHING, Condition
from moorage.query.errors import QueryError, missing, under, wrong
from moorage.query.limits import RETURN_MAX, WEIGHTS_MAX
from moorage.query.parse import Parser
from moorage.query.shapes import an_object, check_keys, one_of
from moorage.query.values import number_in
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

MatchType = Literal[
    "cluster", "block", "vdag", "component", "policy", "policyFunction", "policyGraph"
]

COMPANIONS: Final[Mapping[MatchType, tuple[str, ...]]] = {
    "cluster": ("clusterMetrics",),
    "block": ("cluster", "blockMetrics"),
    "vdag": ("vdagMetrics",),
    "component": (),
    "policy": (),
    "policyFunction": (),
    "policyGraph": (),
}
"""For each kind of documents: the other kinds that a filter may search first, in this order."""

SEARCHED: Final[tuple[MatchType, ...]] = ("cluster", "block", "policy")
"""Kinds of documents that a server stores; errors list them."""

NO_POLICY: Final = "default"
"""A `policyRuleURI` that stands for no policy, so that the built-in ranking is used."""
_RULE_KEYS: Final = ("policyRuleURI", "settings", "parameters", "executionMode", "policyCodePath")


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter: the kind of documents to search, and their condition.

    Args:
        match_type: The kind of documents to search.
        condition: The condition on these documents.
        companions: Conditions on other documents, by their kind, in the order of their search. The
            documents found there limit the answer (`restrict`); without any, the answer is empty.
    """

    match_type: MatchType
    condition: Condition = EVERYTHING
    companions: Mapping[str, Condition] = field(default_factory=dict[str, Condition])


@dataclass(frozen=True, slots=True)
class Search:
    """A similarity search.

    Args:
        match_type: The kind of documents to search.
        filter: Selects the documents to rank; None: all.
        limit: Maximum results: the documented `return`, or `RETURN_MAX` without it.
        policy_rule_uri: The policy that ranks; empty for the built-in ranking (`nearest`).
        settings: Settings of the policy.
        parameters: The policy's parameters as they were given, with `return` and `filterRule`.
        like: The reference of the built-in ranking: a document's id, or a part of a document.
        weights: Weights of the built-in ranking by path; None: its default weights.
    """

    match_type: MatchType
    filter: Filter | None = None
    limit: int = RETURN_MAX
    policy_rule_uri: str = ""
    settings: JsonMapping = field(default_factory=JsonObject)
    parameters: JsonMapping = field(default_factory=JsonObject)
    like: str | JsonMapping = ""
    weights: Mapping[str, float] | None = None


def parse_filter(body: JsonValue, at: str = "") -> Filter:
    """Parse the body of a filter.

    Args:
        body: `{"matchType", "filter": {"<type>Query": …}}`, or that within `{"header", "body":
            {"values": …}}`. Without a `matchType`, the names of the queries decide the kind.
        at: The place of the body, with which the paths in errors start.

    Raises:
        QueryError: The query is malformed, refused or too large.
    """
    given, at = _open(body, at)
    return _filter(given, at)


def parse_search(body: JsonValue, at: str = "") -> Search:
    """Parse the body of a similarity search.

    Args:
        body: `{"matchType", "rankingPolicyRule": {"policyRuleURI", "settings", "parameters"}}`. The
            keys of the rule may be under `values`, and the body may be in an envelope. This
            function reads the parameters `filterRule` and `return`, and without a `policyRuleURI`
            also `like` and `weights`.
        at: The place of the body, with which the paths in errors start.

    Raises:
        QueryError: The query is malformed, refused or too large.
    """
    given, at = _open(body, at)
    check_keys(given, ("matchType", "rankingPolicyRule"), at)
    outer, outer_at = given, at
    if "matchType" in given or "rankingPolicyRule" not in given:
        _match_type(given, at)  # The rule's filter may have a kind, too, and wins.
    if "rankingPolicyRule" not in given:
        raise missing(under(at, "rankingPolicyRule"), "a ranking rule (an object)")
    at = under(at, "rankingPolicyRule")
    rule = an_object(given["rankingPolicyRule"], at, "a ranking rule (an object)")
    if "values" in rule:
        check_keys(rule, ("values",), at)
        at = under(at, "values")
        rule = an_object(rule["values"], at, "a ranking rule (an object)")
    check_keys(rule, _RULE_KEYS, at)
    if rule.get("policyCodePath"):
        place, expected = under(at, "policyCodePath"), "the URI of a policy in policyRuleURI"
        raise QueryError(place, expected, "would run code from a path", Code.UNSUPPORTED)
    uri = "" if rule.get("policyRuleURI") is None else rule["policyRuleURI"]
    if not isinstance(uri, str):
        raise wrong(uri, "the URI of a policy, name:version-tag", under(at, "policyRuleURI"))
    uri = "" if uri == NO_POLICY else uri
    settings = an_object(_or_empty(rule.get("settings")), under(at, "settings"))
    place = under(at, "parameters")
    parameters = an_object(_or_empty(rule.get("parameters")), place)
    given_filter = _or_empty(parameters.get("filterRule"))
    place_of_filter = under(place, "filterRule")
    found = None
    if isinstance(given_filter, dict) and given_filter and "matchType" in outer:
        given_filter = {"matchType": _match_type(outer, outer_at), **given_filter}
    if given_filter != {}:
        found = _filter(given_filter, place_of_filter)
    return Search(
        # Existing bodies have the kind in one of two places; if both differ, the filter's wins.
        _match_type(outer, outer_at) if found is None else found.match_type,
        found,
        _limit(parameters, place),
        uri,
        settings,
        parameters,
        "" if uri else _like(parameters, place),
        None if uri else _weights(parameters, place),
    )


def _open(body: JsonValue, at: str) -> tuple[JsonObject, str]:
    """Return the content of the envelope with its place; a bare body is returned as it is."""
    given = an_object(body, at)
    if "body" not in given:
        return given, at
    check_keys(given, ("header", "body"), at)
    at = under(at, "body")
    inner = an_object(given["body"], at, "an object with values")
    if "values" not in inner:
        raise missing(under(at, "values"), "the body of the query (an object)")
    at = under(at, "values")
    return an_object(inner["values"], at), at


def _filter(body: JsonValue, at: str) -> Filter:
    given = an_object(body, at, "a filter (an object)")
    check_keys(given, ("matchType", "filter"), at)
    match_type = _match_type({**_match_type_of(given.get("filter")), **given}, at)
    at = under(at, "filter")
    if "filter" not in given:
        raise missing(at, "an object of queries")
    queries = an_object(_or_empty(given["filter"]), at, "an object of queries")
    kinds = (match_type, *COMPANIONS[match_type])
    check_keys(queries, tuple(f"{kind}Query" for kind in kinds), at)
    parser = Parser()
    read = {
        kind: parser.condition(queries[key], under(at, key))
        for kind in kinds
        if (key := f"{kind}Query") in queries
    }
    condition = read.pop(match_type, EVERYTHING)
    companions = {kind: each for kind, each in read.items() if each != EVERYTHING}
    return Filter(match_type, condition, companions)


def _match_type(given: JsonMapping, at: str) -> MatchType:
    if "matchType" not in given:
        raise missing(under(at, "matchType"), "one of " + ", ".join(SEARCHED))
    value, place = given["matchType"], under(at, "matchType")
    known_kind = isinstance(value, str) and value in COMPANIONS
    return cast("MatchType", value if known_kind else one_of(value, place, SEARCHED))


def _match_type_of(queries: JsonValue) -> dict[str, MatchType]:
    """Return the `matchType` of a filter that has none, from the names of its queries."""
    kinds = [name.removesuffix("Query") for name in queries] if isinstance(queries, dict) else []
    able = [kind for kind, more in COMPANIONS.items() if {*kinds} <= {kind, *more}]
    return {"matchType": able[0]} if kinds and able else {}


def _limit(parameters: JsonMapping, at: str) -> int:
    value = parameters.get("return")
    if value is None:
        return RETURN_MAX
    number = number_in(value)
    if number is None or number != int(number) or not 1 <= number <= RETURN_MAX:
        raise wrong(value, f"a whole number from 1 to {RETURN_MAX}", under(at, "return"))
    return int(number)


def _like(parameters: JsonMapping, at: str) -> str | JsonMapping:
    place, expected = (
        under(at, "like"),
        "an id or a part of a document, to rank by similarity to it",
    )
    like = parameters.get("like")
    if like is None:
        raise missing(place, f"{expected}, or a policy that ranks, in policyRuleURI")
    if not isinstance(like, (str, dict)) or not like:
        raise wrong(like, expected, place)
    return like


def _weights(parameters: JsonMapping, at: str) -> Mapping[str, float] | None:
    given = parameters.get("weights")
    if given is None:
        return None
    place = under(at, "weights")
    weights: dict[str, float] = {}
    parser = Parser()
    for path, value in an_object(given, place, "an object of weights by path").items():
        parser.path(path, under(place, path))
        number = number_in(value)
        if number is None or number < 0:
            raise wrong(value, "a number from 0", under(place, path))
        weights[path] = float(number)
    if not 0 < len(weights) <= WEIGHTS_MAX or not any(weights.values()):
        raise wrong(given, f"1 to {WEIGHTS_MAX} weights, one of them above 0", place)
    return weights


def _or_empty(value: JsonValue) -> JsonValue:
    """Return an empty object for null, which documented examples send for unused fields."""
    return {} if value is None else value

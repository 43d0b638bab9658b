"""Reads the part of a block document about its own placement: policies, filter, resources.

`daemon.blocks.placement` reads the `input` of a block-level request with it. Every refusal is a
`ServiceError` that names the place in the document.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import msgspec

from moorage.model import Code, Demand
from moorage.protocol.diagnosis import diagnose
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.requests import Resources

Role = Literal["clusterAllocator", "resourceAllocator"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

NO_POLICY: Final = "default"
"""The URI by which documents say that they name no policy."""
SECTIONS: Final = ("policies", "policyRulesSpec")
"""Sections in which a block names its policies; for each role, the second overrides the first."""
_QUERIES: Final = frozenset({"clusterQuery", "clusterMetricsQuery"})


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The policy that a block uses for one role.

    Args:
        at: Its place in the document, for errors.
        uri: The named policy; empty if none is named and the built-in one decides.
        parameters: Replace the policy's default parameters.
        settings: Replace the policy's default settings.
    """

    role: Role
    at: str
    uri: str = ""
    parameters: JsonMapping = field(default_factory=JsonObject)
    settings: JsonMapping = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The inputs of a block's placement.

    Args:
        cluster_allocator: Narrows the clusters, then chooses one of those that were scored.
        resource_allocator: Scores one cluster and names a node of it.
        filter: An unparsed filter body that selects the clusters to try, and its place in the
            document; None: every live cluster.
        demand: The amounts that the built-in resourceAllocator looks for, from the block's
            `resources`; None: the block has no `resources`.
    """

    cluster_allocator: PolicySpec
    resource_allocator: PolicySpec
    filter: tuple[JsonObject, str] | None = None
    demand: Demand | None = None


def read_block(block: JsonMapping) -> BlockSpec:
    """Return the placement part of a block document.

    Args:
        block: The whole document; unknown keys are left to the policies.

    Raises:
        ServiceError: A known part is malformed or not supported.
    """
    specs = {role: PolicySpec(role, f"input.policies.{role}") for role in ROLES}
    for section in SECTIONS:
        for role, given, at in _names(block.get(section), f"input.{section}"):
            specs[role] = _policy(role, given, at)
    allocator, resources = specs["clusterAllocator"], specs["resourceAllocator"]
    demand = None if resources.uri else _demand(block.get("resources"))
    return BlockSpec(allocator, resources, _filter(allocator), demand)


def _names(section: JsonValue, at: str) -> Iterator[tuple[Role, JsonValue, str]]:
    """Yield the entries of a section for the two roles that place a block, with their places.

    Stored blocks have an object by role; block specifications have a list in which each policy
    says its role as `name`, bare or under `values`.
    """
    match section:
        case None:
            return
        case dict():
            rows = [(role, each, f"{at}.{role}") for role, each in section.items()]
        case list():
            rows = [(None, each, f"{at}[{number}]") for number, each in enumerate(section)]
        case _:  # Foreign JSON may be anything.
            raise ServiceError.wrong_field(at, "an object of policies by role, or a list of them")
    for key, each, place in rows:
        given, where = each, place
        if isinstance(each, dict) and isinstance(each.get("values"), dict):
            given, where = each["values"], f"{place}.values"
        role = key or (given.get("name") if isinstance(given, dict) else None)
        if role is None:
            raise ServiceError.wrong_field(f"{where}.name", "the role of the policy (a string)")
        if role in ROLES and given is not None:
            yield role, given, where


def _policy(role: Role, given: JsonValue, at: str) -> PolicySpec:
    if not isinstance(given, dict):
        raise ServiceError.wrong_field(at, "an object with policyRuleURI, parameters and settings")
    if given.get("codePath"):
        place = f"{at}.codePath"
        raise ServiceError(
            Code.UNSUPPORTED,
            f"{place}: code is not run from a path; register the policy, and give its URI in "
            "policyRuleURI",
            field=place,
            expected="nothing, and the URI of a registered policy in policyRuleURI",
        )
    uri = given.get("policyRuleURI") or ""
    if not isinstance(uri, str):
        raise ServiceError.wrong_field(f"{at}.policyRuleURI", "the URI of a registered policy")
    return PolicySpec(
        role,
        at,
        "" if uri == NO_POLICY else uri,
        _object(given.get("parameters"), f"{at}.parameters"),
        _object(given.get("settings"), f"{at}.settings"),
    )


def _object(value: JsonValue, at: str) -> JsonObject:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ServiceError.wrong_field(at, "an object")
    return value


def _filter(spec: PolicySpec) -> tuple[JsonObject, str] | None:
    """Return the clusterAllocator's filter, given as filter body, as only queries or enveloped."""
    given = spec.parameters.get("filter")
    if not given:
        return None
    at = f"{spec.at}.parameters.filter"
    if not isinstance(given, dict):
        raise ServiceError.wrong_field(at, "a filter (an object)")
    if isinstance(envelope := given.get("body"), dict) and isinstance(envelope.get("values"), dict):
        given, at = envelope["values"], f"{at}.body.values"
        if not given:
            return None
    if given.keys() & _QUERIES:
        # Existing blocks give the queries alone; errors still name places in the queries.
        return {"matchType": "cluster", "filter": given}, at.rpartition(".")[0]
    return given, at


def _demand(given: JsonValue) -> Demand | None:
    if given is None:
        return None
    at = "input.resources"
    if isinstance(given, dict) and given.get("nodes", 1) != 1:
        raise ServiceError.wrong_field(f"{at}.nodes", "1: one instance of a block is on one node")
    try:
        return msgspec.convert(given, Resources).demand()
    except msgspec.ValidationError as error:
        wrong = diagnose(msgspec.json.encode(given).decode(), Resources, error, ())
        place = f"{at}.{wrong.field}" if wrong.field else at
        raise ServiceError.wrong_field(place, wrong.expected) from error

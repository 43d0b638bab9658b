"""Builds the message of a request from the arguments of `ask`, for all clients."""

import sys
from collections.abc import Sequence
from typing import Final, TypedDict, Unpack

import msgspec

from moorage.model import Demand, LeaseTerms, Provision
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.requests import resources_of


class Request(TypedDict, total=False):
    """The fields of a request, without the policy's name and the lease.

    Args:
        inputs: Inputs of the policy; `{}` if it needs none.
        clusters: Ids of the clusters to choose from; default: all live ones.
        filter: Query that selects the clusters to choose from.
        search: Similarity query that selects the clusters to choose from.
        parameters: Overrides of the policy's default parameters.
        settings: Overrides of the policy's default settings.
        resources: The demand; fields and units as in `moorage.model.Demand`.
        alternatives: Acceptable demands in place of `resources`, the preferred first.
        provision: The workload to start on the placement, as in `moorage.model.Provision`.
        deadline_seconds: Time limit of one evaluation; default: the policy's own.
        explain: Whether the answer also has the reasons.
        dry_run: Whether the server only decides, and holds nothing.
    """

    inputs: JsonValue
    clusters: Sequence[str] | None
    filter: JsonMapping | None
    search: JsonMapping | None
    parameters: JsonMapping | None
    settings: JsonMapping | None
    resources: Demand | JsonMapping | None
    alternatives: Sequence[Demand | JsonMapping] | None
    provision: Provision | JsonMapping | None
    deadline_seconds: float | None
    explain: bool
    dry_run: bool


_NEWER: Final = (
    "project",
    "runtime_seconds_min",
    "notice_seconds",
    "ttl_seconds_min",
    "anti_affinity",
)
"""Terms of a lease that the oldest servers do not know."""


def request_message(
    policy_rule_uri: str, lease: LeaseTerms | JsonMapping | None, **request: Unpack[Request]
) -> JsonObject:
    """Return the message, without fields that the caller omitted.

    Raises:
        TypeError: An argument is not a field of a request.
    """
    if unknown := request.keys() - Request.__annotations__.keys():
        known = ", ".join(Request.__annotations__)
        raise TypeError(f"unknown arguments {', '.join(sorted(unknown))}; a request has {known}")
    some = request.get("alternatives")
    given = {"lease": lease, **request}
    message: JsonObject = {"adhoc": True, "policy_rule_uri": policy_rule_uri, "inputs": {}}
    for name, value in given.items():
        if isinstance(value, Provision):
            message[name] = _provision_object(value)
        elif isinstance(value, Demand):
            message[name] = _demand_object(value)
        elif name == "alternatives":
            if each := [_demand_object(v) if isinstance(v, Demand) else v for v in some or ()]:
                message[name] = each
        elif isinstance(value, LeaseTerms):
            message[name] = _terms_object(value)
        elif value is not None and value is not False:
            message[name] = value
    if traceparent := _traceparent():
        message["traceparent"] = traceparent
    return message


def _traceparent() -> str:
    """Return the caller's active span of OpenTelemetry, as W3C Trace Context writes it, or ""."""
    tracing = sys.modules.get("opentelemetry.trace")  # A caller with a span has imported it.
    if tracing is None:
        return ""
    span = tracing.get_current_span().get_span_context()
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _demand_object(demand: Demand) -> JsonObject:
    """Return a demand in wire format, without an empty `where`, which old servers do not know."""
    wanted = resources_of(demand)
    return wanted if demand.where else {k: wanted[k] for k in wanted if k != "where"}


def _terms_object(terms: LeaseTerms) -> JsonObject:
    """Return lease terms in wire format; omit unset fields that old servers do not know."""
    wanted = msgspec.to_builtins(terms)
    return {name: wanted[name] for name in wanted if name not in _NEWER or wanted[name]}


def _provision_object(provision: Provision) -> JsonObject:
    """Return `provision` in wire format; include `attempts_max` only if failures are requeued."""
    wanted: JsonObject = {"backend": provision.backend, "spec": provision.spec}
    if provision.on_failure == "end":
        return wanted
    return wanted | {"on_failure": provision.on_failure, "attempts_max": provision.attempts_max}

"""The types of HTTP bodies, from which `/openapi.json` is made.

`operation` attaches a type to an endpoint. Bodies that only this server defines are decoded as
their type (`bodies.read_as`). Documents may have further fields, and the part that stores them
checks them; so their types list the fields that the server reads, and accept all others.
"""

import inspect
from functools import cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from moorage.model import Code
from moorage.protocol.faults import status_of
from moorage.protocol.messages import AllocationRequest
from moorage.protocol.registry import Activation, CanaryStart
from moorage.protocol.specification import explain
from moorage.records.history import History
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.policies import OF_POLICIES
from moorage.records.replies import QuotaPage, QuotaState
from moorage.records.requests import QuotaChange
from moorage.records.tokens import CreatedToken, NewToken, TokenState
from moorage.web.bodies import is_of_clusters

Amount = float | str | None
"""A number, or a text that contains one, as existing services send."""
Name = str | int
Yes = Annotated[bool, Meta(extra_json_schema={"const": True})]
No = Annotated[bool, Meta(extra_json_schema={"const": False})]
_REFERENCE: Final = "#/components/schemas/{name}"


class WebType(Struct, rename="camel"):
    """The base of all types: objects that may have additional fields."""


# Documents --------------------------------------------------------------------------------------


class DeviceDocument(WebType):
    """A GPU of a node."""

    id: Name | None = None
    model_name: str | None = None
    memory: Amount = None
    link_group: Name | None = None
    numa: int = -1
    exclusive: bool = False
    uuid: str | None = None
    parent_uuid: str | None = None


class DevicesDocument(WebType):
    """The GPUs of a node: counted, listed, or both."""

    count: Amount = None
    memory: Amount = None
    model_names: list[str] | None = None
    gpus: list[DeviceDocument] | None = None


class CoresDocument(WebType):
    """The CPU cores of a node."""

    count: Amount = None


class NodeDocument(WebType):
    """A node; `memory` is in MB."""

    id: Name
    gpus: DevicesDocument | None = None
    vcpus: CoresDocument | None = None
    memory: Amount = None
    rack: str | None = None
    zone: str | None = None
    labels: dict[str, str | float | bool] | None = None
    machine_id: str | None = None
    provider_id: str | None = None


class NodesDocument(WebType):
    """The nodes of a cluster."""

    count: JsonValue = None
    node_data: list[NodeDocument] | None = None


class ClusterDocument(WebType):
    """A cluster; the server adds missing totals over its nodes."""

    id: str
    status: str | None = None
    nodes: NodesDocument | None = None


class JoiningNodes(WebType):
    """A cluster document with the nodes to add; `id` may be omitted, since the path has it."""

    id: str | UnsetType = UNSET
    nodes: NodesDocument | UnsetType = UNSET


class MetricsDocument(WebType):
    """Metrics of a cluster; the server adds missing totals in `cluster`."""

    cluster_id: str
    nodes: list[JsonObject] | None = None
    cluster: JsonObject | None = None


class BlockDocument(WebType):
    """A block; `cluster.id` is the cluster on which it runs."""

    id: str
    cluster: JsonObject | None = None


class BlockEnvelope(WebType):
    """A block document in the envelope of its specification, as `body.spec.values`."""

    body: JsonObject


class BlockMetricsDocument(WebType):
    """Metrics of a block."""

    block_id: str
    instances: list[JsonValue] = []


class ExecutorDocument(WebType, rename=None):
    """An executor; all fields except the id are free."""

    executor_id: str


class PolicyDocument(WebType, rename=None):
    """A PolicyRule document. `policy_rule_uri` is `name`:`version`-`release_tag`; give either.

    `code` is source text, an archive (.zip, .tar.gz, .tar.xz) in base64, a data: or http(s) URL, or
    a path under the configured folder.
    """

    code: str
    policy_rule_uri: str | None = None
    name: str | None = None
    version: str | None = None
    release_tag: str | None = None
    type: str | None = None
    code_type: str | None = None
    description: str | None = None
    metadata: JsonObject | None = None
    tags: str | list[JsonValue] | None = None
    policy_input_schema: JsonValue = None
    policy_output_schema: JsonValue = None
    policy_settings_schema: JsonValue = None
    policy_parameters_schema: JsonValue = None
    policy_settings: JsonObject | None = None
    policy_parameters: JsonObject | None = None
    management_commands_schema: JsonValue = None
    functionality_data: JsonObject | None = None
    resource_estimates: JsonObject | None = None
    digest: str | None = None


# Bodies -----------------------------------------------------------------------------------------


class DocumentChange(WebType):
    """Fields with new values, by name or dotted path; other fields stay unchanged."""

    set: JsonObject | UnsetType = field(default=UNSET, name="$set")
    unset: JsonValue = field(default=UNSET, name="$unset")
    inc: JsonObject | UnsetType = field(default=UNSET, name="$inc")
    push: JsonObject | UnsetType = field(default=UNSET, name="$push")


class MongoQuery(WebType):
    """A Mongo-style filter, bare or as `{"query": filter, "options": {…}}`; `{}` matches all.

    `options` has `sort` (`1` or `-1` by path), `skip` and `limit`, as in Mongo.
    """

    query: JsonObject | UnsetType = UNSET
    options: JsonObject | UnsetType = UNSET


class MetricsPipeline(WebType):
    """A list of stages, bare or as `{"pipeline": stages}`.

    The stages are `$match`, `$unwind`, `$group`, `$project`, `$sort`, `$skip`, `$limit`, `$count`.
    """

    pipeline: list[JsonObject]


class FilterQuery(WebType):
    """A filter: `matchType`, such as `cluster`, and `filter` with the queries.

    A query is a condition `{"variable", "operator", "value"}`, conditions under
    `{"logicalOperator", "conditions"}`, or a Mongo-style filter.
    """

    match_type: str
    filter: dict[str, JsonObject] | None


class RankingQuery(WebType):
    """A similarity search: `matchType`, and a rule with the URI and parameters of a policy.

    Without `policyRuleURI`, clusters are ranked by similarity to `parameters.like`, an id or a part
    of a document, with `parameters.weights` by path.
    """

    ranking_policy_rule: JsonObject
    match_type: str | UnsetType = UNSET


class QueryValues(WebType):
    """The contents of an envelope."""

    values: JsonObject


class QueryEnvelope(WebType):
    """A filter or a search in its envelope, as `body.values`."""

    body: QueryValues
    header: JsonValue = None


class BlockPlacementRequest(WebType):
    """A block document, bare, in the envelope of its specification, or under `input`.

    `policies` (or `policyRulesSpec`) names its `clusterAllocator` and `resourceAllocator`, each
    `{policyRuleURI, parameters, settings}`.
    """

    input: JsonObject | UnsetType = UNSET
    policies: JsonObject | list[JsonValue] | None = None
    policy_rules_spec: JsonObject | list[JsonValue] | None = None


class VersionChoice(WebType, rename=None):
    """A registered version of the alias's policy."""

    policy_rule_uri: Annotated[str, Meta(min_length=1, description="a text")]


class ManagementCall(WebType, rename=None):
    """The arguments of `management`."""

    action: Annotated[str, Meta(min_length=1, description="a text")]
    data: Annotated[JsonObject | None, Meta(description="an object")] = None


class ExecutionRequest(WebType, rename=None):
    """A policy of this server, and its input."""

    policy_rule_uri: str
    input_data: JsonValue
    parameters: JsonObject | None = None
    settings: JsonObject | None = None


# Answers ----------------------------------------------------------------------------------------


class FailureError(WebType):
    """The error; if it is about a field, the field and the expected value."""

    code: Code
    reason: str
    field: str | UnsetType = UNSET
    expected: str | UnsetType = UNSET


class Failure(WebType):
    """The body of a failure."""

    success: No
    message: str
    error: FailureError


class ClusterFailure(WebType):
    """The body of a failure under `/clusters`: `error` has the text, `details` the rest."""

    success: No
    message: str
    error: str
    details: FailureError


class HealthAnswer(WebType):
    """The process is alive."""

    status: Literal["ok"]


class ReadinessAnswer(WebType):
    """Whether requests can be served, with the state of each component."""

    ready: bool
    details: JsonObject


class BlockHealth(WebType):
    """Whether instances of a block report metrics, in the form that existing services expect."""

    block_id: str
    healthy: bool
    instances: int


class PublishedPolicy(WebType, rename=None):
    """The URI of a registered policy."""

    policy_rule_uri: str


class AllocationAnswer(WebType, rename=None):
    """The same answer as over the WebSocket."""

    success: Yes
    data: JsonValue
    id: Name | None = None
    request: str = ""
    lease: JsonObject | None = None
    warnings: list[str] = []
    reasons: JsonObject | None = None
    policy_rule_uri: str = ""
    revision: int = 0


class SelectedClusters(WebType):
    """The documents of the clusters that the clusterAllocator selects."""

    clusters: list[JsonObject]


class TaskReference(WebType, rename=None):
    """A task that was started."""

    task_id: str


class TaskReport(WebType, rename=None):
    """A task: `completed` with `result`, or `failed` with `error`."""

    task_id: str
    status: Literal["pending", "completed", "failed"]
    result: JsonValue = None
    error: FailureError | None = None
    warnings: list[str] = []


# The description --------------------------------------------------------------------------------


def operation(
    answer: object,
    body: object = None,
    *,
    statuses: tuple[int, ...] = (200,),
    bare: bool = False,
    refusals: bool = False,
) -> JsonObject:
    """Return the OpenAPI description of an endpoint's body and answers.

    Args:
        answer: The type of the answer.
        body: The type of the body, or a tuple of alternative types; the docstring of the first type
            becomes the description. None: the endpoint has no body.
        statuses: HTTP statuses of a successful answer, the usual one first.
        bare: Whether the answer has no envelope `{"success": true, "data"}`.
        refusals: Whether the description lists each status of a refusal, with its codes.
    """
    schema = _schema(answer)
    if not bare:
        warnings = _schema(list[str])
        properties = {"success": _schema(Yes), "data": schema, "warnings": warnings}
        schema = {"type": "object", "properties": properties, "required": ["success", "data"]}
    success = {"description": "Success", "content": _json(schema)}
    responses = dict.fromkeys(map(str, statuses), success)
    described: JsonObject = {"responses": responses | (_refusals() if refusals else {})}
    if body is not None:
        kinds = body if isinstance(body, tuple) else (body,)
        alternatives = [_schema(kind) for kind in kinds]
        schema = alternatives[0] if len(kinds) == 1 else {"anyOf": alternatives}
        described["requestBody"] = {
            "required": True,
            "description": inspect.getdoc(kinds[0]),
            "content": _json(schema),
        }
    return described


def text_operation(media_type: str) -> JsonObject:
    """Return the OpenAPI description of an endpoint that takes no body and answers with text."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {"responses": {"200": {"description": "Successful Response", "content": content}}}


def failures(path: str) -> JsonObject:
    """Return the OpenAPI description of all failures of a path."""
    failure = _schema(ClusterFailure if is_of_clusters(path) else Failure)
    return {"description": "Failure", "content": _json(failure)}


def _refusals() -> dict[str, JsonObject]:
    """Return the OpenAPI description of each failure status, with its error codes."""
    codes: dict[int, list[str]] = {}
    for code in Code:
        codes.setdefault(status_of(code), []).append(f"`{code}`")
    content = _json(_schema(Failure))
    return {
        str(status): {"description": ", ".join(codes[status]), "content": content}
        for status in sorted(codes)
    }


def components() -> JsonObject:
    """Return the schemas to which the endpoints' descriptions refer, by name."""
    of_the_socket = (AllocationRequest, QuotaChange, QuotaPage, QuotaState)
    types = (
        *WebType.__subclasses__(),
        *of_the_socket,
        *(NewToken, TokenState, CreatedToken),
        History,
        *OF_POLICIES,
        Activation,
        CanaryStart,
    )
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    for name, schema in schemas.items():
        explain(name, schema)
    return schemas


@cache
def _schema(kind: object) -> JsonObject:
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REFERENCE)
    return schema


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}

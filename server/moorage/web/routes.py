"""The documented service endpoints: clusters, metrics, policies, searches and allocation.

`web.app` mounts them behind authentication. Paths, statuses and envelopes are those of
docs/reference/allocation-server.md, "Services" and "Decisions".
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.policies import PolicyHistoryEntry
from moorage.records.replies import QuotaPage, QuotaState
from moorage.records.requests import QuotaChange
from moorage.web.aliases import alias_routes
from moorage.web.block_documents import block_document_routes
from moorage.web.bodies import (
    BodyReader,
    caller_of,
    find,
    json_response,
    pipeline_of,
    query_in_url,
    read_document,
    success,
    verdict,
    who_of,
)
from moorage.web.bodies import read_document as _document
from moorage.web.bodies import success as _success
from moorage.web.changes import find_former, note_change
from moorage.web.connections import LEFT
from moorage.web.identity import ending_with_token
from moorage.web.notes import remote_of
from moorage.web.router import HttpRouter
from moorage.web.schemas import (
    AllocationAnswer,
    BlockPlacementRequest,
    ClusterDocument,
    DocumentChange,
    ExecutionRequest,
    ExecutorDocument,
    FilterQuery,
    JoiningNodes,
    MetricsDocument,
    MetricsPipeline,
    MongoQuery,
    PolicyDocument,
    PublishedPolicy,
    QueryEnvelope,
    RankingQuery,
    SelectedClusters,
    TaskReference,
    TaskReport,
    operation,
)
from moorage.web.services import WebServices
from moorage.web.tokens import token_routes

ALLOCATION_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of the body of `POST /allocate`: the same as of a WebSocket message."""
SERVER_ERRORS: Final = 500
"""The lowest HTTP status of errors of the server; lower ones are errors of the request."""


_JOBS: Final = "jobs are run by the policy service; ask for a lease with `provision`"
_FUNCTIONS: Final = "stateful functions are run by the policy service; `context` keeps state here"
_GRAPHS: Final = "policy graphs are run by the policy service; one policy decides a placement here"
_SCALING: Final = "blocks are scaled by their cluster's controller; ask for each instance here"
_CHECKS: Final = "pre-check policies are run by the cluster's controller; see `/blockActions`"
_PARSER: Final = "the parser parses specifications; send its result to `/api/filter-data`"
_ACTIONS: Final = (
    "of the parser's actions, `filter` and `search` are served; clusters are added at `/clusters`,"
    " nodes at `/clusters/ID/nodes`, and blocks are placed at `/blockActions/allocate`"
)
_GROUPS: Final = "clusters have no groups here; filter clusters by `tags` or any other field"
_PATHS: Final = (
    ("/jobs/{rest:path}", _JOBS),
    ("/function/{rest:path}", _FUNCTIONS),
    ("/graph/{rest:path}", _GRAPHS),
    ("/graphs", _GRAPHS),
    ("/graphs/{rest:path}", _GRAPHS),
    ("/controller/{rest:path}", _SCALING),
    ("/pre-check-policies/{rest:path}", _CHECKS),
    ("/api/with-spec/{rest:path}", _PARSER),
    ("/api/{action}", _ACTIONS),
    ("/api/tasks", "there is no list of tasks; read one at `/api/tasks/ID`"),
    ("/api/reinitiate/{rest:path}", "tasks are not restarted; send the block again"),
    ("/groups", _GROUPS),
    ("/groups/{rest:path}", _GROUPS),
)


_NO_CHANGE: Final[JsonMapping] = {}
_OF_THE_PATH: Final = frozenset({"op", "id", "strict", "tenant", "project"})
"""Fields of `set_quota` that come from the path or caller, not from the body."""


def service_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router with all service endpoints."""
    router = HttpRouter()
    groups = (
        _clusters,
        _cluster_changes,
        _metrics_views,
        _metrics,
        block_document_routes,
        _search,
        _policies,
        _policy_routes,
        alias_routes,
        executor_routes,
        quota_routes,
        token_routes,
        _allocator,
        _blocks,
    )
    for group in groups:
        router.include(group(services, bodies))
    router.include(elsewhere_routes())
    return router


def _clusters(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router, one = HttpRouter("clusters"), operation(ClusterDocument, bare=True)

    @router.post(
        "/clusters",
        "Add a cluster",
        operation(ClusterDocument, ClusterDocument, statuses=(201,), bare=True),
    )
    async def create_cluster(request: Request) -> Response:
        """Register a cluster for the caller; return the document with added totals."""
        document = await _document(request, bodies)
        services.ownership.check_new_cluster(caller_of(request), str(document.get("id", "")))
        created = await services.clusters.create(document, who_of(request))
        return json_response(await note_change(request, None, created), 201)

    @router.post(
        "/clusters/query", "Find clusters", operation(list[ClusterDocument], MongoQuery, bare=True)
    )
    async def query_clusters(request: Request) -> Response:
        """Return the list of matching documents; `{}` matches all."""
        return json_response(await find(request, bodies, services.clusters.query))

    @router.get("/clusters/{cluster_id}", "Read a cluster", one)
    async def get_cluster(cluster_id: str) -> Response:
        """Return a cluster document, without an envelope."""
        return json_response(await services.clusters.get(cluster_id))

    return router


def _cluster_changes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router, one = HttpRouter("clusters"), operation(ClusterDocument, bare=True)

    @router.put(
        "/clusters/{cluster_id}",
        "Change a cluster",
        operation(ClusterDocument, DocumentChange, bare=True),
    )
    async def update_cluster(cluster_id: str, request: Request) -> Response:
        """Change a cluster and return it. Its owner may; if others have leases, operators."""
        change = await _document(request, bodies)
        services.ownership.check_cluster(caller_of(request), cluster_id)
        before = await find_former(services.clusters.get(cluster_id))
        after = await services.clusters.update(cluster_id, change)
        return json_response(await note_change(request, before, after))

    @router.post(
        "/clusters/{cluster_id}/nodes",
        "Add nodes to a cluster",
        operation(ClusterDocument, JoiningNodes, statuses=(200, 201), bare=True),
    )
    async def add_nodes(cluster_id: str, request: Request) -> Response:
        """Add the nodes of a document to a cluster; return the cluster's document.

        An existing node is replaced by the one in the document; all other nodes and fields stay. So
        several machines may join at the same time. 201: the cluster did not exist; it is created
        from the document, and belongs to the caller. Only its owner may change a cluster; if other
        tenants have leases on it, only operators may.
        """
        document = await _document(request, bodies)
        services.ownership.check_cluster(caller_of(request), cluster_id)
        before = await find_former(services.clusters.get(cluster_id))
        stored, new = await services.clusters.add_nodes(cluster_id, document, who_of(request))
        await note_change(request, before, stored)
        return json_response(stored, 201 if new else 200)

    @router.delete("/clusters/{cluster_id}", "Remove a cluster", one)
    async def delete_cluster(cluster_id: str, request: Request) -> Response:
        """Delete a cluster and return its document. Leases on it stay until they end.

        Only its owner may delete a cluster; if other tenants have leases on it, only operators may.
        """
        services.ownership.check_cluster(caller_of(request), cluster_id)
        removed = await services.clusters.delete(cluster_id)
        return json_response(await note_change(request, removed, None))

    return router


def _metrics(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router, one = HttpRouter("cluster metrics"), operation(MetricsDocument)
    stored = operation(MetricsDocument, MetricsDocument, statuses=(200, 201))

    async def store(request: Request) -> Response:
        """Store the metrics of a cluster; the status is 201 the first time, 200 later.

        For a registered cluster, only its owner and operators may report metrics.
        """
        given = await _document(request, bodies)
        services.ownership.check_metrics(caller_of(request), str(given.get("clusterId", "")))
        document, created = await services.metrics.put(given)
        return _success(document, 201 if created else 200)

    router.post("/cluster", "Report metrics", stored)(store)
    router.put("/cluster", "Report metrics", stored)(store)

    @router.post("/cluster/query", "Find metrics", operation(list[MetricsDocument], MongoQuery))
    async def query_metrics(request: Request) -> Response:
        """Return the list of matching documents; `{}` matches all."""
        return _success(await find(request, bodies, services.metrics.query))

    @router.get("/cluster/query", "Find metrics by equality", operation(list[MetricsDocument]))
    async def query_metrics_by_parameters(request: Request) -> Response:
        """Return metrics by fields in the URL; a repeated field matches any of its values."""
        async with bodies.searches.turn(who_of(request)):
            return _success(await services.metrics.query(query_in_url(request)))

    @router.get("/cluster/{cluster_id}", "Read metrics", one)
    async def get_metrics(cluster_id: str) -> Response:
        """Return the metrics of a cluster."""
        return _success(await services.metrics.get(cluster_id))

    @router.put(
        "/cluster/{cluster_id}",
        "Change metrics",
        operation(MetricsDocument, DocumentChange, statuses=(200, 201)),
    )
    async def change_metrics(cluster_id: str, request: Request) -> Response:
        """Change metrics and return the document; the status is 201 if there were none before."""
        change = await _document(request, bodies)
        services.ownership.check_metrics(caller_of(request), cluster_id)
        document, created = await services.metrics.update(cluster_id, change)
        return _success(document, 201 if created else 200)

    @router.delete("/cluster/{cluster_id}", "Remove metrics", one)
    async def delete_metrics(cluster_id: str, request: Request) -> Response:
        """Remove the metrics of a cluster and return them."""
        services.ownership.check_metrics(caller_of(request), cluster_id)
        return _success(await services.metrics.delete(cluster_id))

    return router


def _metrics_views(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router = HttpRouter("cluster metrics")

    @router.post(
        "/cluster/aggregate",
        "Aggregate metrics",
        operation(list[JsonObject], (MetricsPipeline, list[JsonObject])),
    )
    async def aggregate_metrics(request: Request) -> Response:
        """Run an aggregation pipeline over all metrics documents, and return the result."""
        stages = pipeline_of(await bodies.read_json(request))
        async with bodies.searches.turn(who_of(request)):
            return _success(await services.metrics.aggregate(stages))

    @router.get(
        "/cluster-metrics/{cluster_id}",
        "Read metrics, as at the gateway",
        operation(MetricsDocument),
    )
    async def gateway_metrics(cluster_id: str) -> Response:
        """Return the metrics of a cluster."""
        return _success(await services.metrics.get(cluster_id))

    @router.get(
        "/cluster-metrics/{cluster_id}/node/{node_id}",
        "Read metrics of a node",
        operation(JsonObject),
    )
    async def node_metrics(cluster_id: str, node_id: str) -> Response:
        """Return the metrics of one node of a cluster."""
        document = await services.metrics.get(cluster_id)
        for node in document.get("nodes", []):
            if node.get("id", node.get("nodeId")) == node_id:
                return _success(node)
        text = f"no metrics of a node {node_id!r} of the cluster {cluster_id!r}"
        raise ServiceError(Code.NOT_FOUND, text, field="id")

    return router


def _search(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router = HttpRouter("search")

    async def search_clusters(action: Literal["filter", "search"], request: Request) -> Response:
        body = await _document(request, bodies)
        tenant = who_of(request)
        try:
            documents, warnings = await services.search(action, body, tenant)
        except ServiceError as error:
            fault = error.status >= SERVER_ERRORS and not error.code.startswith("policy_")
            if error.code is not Code.BUSY and not fault:
                error.status = 400  # The only status that existing clients know (8.2).
            raise
        return _with_warnings(documents, warnings)

    async def filter_clusters(request: Request) -> Response:
        """Return matching cluster documents, by id; bodies may be bare or enveloped."""
        return await search_clusters("filter", request)

    async def rank_clusters(request: Request) -> Response:
        """Return the documents that match the filter rule, ranked, the best first."""
        return await search_clusters("search", request)

    filters = operation(list[JsonObject], (FilterQuery, QueryEnvelope))
    rankings = operation(list[JsonObject], (RankingQuery, QueryEnvelope))
    for path in ("/api/filter-data", "/api/no-ir/filter", "/api/filter"):
        router.post(path, "Filter clusters", filters)(filter_clusters)
    for path in ("/api/similarity-search", "/api/no-ir/similarity-search", "/api/search"):
        router.post(path, "Rank clusters", rankings)(rank_clusters)
    return router


def _with_warnings(data: JsonValue, warnings: Sequence[str]) -> Response:
    answer = {"success": True, "data": data}
    return json_response(answer | {"warnings": warnings} if warnings else answer)


def _policies(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router = HttpRouter("policies")

    @router.post("/policy", "Publish a policy", operation(PublishedPolicy, PolicyDocument))
    async def publish_policy(request: Request) -> Response:
        """Check a policy in the jail, test it with its own examples, and register it.

        Publishing it again changes nothing. `warnings` has possible mistakes of the author.
        """
        document, who = await _document(request, bodies), who_of(request)
        before = await find_former(services.policies.get(str(document.get("policy_rule_uri", ""))))
        uri, warnings = await services.publications.publish(document, who, remote_of(request.scope))
        await note_change(request, before, await find_former(services.policies.get(uri)))
        return _with_warnings(
            {"policy_rule_uri": uri}, warnings
        )  # 200: clients take 201 for a failure.

    @router.get("/policy", "List policies", operation(list[PolicyDocument]))
    async def list_policies() -> Response:
        """Return all PolicyRule documents, by URI."""
        return _success(await services.policies.query())

    @router.post("/policy/query", "Find policies", operation(list[PolicyDocument], MongoQuery))
    async def query_policies(request: Request) -> Response:
        """Return the list of matching PolicyRule documents; `{}` matches all."""
        return _success(await find(request, bodies, services.policies.query))

    return router


def _policy_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router = HttpRouter("policies")

    @router.get("/policy/{uri}", "Read a policy", operation(PolicyDocument))
    async def get_policy(uri: str) -> Response:
        """Return a PolicyRule document, with the digest of its content."""
        return _success(await services.policies.get(uri))

    @router.put(
        "/policy/{uri}",
        "Change the description of a policy",
        operation(PolicyDocument, DocumentChange),
    )
    async def update_policy(uri: str, request: Request) -> Response:
        """Change descriptive fields of a policy; all other changes need a new version."""
        await services.ownership.check_policy(caller_of(request), uri)
        change, who = await _document(request, bodies), who_of(request)
        before = await find_former(services.policies.get(uri))
        after = await services.publications.update(uri, change, who)
        return _success(await note_change(request, before, after))

    @router.delete("/policy/{uri}", "Remove a policy", operation(PolicyDocument))
    async def delete_policy(uri: str, request: Request, force: str = "") -> Response:
        """Delete a policy and return its document. Leases that it proposed stay.

        A version that an alias points at cannot be removed; an alias's fallback version only with
        `?force=true`.
        """
        if force not in {"", "true", "false"}:
            raise ServiceError.wrong_field("force", "true or false")
        await services.ownership.check_policy(caller_of(request), uri)
        forced, who = force == "true", who_of(request)
        removed = await services.publications.delete(uri, who, force=forced)
        return _success(await note_change(request, removed, None))

    @router.get(
        "/policy/{uri}/history",
        "Changes of a policy",
        operation(list[PolicyHistoryEntry]),
    )
    async def policy_history(uri: str) -> Response:
        """Return a policy's changes, oldest first: `at`, `who`, `what`, `digest`, `fields`."""
        return _success(await services.policies.history(uri))

    return router


def _allocator(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router = HttpRouter("allocator")
    if (allocate_for := services.allocate) is None:
        return router

    @router.post(
        "/allocate",
        "Ask for a placement",
        operation(AllocationAnswer, AllocationRequest, bare=True, refusals=True),
    )
    async def allocate(request: Request) -> Response:
        """Allocate as over the WebSocket; the HTTP status corresponds to `error.code`.

        4xx: the request is refused; 500: the policy or the server failed.
        """
        if task := asyncio.current_task():  # An answer that no client reads need not be decided.
            request.scope[LEFT] = (task.cancel,)
        body = await bodies.read(request, ALLOCATION_BYTES_MAX)
        trace = request.headers.get("traceparent", "")
        origin = caller_of(request), remote_of(request.scope)
        with ending_with_token(services, request):
            status, answer = await allocate_for(body, *origin, trace)
        return verdict(status, answer)

    return router


def _blocks(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router = HttpRouter("blocks")

    @router.post(
        "/blockActions/selectClusters",
        "Possible clusters of a block",
        operation(SelectedClusters, BlockPlacementRequest, bare=True),
    )
    async def select_clusters(request: Request) -> Response:
        """Return the clusters that the clusterAllocator selects: `{"clusters": [documents]}`."""
        body, tenant = await _document(request, bodies), who_of(request)
        return json_response(await services.block_actions.select_clusters(body, tenant))

    @router.post(
        "/blockActions/dryRun",
        "Best place of a block",
        operation(JsonObject, BlockPlacementRequest),
    )
    async def dry_run(request: Request) -> Response:
        """Return the chosen cluster with its score and node, without reserving it."""
        body, tenant = await _document(request, bodies), who_of(request)
        return _with_warnings(*await services.block_actions.dry_run(body, tenant))

    @router.post(
        "/blockActions/allocate",
        "Best place of a block, later",
        operation(TaskReference, BlockPlacementRequest, bare=True),
    )
    async def allocate(request: Request) -> Response:
        """Start a dry run as a task and return `{"task_id"}` at once. Nothing is reserved."""
        body, tenant = await _document(request, bodies), who_of(request)
        return json_response({"task_id": await services.block_actions.allocate(body, tenant)})

    @router.get("/api/tasks/{task_id}", "Read a task", operation(TaskReport))
    async def task(task_id: str, request: Request) -> Response:
        """Return a task: `pending`, `completed` with `result`, or `failed` with `error`."""
        return _success(await services.block_actions.task(task_id, who_of(request)))

    return router


def elsewhere_routes() -> HttpRouter:
    """Return the router of endpoints that this server refuses, since other services have them.

    Existing programs may call them, so the refusal names the service that has the endpoint; a 404
    would look like a wrong address.
    """
    router = HttpRouter()
    for path, sentence in _PATHS:
        refuse = _refusing(path.partition("/{")[0], sentence)
        router.add(path, refuse, ["GET", "POST", "PUT", "DELETE"])
    return router


def _refusing(path: str, sentence: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ServiceError(Code.UNSUPPORTED, f"{path}: {sentence}")

    return refuse


def quota_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of the quota endpoints; the arguments are those of `service_routes`."""
    router = HttpRouter("quotas")

    async def answer_change(
        request: Request, name: str, change: JsonMapping = _NO_CHANGE, **fields: object
    ) -> Response:
        given = {key: value for key, value in fields.items() if value is not None}
        said = {**change, **given}
        origin = caller_of(request), remote_of(request.scope)
        status, answer = await services.operate({**said, "op": name}, *origin)
        return verdict(status, answer)

    @router.get("/quotas", "List quotas", operation(QuotaPage))
    async def list_quotas(
        request: Request, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> Response:
        """Return one page of quotas and their use: the caller's own; operators get all."""
        filters = {"tenant": tenant} if tenant is not None else {}
        return await answer_change(request, "quotas", filters=filters, after=after, limit=limit)

    @router.put("/quotas/{tenant}", "Set a quota", operation(QuotaState, QuotaChange))
    async def set_quota(tenant: str, request: Request, project: str | None = None) -> Response:
        """Set the quota of a tenant or, with `?project=`, of one of its projects."""
        change = await read_document(request, bodies)
        for name in change.keys() & _OF_THE_PATH:
            known = ", ".join(QuotaChange.__struct_fields__)
            raise ServiceError.wrong_field(name, f"one of {known}")
        return await answer_change(request, "set_quota", change, tenant=tenant, project=project)

    @router.delete("/quotas/{tenant}", "Remove a quota", operation(QuotaState))
    async def remove_quota(tenant: str, request: Request, project: str | None = None) -> Response:
        """Remove the quota of a tenant, or with `?project=` of one of its projects."""
        return await answer_change(request, "remove_quota", tenant=tenant, project=project)

    return router


def executor_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of the executor endpoints; the arguments are those of `service_routes`."""
    router = HttpRouter("executors")
    _documents(router, services, bodies)

    @router.post(
        "/executor/{executor}/execute_policy",
        "Execute a policy",
        operation(JsonValue, ExecutionRequest),
    )
    async def execute(executor: str, request: Request) -> Response:
        """Evaluate a policy of this server on the given input, and return the result."""
        body = await read_document(request, bodies)
        return success(await services.execute(executor, body, who_of(request)))

    @router.post("/executor/{executor}/create-infra", "Not needed here", operation(JsonObject))
    @router.delete("/executor/{executor}/remove-infra", "Not needed here", operation(JsonObject))
    async def infrastructure(executor: str) -> Response:
        """Refuse: executors of this server run in its own sandbox, not on other infrastructure."""
        reason = f"the executor {executor[:100]} runs in this server's own sandbox and needs none"
        raise ServiceError(Code.UNSUPPORTED, reason)

    return router


def _documents(router: HttpRouter, services: WebServices, bodies: BodyReader) -> None:
    one = operation(ExecutorDocument)

    @router.post("/executor", "Register an executor", operation(ExecutorDocument, ExecutorDocument))
    async def create(request: Request) -> Response:
        """Store a new executor document, owned by the caller, and return it."""
        document = await read_document(request, bodies)
        created = await services.executors.create(document, who_of(request))
        return success(await note_change(request, None, created))

    @router.post("/executor/query", "Find executors", operation(list[ExecutorDocument], MongoQuery))
    async def query(request: Request) -> Response:
        """Return the list of matching documents; `{}` matches all."""
        return success(await find(request, bodies, services.executors.query))

    @router.get("/executor/{executor}", "Read an executor", one)
    async def read(executor: str) -> Response:
        """Return an executor document."""
        return success(await services.executors.get(executor))

    @router.put(
        "/executor/{executor}", "Change an executor", operation(ExecutorDocument, DocumentChange)
    )
    async def update(executor: str, request: Request) -> Response:
        """Change the named fields of an executor document. Its owner and operators may."""
        change = await read_document(request, bodies)
        await services.ownership.check_executor(caller_of(request), executor)
        before = await find_former(services.executors.get(executor))
        after = await services.executors.update(executor, change)
        return success(await note_change(request, before, after))

    @router.delete("/executor/{executor}", "Remove an executor", one)
    async def delete(executor: str, request: Request) -> Response:
        """Remove an executor document and return it."""
        await services.ownership.check_executor(caller_of(request), executor)
        removed = await services.executors.delete(executor)
        return success(await note_change(request, removed, None))

"""The endpoints of block documents and block metrics, for searches with `matchType` `block`.

`web.routes` mounts them. The metrics have the paths of docs/reference/allocation-server.md,
"Services", with `block` in place of `cluster`; the blocks have the paths of the cluster database.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from moorage.records.json_values import JsonObject
from moorage.web.bodies import (
    BodyReader,
    caller_of,
    find,
    pipeline_of,
    query_in_url,
    read_document,
    success,
    who_of,
)
from moorage.web.changes import find_former, note_change
from moorage.web.router import HttpRouter
from moorage.web.schemas import (
    BlockDocument,
    BlockEnvelope,
    BlockHealth,
    BlockMetricsDocument,
    DocumentChange,
    MetricsPipeline,
    MongoQuery,
    operation,
)
from moorage.web.services import WebServices


def block_document_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of the endpoints of block documents and block metrics."""
    router = HttpRouter()
    router.include(_blocks(services, bodies))
    router.include(_metrics(services, bodies))
    return router


def _blocks(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router, blocks = HttpRouter("block documents"), services.blocks
    one = operation(BlockDocument)

    @router.post(
        "/blocks",
        "Add a block",
        operation(BlockDocument, (BlockDocument, BlockEnvelope), statuses=(201,)),
    )
    async def create(request: Request) -> Response:
        """Store a new block document, owned by the caller, for searches of `matchType` `block`."""
        document = await read_document(request, bodies)
        created = await blocks.create(document, who_of(request))
        return success(await note_change(request, None, created), 201)

    @router.post("/blocks/query", "Find blocks", operation(list[BlockDocument], MongoQuery))
    async def query(request: Request) -> Response:
        """Return the list of matching documents; `{}` matches all."""
        return success(await find(request, bodies, partial(blocks.query, "block")))

    @router.get("/blocks", "List blocks", operation(list[BlockDocument]))
    async def all_blocks() -> Response:
        """Return all block documents, by id."""
        return success(await blocks.query("block", None))

    @router.get("/blocks/{block_id}", "Read a block", one)
    async def get(block_id: str) -> Response:
        """Return a block document."""
        return success(await blocks.get("block", block_id))

    @router.put("/blocks/{block_id}", "Change a block", operation(BlockDocument, DocumentChange))
    async def update(block_id: str, request: Request) -> Response:
        """Change a block document and return it. Only its owner and operators may do so."""
        change = await read_document(request, bodies)
        services.ownership.check_block(caller_of(request), block_id)
        before = await find_former(blocks.get("block", block_id))
        after, _ = await blocks.update("block", block_id, change)
        return success(await note_change(request, before, after))

    @router.delete("/blocks/{block_id}", "Remove a block", one)
    async def delete(block_id: str, request: Request) -> Response:
        """Remove a block document and return it; the block's workloads continue to run."""
        services.ownership.check_block(caller_of(request), block_id)
        removed = await blocks.delete("block", block_id)
        return success(await note_change(request, removed, None))

    return router


def _metrics_views(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router, blocks = HttpRouter("block metrics"), services.blocks

    @router.post(
        "/block/aggregate",
        "Aggregate block metrics",
        operation(list[JsonObject], (MetricsPipeline, list[JsonObject])),
    )
    async def aggregate(request: Request) -> Response:
        """Run an aggregation pipeline over the metrics of all blocks, and return the result."""
        stages = pipeline_of(await bodies.read_json(request))
        async with bodies.searches.turn(who_of(request)):
            return success(await blocks.aggregate_metrics(stages))

    @router.get("/block/health/{block_id}", "Is a block alive?", operation(BlockHealth))
    async def health(block_id: str) -> Response:
        """Return whether instances of a block report metrics, and their number."""
        instances = len((await blocks.get("block_metrics", block_id)).get("instances") or ())
        return success({"blockId": block_id, "healthy": instances > 0, "instances": instances})

    return router


def _metrics(services: WebServices, bodies: BodyReader) -> HttpRouter:
    router, blocks = HttpRouter("block metrics"), services.blocks
    one = operation(BlockMetricsDocument)
    stored = operation(BlockMetricsDocument, BlockMetricsDocument, statuses=(200, 201))

    async def store(request: Request) -> Response:
        """Store the metrics of a block; the status is 201 the first time, 200 later."""
        given = await read_document(request, bodies)
        services.ownership.check_block(caller_of(request), str(given.get("blockId", "")))
        document, created = await blocks.put_metrics(given)
        return success(document, 201 if created else 200)

    router.post("/block", "Report block metrics", stored)(store)
    router.put("/block", "Report block metrics", stored)(store)

    @router.post(
        "/block/query", "Find block metrics", operation(list[BlockMetricsDocument], MongoQuery)
    )
    async def query(request: Request) -> Response:
        """Return the list of matching documents; `{}` matches all."""
        return success(await find(request, bodies, partial(blocks.query, "block_metrics")))

    @router.get(
        "/block/query", "Find block metrics by equality", operation(list[BlockMetricsDocument])
    )
    async def query_by_parameters(request: Request) -> Response:
        """Return metrics by fields in the URL; a repeated field matches any of its values."""
        async with bodies.searches.turn(who_of(request)):
            return success(await blocks.query("block_metrics", query_in_url(request)))

    router.include(_metrics_views(services, bodies))

    @router.get("/block/{block_id}", "Read block metrics", one)
    async def get(block_id: str) -> Response:
        """Return the metrics of a block."""
        return success(await blocks.get("block_metrics", block_id))

    @router.put(
        "/block/{block_id}",
        "Change block metrics",
        operation(BlockMetricsDocument, DocumentChange, statuses=(200, 201)),
    )
    async def change(block_id: str, request: Request) -> Response:
        """Change metrics and return the document; the status is 201 if there were none before."""
        given = await read_document(request, bodies)
        services.ownership.check_block(caller_of(request), block_id)
        document, created = await blocks.update("block_metrics", block_id, given)
        return success(document, 201 if created else 200)

    @router.delete("/block/{block_id}", "Remove block metrics", one)
    async def delete(block_id: str, request: Request) -> Response:
        """Remove the metrics of a block and return them."""
        services.ownership.check_block(caller_of(request), block_id)
        return success(await blocks.delete("block_metrics", block_id))

    return router

"""The server's specifications: OpenAPI, AsyncAPI, JSON Schemas, and a page with links to them.

The page is plain HTML without scripts, and loads nothing from anywhere.
"""

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Final

import msgspec
from starlette.responses import HTMLResponse, Response

from moorage.model import Code
from moorage.protocol import specification
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject
from moorage.web.router import HttpRouter
from moorage.web.schemas import components, failures, operation, text_operation

_DESCRIPTION: Final = """\
Moorage decides which cluster, node and GPUs run a workload, by policies its users write in Python.

Failures are `{"success": false, "message", "error": {"code", "reason", "field", "expected"}}`;
under `/clusters` the text stands in `error` and the rest in `details`, as its clients expect.
Where tokens are configured, send `Authorization: Bearer <token>`, or Basic with it
as password.
"""
_STYLE: Final = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #ccc; padding: 0.3rem 1rem 0.3rem 0; vertical-align: top }
"""
_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_LINKS: Final = {
    "/openapi.json": "HTTP, as an OpenAPI document",
    "/asyncapi.json": "the WebSocket, as an AsyncAPI document",
    "/schemas/": "a JSON Schema of every message",
    "/metrics": "the server's own metrics",
    "/readyz": "whether requests can be served",
}


def specification_routes(whole: HttpRouter) -> HttpRouter:
    """Return the router of the specifications' endpoints."""
    router = HttpRouter("about")
    # The specifications never change, and making them costs as much as a hundred other answers.
    described = cache(lambda: msgspec.json.encode(_openapi(whole)))
    socket = cache(lambda: msgspec.json.encode(specification.asyncapi(version("moorage"))))
    page = cache(lambda: "".join(_page(_openapi(whole))))
    document = operation(JsonObject, bare=True)

    @router.get("/openapi.json", "This interface, described", document)
    async def openapi() -> Response:
        """Return the OpenAPI document."""
        return Response(described(), media_type="application/json")

    @router.get("/asyncapi.json", "The WebSocket, described", document)
    async def asyncapi() -> Response:
        """Return the AsyncAPI document."""
        return Response(socket(), media_type="application/json")

    @router.get("/schemas/", "The schemas of all messages", operation(dict[str, str], bare=True))
    async def schemas() -> Response:
        """Return the path of each schema, by its name."""
        paths = {name: f"/schemas/{name}.json" for name in specification.documents()}
        return Response(msgspec.json.encode(paths), media_type="application/json")

    @router.get("/schemas/{name}.json", "The schema of a message", document)
    async def schema(name: str) -> Response:
        """Return the JSON Schema of a message, or of a part of one."""
        found = specification.documents().get(name)
        if found is None:
            raise ServiceError(Code.NOT_FOUND, "no such schema; GET /schemas/ lists all schemas")
        return Response(msgspec.json.encode(found), media_type="application/json")

    @router.get("/", "Where to begin", text_operation("text/html"))
    async def start() -> Response:
        """Return a page for browsers with links to all specifications."""
        return HTMLResponse(page(), headers=_HEADERS)

    @router.get("/docs", "This interface, for people", text_operation("text/html"))
    async def docs() -> Response:
        """Return a page for browsers with all paths and messages."""
        return HTMLResponse(page(), headers=_HEADERS)

    return router


def _openapi(whole: HttpRouter) -> JsonObject:
    """Return the OpenAPI document of all endpoints that have a description."""
    paths: dict[str, JsonObject] = {}
    for endpoint in whole.described():
        operations = paths.setdefault(endpoint.path, {})
        for method, each in endpoint.descriptions():
            each["responses"] = {**each["responses"], "default": failures(endpoint.path)}
            operations[method] = each
    about = {"title": "Moorage", "description": _DESCRIPTION, "version": version("moorage")}
    return {
        "openapi": "3.1.0",
        "info": about,
        "paths": paths,
        "components": {"schemas": components()},
    }


def _page(described: JsonObject) -> Iterator[str]:
    """Yield the page with all paths and messages, in parts."""
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Moorage</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>Moorage {escape(version('moorage'))}</h1><ul>"
    for path, about in _LINKS.items():
        yield f'<li><a href="{path}">{path}</a>: {escape(about)}</li>'
    yield "</ul><h2>Messages of the WebSocket</h2><table>"
    for name, kind in specification.MESSAGES.items():
        summary = specification.schemas()[kind.__name__]["description"].partition("\n")[0]
        schema = f"/schemas/{kind.__name__}.json"
        yield f'<tr><td><a href="{schema}">{escape(name)}</a></td><td>{escape(summary)}</td></tr>'
    yield "</table><h2>Paths of HTTP</h2><table>"
    for path, operations in described["paths"].items():
        for method, each in operations.items():
            cell = f"{escape(each['summary'])}<br>{escape(each.get('description', ''))}"
            yield f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{cell}</td></tr>"
    yield "</table></body></html>\n"

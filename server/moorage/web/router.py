"""Maps paths to functions, and describes them for `/openapi.json`.

The parameters of an endpoint are `request`, those of its path, and those of the URL's query, which
have a default and are `str`, `str | None` or `int`. `web.app` makes an application of the
endpoints.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path

from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject

ROUTE: Final = "moorage.route"
"""Key in a request's scope of the endpoint's path template."""
Handler = Callable[..., Awaitable[Response]]
Decorator = Callable[[Handler], Handler]
Guard = Callable[[Request], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEndpoint:
    """A path, and the function that answers the requests for this path.

    Args:
        path: The path of the endpoint; names in braces are parameters.
        handler: The function; its docstring is the description.
        summary: The description in a few words; empty: `/openapi.json` leaves the endpoint out.
        tags: Groups of the description to which the endpoint belongs.
        described: Further parts of the description: `responses`, `requestBody`.
        guard: Called before the function; raises `ServiceError` if the caller may not pass.
    """

    path: str
    methods: tuple[str, ...]
    handler: Handler
    summary: str = ""
    tags: tuple[str, ...] = ()
    described: JsonMapping
    guard: Guard | None = None

    def matches(self, path: str) -> bool:
        """Return whether a request's path belongs to this endpoint."""
        return compile_path(self.path)[0].match(path) is not None

    def route(self) -> Route:
        """Return this endpoint as a route of Starlette."""
        parameters = inspect.signature(self.handler).parameters
        queries = [each for each in parameters.values() if _is_query(each)]

        async def answer(request: Request) -> Response:
            request.scope[ROUTE] = self.path
            if self.guard is not None:
                await self.guard(request)
            given: JsonObject = {**request.path_params, "request": request}
            for each in queries:
                if (text := request.query_params.get(each.name)) is not None:
                    given[each.name] = _number(each.name, text) if each.annotation is int else text
            return await self.handler(**{name: given[name] for name in given if name in parameters})

        return Route(self.path, answer, methods=list(self.methods))

    def descriptions(self) -> Iterator[tuple[str, JsonObject]]:
        """Yield each method with its Operation Object of OpenAPI."""
        name = getattr(self.handler, "__name__", "")
        parameters = [
            _describe(each)
            for each in inspect.signature(self.handler).parameters.values()
            if each.name != "request"
        ]
        for method in map(str.lower, self.methods):
            yield (
                method,
                {
                    "tags": list(self.tags),
                    "summary": self.summary,
                    "description": inspect.getdoc(self.handler),
                    "operationId": re.sub(r"\W", "_", f"{name}{self.path}") + f"_{method}",
                    **({"parameters": parameters} if parameters else {}),
                    **self.described,
                },
            )


class HttpRouter:
    """A list of endpoints; a request gets the first one that matches.

    Args:
        tag: The group of the description to which the endpoints belong.

    Attributes:
        endpoints: The endpoints that were added so far.
    """

    def __init__(self, *tag: str) -> None:
        self.endpoints: list[HttpEndpoint] = []
        self._tags = tag

    def get(self, path: str, summary: str, described: JsonMapping) -> Decorator:
        """Register a function for GET; `described` is a result of `schemas.operation`."""
        return self._adding("GET", path, summary, described)

    def post(self, path: str, summary: str, described: JsonMapping) -> Decorator:
        """Register a function for POST; the arguments are those of `get`."""
        return self._adding("POST", path, summary, described)

    def put(self, path: str, summary: str, described: JsonMapping) -> Decorator:
        """Register a function for PUT; the arguments are those of `get`."""
        return self._adding("PUT", path, summary, described)

    def delete(self, path: str, summary: str, described: JsonMapping) -> Decorator:
        """Register a function for DELETE; the arguments are those of `get`."""
        return self._adding("DELETE", path, summary, described)

    def add(self, path: str, handler: Handler, methods: Sequence[str]) -> None:
        """Add an endpoint without a description."""
        self.endpoints.append(
            HttpEndpoint(path=path, methods=tuple(methods), handler=handler, described={})
        )

    def include(self, other: "HttpRouter", guard: Guard | None = None) -> None:
        """Add the endpoints of another router.

        Args:
            other: The other router.
            guard: Called before each of the added endpoints, if given.
        """
        if guard is not None:
            self.endpoints += [replace(each, guard=guard) for each in other.endpoints]
        else:
            self.endpoints += other.endpoints

    def described(self) -> list[HttpEndpoint]:
        """Return the endpoints that `/openapi.json` describes."""
        return [each for each in self.endpoints if each.summary]

    def _adding(self, method: str, path: str, summary: str, described: JsonMapping) -> Decorator:
        def add(handler: Handler) -> Handler:
            self.endpoints.append(
                HttpEndpoint(
                    path=path,
                    methods=(method,),
                    handler=handler,
                    summary=summary,
                    tags=self._tags,
                    described=described,
                )
            )
            return handler

        return add


def _is_query(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty


def _describe(parameter: inspect.Parameter) -> JsonObject:
    """Return the OpenAPI description of a parameter."""
    query, default = _is_query(parameter), parameter.default
    schema = {
        **msgspec.json.schema(parameter.annotation),
        **({"default": default} if query and default is not None else {}),
        "title": parameter.name.replace("_", " ").title(),
    }
    place = {"name": parameter.name, "in": "query" if query else "path", "required": not query}
    return {**place, "schema": schema}


def _number(name: str, text: str) -> int:
    """Return an integer from the URL; decimals are allowed if they are zeros."""
    try:
        return int(re.sub(r"\.0*$", "", text.strip()))
    except ValueError:
        reason = "Input should be a valid integer, unable to parse string as an integer"
        raise ServiceError.wrong_field(f"query.{name}", reason) from None

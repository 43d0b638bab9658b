"""Endpoints of other services around the allocator, which this server refuses.

Existing programs may call them, so they are refused with a sentence that says who does that, and
not with a 404 that looks like a wrong address. `web.routes` mounts them last.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.web.router import HttpRouter

_JOBS: Final = "jobs are run by the policy service; ask for a lease with `provision`"
_FUNCTIONS: Final = "stateful functions are run by the policy service; `context` keeps state here"
_GRAPHS: Final = "policy graphs are run by the policy service; one policy decides a placement here"
_SCALING: Final = "blocks are scaled by their cluster's controller; ask for each instance here"
_CHECKS: Final = "pre-check policies are run by the cluster's controller; see `/blockActions`"
_PARSER: Final = "the parser parses specifications; send what it makes to `/api/filter-data`"
_ACTIONS: Final = (
    "of the parser's actions, `filter` and `search` are served; clusters are added at `/clusters`,"
    " nodes at `/clusters/ID/nodes`, and blocks are placed at `/blockActions/allocate`"
)
_GROUPS: Final = "clusters have no groups here; filter them by `tags` or any other field"
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
    ("/api/reinitiate/{rest:path}", "tasks are not made again; send the block again"),
    ("/groups", _GROUPS),
    ("/groups/{rest:path}", _GROUPS),
)


def elsewhere_routes() -> HttpRouter:
    """Return the router of these endpoints."""
    router = HttpRouter()
    for path, sentence in _PATHS:
        refuse = _refusing(path.partition("/{")[0], sentence)
        router.add(path, refuse, ["GET", "POST", "PUT", "DELETE"])
    return router


def _refusing(path: str, sentence: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ServiceError(Code.UNSUPPORTED, f"{path}: {sentence}")

    return refuse

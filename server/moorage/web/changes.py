"""A document before and after an HTTP request changes it, for the audit log. Endpoints call it."""

import asyncio
from collections.abc import Awaitable
from typing import Final

from starlette.requests import Request

from moorage.protocol.faults import ServiceError
from moorage.protocol.large_json import is_large
from moorage.protocol.registry import Document
from moorage.records.differences import differences

BEFORE: Final = "before"
"""Where the request's state has the document before a change."""
AFTER: Final = "after"
"""Where the request's state has the document after a change."""


async def find_former(document: Awaitable[Document]) -> Document | None:
    """Return a document that is about to change; None: there is none, or it cannot be read."""
    try:
        return await document
    except ServiceError:
        return None


async def note_change(
    request: Request, before: Document | None, after: Document | None
) -> Document:
    """Note what differs between two documents, for the audit log; return the one to answer."""
    if is_large(before) or is_large(after):
        noted = await asyncio.to_thread(differences, before, after)
    else:
        noted = differences(before, after)
    setattr(request.state, BEFORE, noted[0])
    setattr(request.state, AFTER, noted[1])
    return (before or {}) if after is None else after

"""Records, for the audit log, a document before and after an HTTP request changes it."""

import asyncio
from collections.abc import Awaitable
from typing import Final

from starlette.requests import Request

from moorage.protocol.faults import ServiceError
from moorage.protocol.large_json import is_large
from moorage.protocol.registry import Document
from moorage.records.differences import differences

BEFORE: Final = "before"
"""Name in the request's state of the document before a change."""
AFTER: Final = "after"
"""Name in the request's state of the document after a change."""


async def find_former(document: Awaitable[Document]) -> Document | None:
    """Return a document before its change; None if it does not exist or cannot be read."""
    try:
        return await document
    except ServiceError:
        return None


async def note_change(
    request: Request, before: Document | None, after: Document | None
) -> Document:
    """Store the differences of two documents for the audit log; return the document to answer."""
    if is_large(before) or is_large(after):
        noted = await asyncio.to_thread(differences, before, after)
    else:
        noted = differences(before, after)
    setattr(request.state, BEFORE, noted[0])
    setattr(request.state, AFTER, noted[1])
    return (before or {}) if after is None else after

"""Refusals of changes to a mirrored part: changes belong to the service with the documents."""

from collections.abc import Callable, Coroutine
from typing import NoReturn

from moorage.catalog.mirrored.http import Service
from moorage.model import Code
from moorage.protocol.faults import ServiceError

__all__ = ["Refused", "changed_at"]

Refused = Callable[..., Coroutine[object, object, NoReturn]]
"""Stands for every method that would change something."""


def changed_at(service: Service, part: str) -> Refused:
    """Return a method that refuses: the documents of a part are changed at a service."""

    async def refuse(*_: object, **__: object) -> NoReturn:
        raise ServiceError(
            Code.UNSUPPORTED,
            f"This server reads its {part} from {service.url}; change them there.",
            expected=f"a request to {service.url}",
        )

    return refuse

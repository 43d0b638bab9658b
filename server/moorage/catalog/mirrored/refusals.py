"""Refuse changes of a mirrored part, which only its external service can change."""

from collections.abc import Callable, Coroutine
from typing import NoReturn

from moorage.catalog.mirrored.http import Service
from moorage.model import Code
from moorage.protocol.faults import ServiceError

__all__ = ["Refused", "refuse_change_at"]

Refused = Callable[..., Coroutine[object, object, NoReturn]]
"""Stands for every method that would change something."""


def refuse_change_at(service: Service, part: str) -> Refused:
    """Return a method that refuses a change and names the service where to make it."""

    async def refuse(*_: object, **__: object) -> NoReturn:
        raise ServiceError(
            Code.UNSUPPORTED,
            f"This server reads its {part} from {service.url}; change them there.",
            expected=f"a request to {service.url}",
        )

    return refuse

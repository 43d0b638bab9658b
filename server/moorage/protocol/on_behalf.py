"""The caller for whom work is done where none is passed along: `web` notes it, `catalog` counts.

None: the server does it for itself.
"""

from contextvars import ContextVar
from typing import Final

from moorage.records.rights import Caller

__all__ = ["ON_BEHALF_OF"]

ON_BEHALF_OF: Final = ContextVar[Caller | None]("on_behalf_of", default=None)

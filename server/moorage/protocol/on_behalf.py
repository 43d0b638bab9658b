"""The tenant for whom work is done where none is passed along: `web` notes it, `catalog` counts.

Empty: the server does it for itself.
"""

from contextvars import ContextVar
from typing import Final

ON_BEHALF_OF: Final = ContextVar("on_behalf_of", default="")

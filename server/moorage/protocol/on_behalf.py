"""Names the tenant of the current work where no argument names the tenant.

`web` sets the variable; `catalog` counts work by tenant. Empty: the server works for itself.
"""

from contextvars import ContextVar
from typing import Final

ON_BEHALF_OF: Final = ContextVar("on_behalf_of", default="")

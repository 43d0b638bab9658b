"""Who may connect: tokens and their tenants, which may change while the daemon runs.

Both front doors ask it; `token_refresh` has it changed.
"""

from collections.abc import Mapping
from typing import Final

from moorage.daemon.requests.lease_tokens import digest
from moorage.model import Tenant

LOCAL_TENANT: Final = Tenant("local")
"""Everybody, where no tokens are configured (loopback only)."""


class Tokens:
    """Knows whose a token is, by its digest: how long that takes says nothing of the token.

    Args:
        tokens: Token to tenant.

    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._tenants: dict[str, Tenant] = {}
        self.change(tokens)

    def change(self, tokens: Mapping[str, str]) -> None:
        """Know these from now on, and no others."""
        self._tenants = {digest(token): Tenant(tenant) for token, tenant in tokens.items()}

    def tenant(self, bearer: str | None) -> Tenant | None:
        """Return whose a token is; None: no tenant's."""
        return self._tenants.get(digest(bearer or "")) if self._tenants else LOCAL_TENANT

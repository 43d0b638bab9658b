"""Who may connect: tokens and their tenants, which may change while the daemon runs.

Both front doors ask it; `token_refresh` has it changed.
"""

from collections.abc import Collection, Mapping
from typing import Final

from moorage.daemon.requests.lease_tokens import digest
from moorage.model import Tenant

LOCAL_TENANT: Final = Tenant("local")
"""Everybody, where no tokens are configured (loopback only)."""


class Tokens:
    """Knows whose a token is, by its digest: how long that takes says nothing of the token.

    Args:
        tokens: Token to tenant.
        operators: Tenants that see what all hold.

    """

    def __init__(self, tokens: Mapping[str, str], operators: Collection[str] = ()) -> None:
        self._operators = frozenset(operators)
        self._tenants: dict[str, Tenant] = {}
        self.change(tokens)

    def change(self, tokens: Mapping[str, str]) -> None:
        """Know these from now on, and no others."""
        self._tenants = {digest(token): Tenant(tenant) for token, tenant in tokens.items()}

    @property
    def required(self) -> bool:
        """Whether there are any."""
        return bool(self._tenants)

    def is_operator(self, tenant: Tenant) -> bool:
        """Tell whether a tenant sees what all hold; where there are no tokens, everybody does."""
        return tenant in self._operators or not self._tenants

    def tenant(self, bearer: str | None) -> Tenant | None:
        """Return whose a token is; None: no tenant's."""
        return self._tenants.get(digest(bearer or "")) if self._tenants else LOCAL_TENANT

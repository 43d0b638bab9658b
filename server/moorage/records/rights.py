"""Roles, rights and callers: the only table of each role's rights.

The WebSocket, the HTTP port, the console and the command line call `Caller.may(Right.…)`. A new
right is one line of `Right`.
"""

from enum import Enum, StrEnum
from typing import Final

import msgspec

from moorage.model import Tenant


class Role(StrEnum):
    """The role of a token. Each of the first five includes the rights of earlier roles."""

    VIEWER = "viewer"
    CLIENT = "client"
    AUTHOR = "author"
    OPERATOR = "operator"
    ADMIN = "admin"
    METRICS = "metrics"
    """The role of a scraper, which may only read `/metrics`."""


_LADDER: Final = (Role.VIEWER, Role.CLIENT, Role.AUTHOR, Role.OPERATOR, Role.ADMIN)
_VIEWER, _CLIENT, _AUTHOR, _OPERATOR, _ADMIN = (
    frozenset(_LADDER[place:]) for place in range(len(_LADDER))
)


class Right(Enum):
    """A right: its name, the roles that have it, and its meaning after "may".

    Names ending in `_all` extend a right to other tenants' objects.
    """

    METRICS = "metrics", _VIEWER | {Role.METRICS}, "read the server's metrics"
    READ = "read", _VIEWER, "look at the fleet, the queue, policies and leases"
    PLACE = "place", _CLIENT, "ask for placements and leases"
    LEASE = "lease", _CLIENT, "renew, release or cancel"
    EXEC = "exec", _CLIENT, "run commands in workloads"
    POLICY = "policy", _AUTHOR, "publish policies, or change aliases and their data"
    CLUSTER = "cluster", _AUTHOR, "register or change clusters, metrics, blocks and executors"
    READ_ALL = "read_all", _OPERATOR, "see what other tenants hold"
    POLICY_ALL = "policy_all", _OPERATOR, "change policies and aliases of other tenants"
    CLUSTER_ALL = "cluster_all", _OPERATOR, "change clusters of other tenants"
    CORDON = "cordon", _OPERATOR, "take clusters and nodes out of service, or put them back"
    RESERVE = "reserve", _OPERATOR, "reserve nodes, or end reservations"
    QUOTA = "quota", _OPERATOR, "set or remove quotas"
    TOKEN = "token", _ADMIN, "list, create or revoke tokens"  # A name, no secret.

    def __init__(self, label: str, roles: frozenset[Role], meaning: str) -> None:
        self.label = label
        self.roles = roles
        self.meaning = meaning

    @property
    def expected(self) -> str:
        """The needed token in words: `a token with the role operator or admin`."""
        *names, last = [role.value for role in Role if role in self.roles]
        return f"a token with the role {', '.join(names) + ' or ' if names else ''}{last}"


SERVER_ITSELF: Final = "(server)"
"""The name of the server's own token, and the owner of the clusters that the server maintains; no
other token or tenant can have this name."""
RESERVED_TENANTS: Final = frozenset({SERVER_ITSELF, "moored", "*"})
"""Names that no caller's tenant can have: the server's own names as an owner and in the audit log,
and the name for all tenants."""
TENANT_CHARS_MAX: Final = 200


def is_tenant_name(text: str) -> bool:
    """Return whether a caller's tenant can have this name."""
    if not 0 < len(text) <= TENANT_CHARS_MAX or text in RESERVED_TENANTS:
        return False
    return text.isprintable() and not any(each.isspace() or each == "," for each in text)


class Caller(msgspec.Struct, frozen=True, gc=False):
    """The sender of a request; the handshake or the HTTP port makes it once.

    Args:
        tenant: The owner of the leases, quota and policies in its requests.
        role: Decides the caller's rights.
        token_name: Name of the caller's token; empty: a token of the settings, or none.
    """

    tenant: Tenant
    role: Role
    token_name: str = ""

    def may(self, right: Right) -> bool:
        """Return whether the caller has a right."""
        return self.role in right.roles

    def refusal(self, right: Right, does: str = "") -> str:
        """Return a sentence that says why the caller may not do something.

        Args:
            right: The right that the action needs.
            does: The action in words that follow "may"; by default the meaning of the right.
        """
        return (
            f"Tenant “{self.tenant}” with the role {self.role} may not {does or right.meaning}. "
            f"Use {right.expected} (`moored token create` makes one), or that of a tenant that the "
            "setting `operators` (MOORAGE_OPERATORS) names."
        )

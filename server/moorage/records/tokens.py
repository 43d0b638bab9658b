"""Named tokens as the HTTP port and `moored token` show them, and a request for a new one."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from moorage.records.rights import RESERVED_TENANTS, TENANT_CHARS_MAX, Role, is_tenant_name

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?![\s\S])"
NAME_EXPECTED: Final = "up to 100 letters, digits, `.`, `_` or `-`, the first a letter or digit"
TENANT_EXPECTED: Final = f"a name of 1 to {TENANT_CHARS_MAX} characters without spaces or `,`"
LIFETIME_SECONDS_MAX: Final = 10 * 366 * 86_400
"""Longest lifetime of a token: ten years. `moored token create` has no limit."""


class NewToken(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to create: its name for lists and logs, and the role and tenant of its holder."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN, description=NAME_EXPECTED)]
    role: Annotated[Role, Meta(description=f"one of {', '.join(Role)}")]
    tenant: Annotated[str, Meta(description=TENANT_EXPECTED)]
    lifetime_seconds: Annotated[
        Annotated[float, Meta(ge=1, le=LIFETIME_SECONDS_MAX)] | None,
        Meta(description=f"1 to {LIFETIME_SECONDS_MAX} seconds from now, or null: no end"),
    ] = None


class TokenState(Struct, frozen=True, kw_only=True):
    """A named token without its secret; times are in seconds since the epoch."""

    name: str
    role: Role
    tenant: str
    state: Literal["valid", "expired", "revoked"]
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class CreatedToken(TokenState, frozen=True, kw_only=True):
    """A new token with its secret, which no later answer repeats."""

    token: str


def expected_tenant(text: str) -> str | None:
    """Return what a tenant's name must be instead of this text; None: the name is valid."""
    if is_tenant_name(text):
        return None
    if text in RESERVED_TENANTS:
        return f"another name: the server itself uses `{text}`"
    return TENANT_EXPECTED

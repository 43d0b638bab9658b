"""Kinds of settings: for each, the accepted values in words and the function that reads them.

`moorage.config.settings` says which setting is of which kind.
"""

import ipaddress
import re
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from moorage.model import GPU_MILLI, Amounts, Quota, Tenant
from moorage.protocol.origins import is_loopback, read_origin
from moorage.protocol.proxies import read_proxies
from moorage.records.fields import CPU_MILLI_MAX, WAIT_SECONDS_MAX
from moorage.records.rights import RESERVED_TENANTS, Role, is_tenant_name
from moorage.setting_kinds import SettingKind, read_list, whole

URL_CHARS_MAX: Final = 2_048
"""Maximum characters of a URL of an external service."""
_QUOTES: Final = ("'", '"')
_QUOTED: Final = re.compile(r"""(['"]).*\1""")
TOKEN_CHARS_MIN: Final = 2
"""Least characters of a token on loopback, where only local programs can guess tokens."""
REMOTE_TOKEN_CHARS_MIN: Final = 8
"""Least characters of a token on an address that other machines reach."""
# A name or an address as in a URL, but IPv6 addresses without their brackets.
_HOST_NAME: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,253}", re.ASCII)
_RAY: Final = re.compile(
    r"auto|(?:ray://)?(?:[a-zA-Z0-9_.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}", re.ASCII
)
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class QuotaSetting(NamedTuple):
    """A quota that the configuration sets."""

    tenant: Tenant
    project: str | None
    quota: Quota


def _read_host(value: object) -> str:
    # With an empty host, the system would listen on every address.
    if not isinstance(value, str) or not value or value != value.strip():
        raise ValueError
    return value


def _read_hosts(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise ValueError
    if not all(isinstance(name, str) and _HOST_NAME.fullmatch(name) for name in names):
        raise ValueError
    for name in names:
        if ":" in name:  # No port: an address of IPv6, or nothing.
            ipaddress.IPv6Address(name)
    return tuple(name.lower() for name in names)


def _read_origins(value: object) -> tuple[str, ...]:
    origins = read_list(value)
    if not origins or not all(map(read_origin, origins)):
        raise ValueError
    return tuple(origins)


def _read_networks(value: object) -> tuple[str, ...]:
    return tuple(map(str, read_proxies(read_list(value)).networks))


def _read_websocket_url(value: object) -> str:
    url = _read_url(value, ("ws", "wss"))
    if urllib.parse.urlsplit(url).username is not None:
        raise ValueError
    return url


def _read_url(value: object, schemes: Collection[str] = ("http", "https")) -> str:
    if not isinstance(value, str) or len(value) > URL_CHARS_MAX:
        raise ValueError
    parsed = urllib.parse.urlsplit(value)
    _ = parsed.port  # Raises ValueError if the port is invalid.
    plain = parsed.hostname and not parsed.query and not parsed.fragment
    if parsed.scheme not in schemes or not plain or not value.isprintable():
        raise ValueError
    if any(character.isspace() for character in value):
        raise ValueError
    return value.rstrip("/")


def _read_issuer(value: object) -> str:
    """Return the URL of an issuer unchanged: its tokens contain exactly this text."""
    text = _read_url(value)
    parsed = urllib.parse.urlsplit(text)
    if parsed.username or (parsed.scheme == "http" and not is_loopback(parsed.hostname or "")):
        raise ValueError
    return str(value)


def _read_roles(value: object) -> dict[str, Role]:
    """Return the role for each value of the tokens' claim, from `VALUE=ROLE,…` or a table."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        parts = (each.rpartition("=") for each in read_list(value))
        pairs = [(name.strip(), role.strip()) for name, _, role in parts]
    if not all(name and isinstance(role, str) for name, role in pairs):
        raise ValueError
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return {name: Role(role) for name, role in pairs}


def _read_ray(value: object) -> str:
    if not isinstance(value, str) or not _RAY.fullmatch(value):
        raise ValueError
    if value != "auto" and not 0 < int(value.rpartition(":")[2]) < 1 << 16:
        raise ValueError
    return value


def _read_storage(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > URL_CHARS_MAX:
        raise ValueError
    if urllib.parse.urlsplit(value).scheme not in {"postgresql", "postgres"}:
        raise ValueError
    return value


def _read_labels(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise ValueError
    if not all(isinstance(name, str) and _LABEL.fullmatch(name) for name in names):
        raise ValueError
    return tuple(names)


def _read_label(value: object) -> str:
    (label,) = _read_labels([value])
    return label


def _read_tokens(value: object) -> dict[str, str]:
    """Return token → tenant, from `tenant:token,…` or a table of tenant = token or [tokens]."""
    pairs: list[tuple[str, Any]]
    if isinstance(value, str):
        items = [item.strip().partition(":") for item in value.split(",") if item.strip()]
        pairs = [(tenant, token) for tenant, _, token in items]
        if any(tenant[:1] in _QUOTES or _QUOTED.fullmatch(token) for tenant, token in pairs):
            raise ValueError  # Quotes that no shell removed would be part of a name or token.
    elif isinstance(value, Mapping):
        pairs = [
            (tenant, token)
            for tenant, tokens in value.items()
            for token in (tokens if isinstance(tokens, list) else [tokens])
        ]
    else:
        raise ValueError  # noqa: TRY004  # `read` handles only ValueError.
    tenants: dict[str, str] = {}
    for tenant, token in pairs:
        if not isinstance(token, str) or not is_tenant_name(tenant) or token in tenants:
            raise ValueError
        if len(token) < TOKEN_CHARS_MIN:
            raise ValueError
        if any(character.isspace() or character == "," for character in token):
            raise ValueError
        tenants[token] = tenant
    return tenants


_QUOTA_AMOUNTS: Final = {"gpus": "gpu_milli", "cpu_milli": "cpu_milli", "memory_mib": "memory_mib"}


def _read_quotas(value: object) -> tuple[QuotaSetting, ...]:
    """Return the quotas, from texts `TENANT key=value …`."""
    found: list[QuotaSetting] = []
    for line in read_list(value):
        name, *words = line.split()
        tenant, slash, project = name.partition("/")
        if not tenant or (slash and tenant == "*"):
            raise ValueError
        amounts: dict[str, dict[str, int]] = {"": {}, "borrow_": {}, "lend_": {}}
        plain_words: dict[str, float] = {"weight": 1.0, "notice_seconds": 0.0}
        for word in words:
            key, _, text = word.partition("=")
            if key in plain_words:
                plain_words[key] = float(text)
                continue
            kind = next(each for each in ("borrow_", "lend_", "") if key.startswith(each))
            resource = _QUOTA_AMOUNTS.get(key.removeprefix(kind))
            number = float(text) * (GPU_MILLI if key.endswith("gpus") else 1)
            if resource is None or not 0 <= number <= CPU_MILLI_MAX:
                raise ValueError
            amounts[kind][resource] = round(number)
        weight, notice = plain_words.values()
        if not 0 < weight <= CPU_MILLI_MAX or not 0 <= notice <= WAIT_SECONDS_MAX:
            raise ValueError
        own, borrow, lend = (Amounts(**each) for each in amounts.values())
        quota = Quota(weight, own, borrow, lend, notice)
        found.append(QuotaSetting(Tenant(tenant), project if slash else None, quota))
    if len({(each.tenant, each.project) for each in found}) < len(found):
        raise ValueError
    return tuple(found)


HOST: Final = SettingKind("a host name or an IP address", _read_host)
HOSTS: Final = SettingKind(
    "host names or IP addresses, separated by commas (in the file a list)", _read_hosts
)
ORIGINS: Final = SettingKind(
    "origins such as `https://console.example` or `http://10.0.0.7:3000`, separated by commas (in "
    "the file a list)",
    _read_origins,
)
NETWORKS: Final = SettingKind(
    "IP addresses, or networks such as `10.0.0.0/8` that begin at their first address, separated "
    "by commas (in the file a list)",
    _read_networks,
)
URL: Final = SettingKind(
    "an http or https URL such as `http://registry:3000`, without a query; `user:password@` before "
    "the host is sent as Basic credentials, `bearer:token@` as a bearer token",
    _read_url,
)
WEBSOCKET_URL: Final = SettingKind(
    "a ws or wss URL such as `wss://moorage-1.example:8765`", _read_websocket_url
)
ISSUER: Final = SettingKind(
    "the URL of an issuer exactly as its tokens name it, of https (http only on this machine)",
    _read_issuer,
)
ROLES: Final = SettingKind(
    f"`VALUE=ROLE`, separated by commas (in the file a table); roles are {', '.join(Role)}",
    _read_roles,
)
STORAGE: Final = SettingKind(
    "the address of a PostgreSQL database: `postgresql://user@host:port/database`", _read_storage
)
RAY: Final = SettingKind(
    "the address of a Ray cluster: `ray://host:port`, `host:port` or `auto`", _read_ray
)
TOKENS: Final = SettingKind(
    '`tenant:token,…` (in the file a table `[tokens]` of `tenant = "token"` or a list of them), '
    f"each token for one tenant, of {TOKEN_CHARS_MIN} characters or more "
    f"({REMOTE_TOKEN_CHARS_MIN} where other machines reach it), without spaces or commas, and "
    "without quotes around them; no tenant has a name of the server itself "
    f"({', '.join(f'`{each}`' for each in sorted(RESERVED_TENANTS))})",
    _read_tokens,
)
QUOTAS: Final = SettingKind(
    "`TENANT key=value …` or `TENANT/PROJECT key=value …`, separated by commas (in the file a "
    "list); keys are `weight`, `notice_seconds`, and `gpus`, `cpu_milli`, `memory_mib`, also with "
    "`borrow_` or `lend_` before them",
    _read_quotas,
)
PORT: Final = whole(0, 65535)
LABEL: Final = SettingKind("the name of a Prometheus label", _read_label)
LABELS: Final = SettingKind(
    "names of Prometheus labels, separated by commas (in the file a list)", _read_labels
)

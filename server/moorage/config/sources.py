"""Reads settings from flags, the environment and a TOML file. `config` is the only caller.

ConfigError    a setting is wrong; the error names it, its source and what was expected
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from moorage.backends.registry import BrokenKind, kinds
from moorage.config.kinds import STORAGE, TOKENS, URL
from moorage.setting_kinds import PREFIX, Setting

CONFIG_FILE: Final = "MOORAGE_CONFIG"
"""The variable that names the TOML file if `--config` is not given."""

OTHER_NAMES: Final = frozenset(
    {
        CONFIG_FILE,
        "MOORAGE_POLICY",
        "MOORAGE_URL",
        "MOORAGE_HTTP_URL",
        "MOORAGE_TOKEN",
        "MOORAGE_TOKEN_FILE",
        "MOORAGE_CA_FILE",
        "MOORAGE_CLIENT_CERT",
        "MOORAGE_CLIENT_KEY",
        "MOORAGE_STATE",
        "MOORAGE_AGENT_DATA",
        "MOORAGE_AGENT_ADDRESS",
        "MOORAGE_AGENT_UNHEARD_SECONDS",
        "MOORAGE_POOL_ADDRESS",
        "MOORAGE_CLUSTER_ID",
        "MOORAGE_NODE_ID",
        "MOORAGE_NODES",
        "MOORAGE_ADDRESSES",
        "MOORAGE_RANK",
        "MOORAGE_LEASE_ID",
        "MOORAGE_FENCING",
        "MOORAGE_WORKLOAD",
        "MOORAGE_EXECUTION",
        "MOORAGE_SCALE_POLL_S",
        "MOORAGE_SCALE_ADD_TIMEOUT_S",
        "MOORAGE_SLICE_ACTOR_START_TIMEOUT_S",
        "MOORAGE_HEALTH_CHECK_TIMEOUT_S",
        "MOORAGE_HOST_HEALTH_WAIT_S",
        "MOORAGE_SCALE_RETRY_SLEEP_S",
        "MOORAGE_TASK_CANCEL_TIMEOUT_S",
        "MOORAGE_DRAIN_TIMEOUT_S",
        "MOORAGE_SAFE_GATHER",
        "MOORAGE_MODERATE",
        "MOORAGE_KILL_VFIO",
        "MOORAGE_COORD_PORT",
    }
)
"""Variables of clients, agents, slices and workloads. The daemon ignores them, since it often
shares their environment."""

_LINK: Final = re.compile(
    rf"{PREFIX}(\w+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?|ENV_\w+)"
)
"""Variables that Kubernetes and Docker set for a Service or container named `moorage`."""
_LINKED_PORT: Final = re.compile(rf"{PREFIX}(\w+_)?(PORT|NAME)")
"""Variables that Kubernetes and Docker set, if the value is a URL or two container names."""
_LINKED_VALUE: Final = re.compile(r"(tcp|udp|sctp)://|/[^/]+/[^/]+$")

EXTERNAL_SERVICES: Final[Mapping[str, str]] = {
    "CLUSTER_SERVICE_URL": "cluster_service_url",
    "GLOBAL_CLUSTER_METRICS_URL": "global_cluster_metrics_url",
    "GLOBAL_BLOCK_METRICS_URL": "global_block_metrics_url",
    "SEARCH_SERVER_API_URL": "search_server_api_url",
    "POLICY_DB_URL": "policy_db_url",
    "POLICY_EXECUTOR_HOST_URL": "policy_executor_host_url",
}
"""Variables without our prefix that name external services, each with its setting."""

EXECUTION_NAMES: Final[Mapping[str, str]] = {
    "POLICY_EXECUTION_MODE": "policy_execution_mode",
    "POLICY_SYSTEM_EXECUTOR_ID": "policy_executor_id",
}
"""Variables without our prefix that choose where policies run, each with its setting."""

FILE_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the TOML file; a larger file is certainly something else."""


class ConfigError(Exception):
    """A setting is wrong; the daemon does not start.

    Args:
        setting: The name of the setting.
        source: The source of the value, e.g. `MOORAGE_PORT` or `port in /etc/moorage.toml`.
        expected: The accepted values, and the remedy.
    """

    def __init__(self, setting: str, source: str, expected: str) -> None:
        super().__init__(f"{source}: {expected}")
        self.setting = setting
        self.source = source
        self.expected = expected


Given = dict[str, tuple[str, object]]
"""For each setting: the source of its value, and the value as written there."""


def settings_file(environ: Mapping[str, str], named: Path | None = None) -> Path | None:
    """Return the TOML file: `--config`, else the environment's, else None."""
    return named or (Path(environ[CONFIG_FILE]) if environ.get(CONFIG_FILE) else None)


def from_flags(known: Mapping[str, Setting], overrides: Mapping[str, Any]) -> Given:
    """Return the settings of flags; a value None means that the flag was not given.

    Raises:
        ConfigError: A flag names no setting.
    """
    for name in overrides:
        if name not in known:
            raise ConfigError(name, f"flag {name}", _unknown(name, known))
    return {
        name: (known[name].flag or f"flag {name}", value)
        for name, value in overrides.items()
        if value is not None
    }


def from_environment(known: Mapping[str, Setting], environ: Mapping[str, str]) -> Given:
    """Return the settings of the environment.

    Raises:
        ConfigError: A variable names no setting.
    """
    # Names of existing users first: a `MOORAGE_` variable for the same setting overrides them.
    given: Given = {
        setting: (name, environ[name])
        for name, setting in {**EXTERNAL_SERVICES, **EXECUTION_NAMES}.items()
        if environ.get(name)
    }
    names = {each.environment: each.name for each in known.values()}
    links = service_links(environ)
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_NAMES or not value:
            continue  # An empty variable counts as unset, as it does to a shell and to compose.
        if variable in links:
            continue
        if variable not in names:
            raise ConfigError(variable, variable, _unknown(variable, names))
        given[names[variable]] = (variable, value)
    return given


def service_links(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the variables that a Service or container named `moorage` sets: they are not settings.

    Sources: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    and https://docs.docker.com/engine/network/links/#environment-variables
    """
    return frozenset(
        name
        for name, value in environ.items()
        if _LINK.fullmatch(name) or (_LINKED_PORT.fullmatch(name) and _LINKED_VALUE.match(value))
    )


def from_file(known: Mapping[str, Setting], file: Path) -> Given:
    """Return the settings of a TOML file.

    Raises:
        ConfigError: The file cannot be read, or names an unknown setting.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); name another file with --config"
        raise ConfigError("config", str(file), reason) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError("config", str(file), f"expected at most {FILE_BYTES_MAX} bytes")
    try:
        table = tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        wanted = f"expected a TOML file in UTF-8; byte {error.start} is not"
        raise ConfigError("config", str(file), wanted) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", str(file), f"expected a TOML file: {error}") from error
    for name in table:
        if name not in known:
            raise ConfigError(name, f"{name} in {file}", _unknown(name, known))
    return {name: (f"{name} in {file}", value) for name, value in table.items()}


def _unknown(name: str, known: Iterable[str]) -> str:
    for kind in kinds().values():
        own = name.lower().removeprefix(PREFIX.lower()).startswith(f"{kind.name}_")
        if own and isinstance(kind, BrokenKind):
            return f"the backend {kind.name}, which may have it, cannot be loaded: {kind.reason}"
    (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"there is no such setting; the nearest is {nearest}"


def read(setting: Setting, source: str, value: object) -> object:
    """Return the value of a setting as `Config` holds it.

    Raises:
        ConfigError: The setting does not accept the value.
    """
    kind = setting.kind
    try:
        return kind.read(value)
    except ValueError:
        # A secret is never repeated: errors end up in logs.
        got = "" if kind in {STORAGE, TOKENS, URL} else f", got {value!r}"
        raise ConfigError(setting.name, source, f"expected {kind.expected}{got}") from None


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return the default data folder, which does not depend on the working directory.

    Leases must not vanish because a user restarts the server in another folder.

    Raises:
        ConfigError: The folder would be in the home folder, and this user has none.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if not Path(state).is_absolute():  # The XDG specification ignores relative paths.
        try:
            home = Path(environ.get("HOME") or Path.home())
        except RuntimeError:  # Neither HOME nor an entry in the system's list of users.
            wanted = f"this user has no home folder; name one with --data or {PREFIX}DATA_DIR"
            raise ConfigError("data_dir", "data_dir (default)", wanted) from None
        state = str(home / ".local" / "state")
    return Path(state) / "moored"  # The folder `moorage` beside it belongs to clients.

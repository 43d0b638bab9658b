"""Every setting of the daemon: flag, else environment, else TOML file, else default.

`moored serve` calls `Config.load` once, before anything else, and hands the frozen result to the
daemon; nothing below the daemon reads the environment. A setting is one line of `Config`: its
type, its default, what is accepted, and the sentence that the READMEs and `--help` print.

    ConfigError    a setting is wrong; names it, where it came from and what was expected
"""

import dataclasses
import difflib
import ipaddress
import math
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

PREFIX: Final = "MOORAGE_"
"""A setting's name in the environment is this and its own name in capitals."""

CONFIG_FILE: Final = "MOORAGE_CONFIG"
"""Names the TOML file where `--config` does not."""

OTHER_NAMES: Final = frozenset(
    {CONFIG_FILE, "MOORAGE_URL", "MOORAGE_HTTP_URL", "MOORAGE_TOKEN", "MOORAGE_STATE"}
)
"""No settings: the clients' own names are left alone, since both often share one environment."""

EXTERNAL_SERVICES: Final[Mapping[str, str]] = {
    "CLUSTER_SERVICE_URL": "cluster registry",
    "GLOBAL_CLUSTER_METRICS_URL": "metrics store",
    "SEARCH_SERVER_API_URL": "search",
    "POLICY_DB_URL": "policy store",
}
"""Names that existing users have for services of their own, and what is built in instead."""

FILE_BYTES_MAX: Final = 1 << 20
"""Size of the TOML file; a larger one is refused, since it is certainly something else."""


class ConfigError(Exception):
    """A setting is wrong; the daemon does not start.

    Args:
        setting: Its name.
        source: Where it came from, e.g. `MOORAGE_PORT` or `port in /etc/moorage.toml`.
        expected: What is accepted there, and what to do.

    """

    def __init__(self, setting: str, source: str, expected: str) -> None:
        super().__init__(f"{source}: {expected}")
        self.setting = setting
        self.source = source
        self.expected = expected


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a setting accepts.

    Args:
        expected: In words, for errors and the table.
        read: Turns text, or a value of TOML, into the setting; ValueError refuses it.

    """

    expected: str
    read: Callable[[Any], Any]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # `2.0` is written `2`, and a year in seconds without an exponent.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _whole(low: int, high: int) -> _Kind:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError  # noqa: TRY004  # `read` has one way to refuse, whatever it was.
        number = int(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return _Kind(f"a whole number from {low} to {high}", read)


def _seconds(low: float, high: float) -> _Kind:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError  # noqa: TRY004  # `read` has one way to refuse, whatever it was.
        number = float(value)
        if not math.isfinite(number) or not low <= number <= high:
            raise ValueError
        return number

    return _Kind(f"seconds from {_plain(low)} to {_plain(high)}", read)


def _choice(*names: str) -> _Kind:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return _Kind(" or ".join(f"`{name}`" for name in names), read)


def _read_switch(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _read_host(value: Any) -> str:
    # An empty host would make the system listen on every address, unasked.
    if not isinstance(value, str) or not value or value != value.strip():
        raise ValueError
    return value


def _read_folder(value: Any) -> Path:
    text = str(value) if isinstance(value, str | Path) else ""
    if not text or "\0" in text:
        raise ValueError
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # `~nobody`: there is no such user.
        raise ValueError from error


def _read_tokens(value: Any) -> dict[str, str]:
    """Return token → tenant, from `tenant:token,…` or a table of tenant = token or [tokens]."""
    pairs: list[tuple[str, Any]]
    if isinstance(value, str):
        items = [item.strip().partition(":") for item in value.split(",") if item.strip()]
        pairs = [(tenant, token) for tenant, _, token in items]
    elif isinstance(value, Mapping):
        pairs = [
            (tenant, token)
            for tenant, tokens in value.items()
            for token in (tokens if isinstance(tokens, list) else [tokens])
        ]
    else:
        raise ValueError  # noqa: TRY004  # `read` has one way to refuse, whatever it was.
    tenants: dict[str, str] = {}
    for tenant, token in pairs:
        if not isinstance(token, str) or not tenant or not token or token in tenants:
            raise ValueError
        if any(character.isspace() or character == "," for character in tenant + token):
            raise ValueError
        tenants[token] = tenant
    return tenants


_HOST: Final = _Kind("a host name or an IP address", _read_host)
_FOLDER: Final = _Kind("a folder", _read_folder)
_SWITCH: Final = _Kind("`true` or `false`", _read_switch)
_TOKENS: Final = _Kind(
    '`tenant:token,…` (in the file a table `[tokens]` of `tenant = "token"` or a list of them), '
    "each token for one tenant, without spaces or commas",
    _read_tokens,
)
_PORT: Final = _whole(0, 65535)


Sandbox = Literal["jail", "unsafe"]
Isolation = Literal["per_policy_version", "per_tenant", "per_eval"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What `Config` says of a setting beside its type and its default.

    Args:
        kind: What it accepts.
        about: What it does, for operators.
        flag: Its flag of `moored serve`; empty where it has none.
        default: Its default as an operator would write it.
        name: Its key in the TOML file, and the attribute of `Config`.

    """

    kind: _Kind
    about: str
    flag: str = ""
    default: str = ""
    name: str = ""

    @property
    def environment(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one daemon. Units are the last word of a name."""

    host: Annotated[
        str,
        Setting(
            _HOST,
            "Address of the WebSocket. Any but a loopback address needs `tokens`.",
            flag="--host",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Setting(_PORT, "Port of the WebSocket; 0 takes a free one.", flag="--port")
    ] = 8765
    http_host: Annotated[
        str,
        Setting(_HOST, "Address of the HTTP services, under the same rule.", default="as `host`"),
    ] = ""
    http_port: Annotated[
        int, Setting(_PORT, "Port of the HTTP services; 0 takes a free one.", flag="--http-port")
    ] = 8080
    data_dir: Annotated[
        Path,
        Setting(
            _FOLDER,
            "Folder of the ledger and the catalog; made if missing. One daemon at a time.",
            flag="--data",
            default="`$XDG_STATE_HOME/moored`, else `~/.local/state/moored`",
        ),
    ]
    tokens: Annotated[
        Mapping[str, str],
        Setting(
            _TOKENS,
            "Who may connect, and as which tenant. Where there are none, everybody on this "
            "machine is one tenant.",
            default="none",
        ),
    ] = field(default_factory=dict, repr=False)
    sandbox: Annotated[
        Sandbox,
        Setting(
            _choice(*get_args(Sandbox)),
            "`jail` refuses to start where rules cannot be locked in; `unsafe` runs them as plain "
            "processes: only for rules that you trust as much as the daemon itself.",
            flag="--sandbox",
        ),
    ] = "jail"
    isolation: Annotated[
        Isolation,
        Setting(
            _choice(*get_args(Isolation)),
            "Who shares a rule's process: all tenants, one tenant, or nobody at all.",
        ),
    ] = "per_policy_version"
    policy_deadline_seconds: Annotated[
        float,
        Setting(
            _seconds(0.01, 300), "Time of one evaluation of a rule; then its process is killed."
        ),
    ] = 1.0
    policy_memory_mib: Annotated[
        int,
        Setting(_whole(16, 65536), "What a rule's process may use beyond its start, in MiB."),
    ] = 256
    policy_code_root: Annotated[
        Path | None,
        Setting(
            _FOLDER,
            "Rules registered with a local path as their `code` must lie in this folder; without "
            "it local paths are refused.",
            default="none",
        ),
    ] = None
    candidates_max: Annotated[
        int, Setting(_whole(1, 10_000), "Clusters one request may name or find.")
    ] = 10_000
    sessions_max: Annotated[
        int,
        Setting(_whole(1, 1_000_000), "WebSockets open at once; further ones are turned away."),
    ] = 10_000
    message_bytes_max: Annotated[
        int, Setting(_whole(1024, 1 << 26), "Size of one message on the WebSocket, in bytes.")
    ] = 1 << 20
    deflate: Annotated[
        bool,
        Setting(_SWITCH, "Offer compression on the WebSocket, at about 40 KiB more per session."),
    ] = False
    lease_ttl_seconds_max: Annotated[
        float, Setting(_seconds(1, 31_536_000), "Longest `ttl_seconds` that may be asked for.")
    ] = 86_400.0
    restart_grace_seconds: Annotated[
        float,
        Setting(
            _seconds(0, 86_400),
            "After a restart, leases that ran out meanwhile get this long to be renewed.",
        ),
    ] = 30.0
    checkpoint_every_facts: Annotated[
        int, Setting(_whole(100, 100_000_000), "Facts after which the ledger writes a checkpoint.")
    ] = 20_000
    log_level: Annotated[
        LogLevel, Setting(_choice(*get_args(LogLevel)), "What the log on stderr tells.")
    ] = "info"
    log_format: Annotated[
        LogFormat,
        Setting(_choice(*get_args(LogFormat)), "One JSON object per line, or lines for people."),
    ] = "json"

    @classmethod
    def load(
        cls,
        argv_overrides: Mapping[str, Any],
        environ: Mapping[str, str],
        file: Path | None = None,
    ) -> "Config":
        """Put a configuration together.

        Args:
            argv_overrides: By name of the setting; None means that the flag was not given.
            environ: The process's environment.
            file: TOML file; None takes `MOORAGE_CONFIG`, or no file where that is unset.

        Raises:
            ConfigError: A setting is unknown, malformed, or contradicts another; an external
                service is asked for; or an address beyond loopback has no tokens.

        """
        if file is None and environ.get(CONFIG_FILE):
            file = Path(environ[CONFIG_FILE])
        given = {
            **(_from_file(file) if file is not None else {}),
            **_from_environment(environ),
            **_from_flags(argv_overrides),
        }
        values: dict[str, Any] = {"data_dir": _default_data_dir(environ)}
        for name, (source, value) in given.items():
            values[name] = _read(name, source, value)
        config = cls(**values)
        config = dataclasses.replace(config, http_host=config.http_host or config.host)
        _check_together(config, {name: source for name, (source, _) in given.items()})
        return config


def settings() -> dict[str, Setting]:
    """Return all settings by name, in the order of `Config`."""
    hints = get_type_hints(Config, include_extras=True)
    found: dict[str, Setting] = {}
    for each in dataclasses.fields(Config):
        (setting,) = hints[each.name].__metadata__
        default = setting.default or f"`{_plain(each.default)}`"
        found[each.name] = dataclasses.replace(setting, name=each.name, default=default)
    return found


def settings_markdown() -> str:
    """Return the settings table of the README."""
    rows = ["| Setting | Default | Accepts | What it does |", "|---|---|---|---|"]
    for each in settings().values():
        name = f"`{each.name}`" + (f", `{each.flag}`" if each.flag else "")
        rows.append(f"| {name} | {each.default} | {each.kind.expected} | {each.about} |")
    return "\n".join(rows) + "\n"


def settings_help() -> str:
    """Return the settings as plain lines, for `moored serve --help`."""
    lines = ["\b"]  # Keeps click from filling the lines anew.
    for each in settings().values():
        lines.append(f"{each.environment} [{each.default}]")
        lines += textwrap.wrap(each.about, 72, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines).replace("`", "")


_Given = dict[str, tuple[str, Any]]
"""By setting: where a value came from, and the value as it was written there."""


def _from_flags(overrides: Mapping[str, Any]) -> _Given:
    known = settings()
    for name in overrides:
        if name not in known:
            raise ConfigError(name, f"flag {name}", _unknown(name, known))
    return {
        name: (known[name].flag or f"flag {name}", value)
        for name, value in overrides.items()
        if value is not None
    }


def _from_environment(environ: Mapping[str, str]) -> _Given:
    for name, built_in in EXTERNAL_SERVICES.items():
        if environ.get(name):
            raise ConfigError(
                name,
                name,
                f"external services are not served yet: this release has only the built-in "
                f"{built_in}; unset {name} to use it",
            )
    names = {each.environment: each.name for each in settings().values()}
    given: _Given = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_NAMES or not value:
            continue  # An empty variable counts as unset, as it does to a shell and to compose.
        if variable not in names:
            raise ConfigError(variable, variable, _unknown(variable, names))
        given[names[variable]] = (variable, value)
    return given


def _from_file(file: Path) -> _Given:
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); name another file with --config"
        raise ConfigError("config", str(file), reason) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError("config", str(file), f"expected at most {FILE_BYTES_MAX} bytes")
    try:
        table = tomllib.loads(content.decode())
    except ValueError as error:  # Neither UTF-8 nor TOML.
        raise ConfigError("config", str(file), f"expected a TOML file: {error}") from error
    known = settings()
    for name in table:
        if name not in known:
            raise ConfigError(name, f"{name} in {file}", _unknown(name, known))
    return {name: (f"{name} in {file}", value) for name, value in table.items()}


def _unknown(name: str, known: Iterable[str]) -> str:
    (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"there is no such setting; the nearest is {nearest}"


def _read(name: str, source: str, value: Any) -> Any:
    kind = settings()[name].kind
    try:
        return kind.read(value)
    except ValueError:
        # A secret is never repeated: errors end up in logs.
        got = "" if kind is _TOKENS else f", got {value!r}"
        raise ConfigError(name, source, f"expected {kind.expected}{got}") from None


def _default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return a folder that does not depend on where the daemon is started.

    Leases must not vanish because somebody restarts it from another folder.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if not Path(state).is_absolute():  # The XDG specification ignores relative paths.
        home = environ.get("HOME")
        state = str((Path(home) if home else Path.home()) / ".local" / "state")
    return Path(state) / "moored"  # `moorage` beside it is the clients'.


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`; names but `localhost` count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    """Refuse settings that are fine alone and wrong together."""

    def refuse(setting: str, expected: str) -> None:
        raise ConfigError(setting, sources.get(setting, f"{setting} (default)"), expected)

    for setting, host in (("host", config.host), ("http_host", config.http_host)):
        if not is_loopback(host) and not config.tokens:
            source = setting if setting in sources else "host"
            refuse(
                source,
                f"{host!r} can be reached from other machines, so `tokens` must say who may "
                f"connect: set {PREFIX}TOKENS=tenant:token,… or [tokens] in the file, "
                f"or listen on 127.0.0.1",
            )
    if config.port and (config.host, config.port) == (config.http_host, config.http_port):
        refuse("http_port", f"expected another port than the WebSocket's, {config.port}")

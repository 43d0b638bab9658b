"""All settings of the daemon, from flag, environment, TOML file or default, in this order.

`moored serve` calls `Config.load` first, and passes the frozen result to the daemon; nothing below
the daemon reads the environment. A setting is one line of `Config`: its type, its default, its
kind, and the sentence that the docs and `--help` print. Kinds of backends declare their own
settings.

    ConfigError    a setting is wrong; the error names it, its source and what was expected
"""

import dataclasses
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, cast, get_args

from moorage.backends.registry import BackendKind, kinds
from moorage.config.kinds import (
    HOST,
    HOSTS,
    ISSUER,
    LABEL,
    LABELS,
    NETWORKS,
    ORIGINS,
    PORT,
    QUOTAS,
    RAY,
    REMOTE_TOKEN_CHARS_MIN,
    ROLES,
    STORAGE,
    TOKENS,
    URL,
    WEBSOCKET_URL,
    QuotaSetting,
)
from moorage.config.sources import (
    CONFIG_FILE,
    EXECUTION_NAMES,
    EXTERNAL_SERVICES,
    FILE_BYTES_MAX,
    OTHER_NAMES,
    ConfigError,
    default_data_dir,
    from_environment,
    from_file,
    from_flags,
    read,
    service_links,
    settings_file,
)
from moorage.model import OVERTAKEN_MAX, REQUEUE_PAUSE_SECONDS, REQUEUE_PAUSE_SECONDS_MAX
from moorage.protocol.origins import is_loopback
from moorage.records.fields import DEADLINE_SECONDS_MAX, TTL_SECONDS_MAX
from moorage.records.rights import Role
from moorage.setting_kinds import (
    FILE,
    FOLDER,
    NAME,
    NAMES,
    PREFIX,
    SWITCH,
    Setting,
    choice,
    choices,
    read_settings,
    seconds,
    whole,
)
from moorage.storage.sqlite import TOKENS_FILE, TOKENS_MARK

__all__ = [
    "CONFIG_FILE",
    "EXECUTION_NAMES",
    "EXTERNAL_SERVICES",
    "FILE_BYTES_MAX",
    "OTHER_NAMES",
    "PREFIX",
    "Config",
    "ConfigError",
    "Isolation",
    "LogFormat",
    "LogLevel",
    "Sandbox",
    "Setting",
    "service_links",
    "settings",
    "settings_file",
]

S = TypeVar("S")
Sandbox = Literal["jail", "unsafe"]
Isolation = Literal["per_policy_version", "per_tenant", "per_eval"]
LogLevel = Literal["debug", "info", "warning", "error"]
BACKENDS_BY_DEFAULT: Final = tuple(x.name for x in kinds().values() if x.by_default)
"""Backends that need nothing beyond this machine."""
AMONG_TENANTS: Final = {
    x.name: x.among_tenants for x in kinds().values() if x.among_tenants is not None
}
"""Backends of a server whose tenants do not trust each other, by name, with their settings."""
LogFormat = Literal["auto", "json", "console"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one daemon. The last word of a name is the unit, if there is one."""

    operators: Annotated[
        tuple[str, ...],
        Setting(
            NAMES,
            "Tenants that may see the leases of all tenants, set quotas, cordon and drain, and "
            "change clusters with leases of other tenants.",
            default="none",
        ),
    ] = ()
    quotas: Annotated[
        tuple[QuotaSetting, ...],
        Setting(
            QUOTAS,
            "Quotas of tenants and projects, set at each start; `*` is each tenant without a "
            "quota of its own.",
            default="none",
        ),
    ] = ()
    usage_half_life_seconds: Annotated[
        float,
        Setting(
            seconds(0, 31_536_000),
            "Time after which a tenant's past leases count half as much in fair share; 0: only "
            "present leases count.",
        ),
    ] = 0.0
    overtaken_max: Annotated[
        int,
        Setting(
            whole(1, 1_000_000),
            "How often later requests of the same or a lower priority may overtake a waiter. "
            "After that, the waiter goes before the others of its priority, whatever the fair "
            "shares are.",
        ),
    ] = OVERTAKEN_MAX
    host: Annotated[
        str,
        Setting(
            HOST,
            "Address of the WebSocket. An address other than loopback needs `tokens`, and "
            "`tls_cert` or `insecure_plaintext`.",
            flag="--host",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Setting(PORT, "Port of the WebSocket; 0 takes a free one.", flag="--port")
    ] = 8765
    http_host: Annotated[
        str,
        Setting(
            HOST,
            "Address of the HTTP services, which needs the same settings as `host`.",
            default="as `host`",
        ),
    ] = ""
    http_port: Annotated[
        int, Setting(PORT, "Port of the HTTP services; 0 takes a free one.", flag="--http-port")
    ] = 8080
    tls_cert: Annotated[
        Path | None,
        Setting(
            FILE,
            "PEM file with the certificate of both ports, which then speak `wss` and `https`; read "
            "again when it changes.",
            default="none",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        Setting(
            FILE,
            "PEM file with the private key of `tls_cert`, without a passphrase.",
            default="none",
        ),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Setting(
            FILE,
            "PEM file with the authorities of clients' certificates; if set, clients need a "
            "certificate as well as a token.",
            default="none",
        ),
    ] = None
    insecure_plaintext: Annotated[
        bool,
        Setting(
            SWITCH,
            "Serve addresses other than loopback without TLS, for example behind a proxy with "
            "TLS. Tokens on this network are then readable.",
            flag="--insecure-plaintext",
        ),
    ] = False
    data_dir: Annotated[
        Path,
        Setting(
            FOLDER,
            "Folder of the ledger and the catalog, created if missing. Only one daemon at a time "
            "may use it.",
            flag="--data",
            default="`$XDG_STATE_HOME/moored`, else `~/.local/state/moored`",
        ),
    ]
    storage: Annotated[
        str,
        Setting(
            STORAGE,
            "Database in place of the files for ledger, catalog, tokens and secret. If several "
            "servers use it, one writes and the others stand by. Needs "
            "`pip install '.[postgres]'` in a checkout.",
            default="SQLite files in `data_dir`",
        ),
    ] = field(default="", repr=False)
    advertise_url: Annotated[
        str,
        Setting(
            WEBSOCKET_URL,
            "URL of this server's WebSocket that other servers on the same `storage` give to "
            "clients while this server leads. HTTP is on the same host, at this server's HTTP "
            "port.",
            default="of `host` and `port`",
        ),
    ] = ""
    rollout: Annotated[
        str,
        Setting(
            NAME,
            "Name of the roll-out of this server, such as the hash of a pod's template. A standby "
            "is ready (`/readyz`) if its leader has another name, so that the roll-out continues "
            "and stops the old leader.",
            default="none",
        ),
    ] = ""
    tokens: Annotated[
        Mapping[str, str],
        Setting(
            TOKENS,
            "Tokens of the clients that may connect, by tenant. Without tokens, all programs on "
            "this machine are one tenant.",
            default="none",
        ),
    ] = field(default_factory=dict, repr=False)
    oidc_issuer: Annotated[
        str,
        Setting(
            ISSUER,
            "Issuer of OpenID Connect whose tokens are accepted in addition to `tokens`. Needs "
            "`pip install '.[oidc]'` in a checkout.",
            default="none",
        ),
    ] = ""
    oidc_audience: Annotated[
        str,
        Setting(
            NAME, "Value that a token of the issuer must have in its claim `aud`.", default="none"
        ),
    ] = ""
    oidc_tenant_claim: Annotated[
        str,
        Setting(NAME, "Claim with the tenant; `a.b` also means `b` in the object `a`."),
    ] = "moorage_tenant"
    oidc_role_claim: Annotated[
        str,
        Setting(
            NAME,
            "Claim with a role, or a list of roles, of which the highest counts; `a.b` also means "
            "`b` in the object `a`.",
        ),
    ] = "moorage_role"
    oidc_roles: Annotated[
        Mapping[str, Role],
        Setting(
            ROLES,
            "Roles by the values of `oidc_role_claim`; other values give no role.",
            default="the names of the roles",
        ),
    ] = field(default_factory=dict)
    oidc_client_id: Annotated[
        str,
        Setting(
            NAME,
            "Id of the public client at the issuer with which people sign in; `GET /sign-in` "
            "returns it.",
            default="none",
        ),
    ] = ""
    oidc_scopes: Annotated[
        str, Setting(NAME, "Scopes that the client requests, separated by spaces.")
    ] = "openid offline_access"
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            HOSTS,
            "Accepted host names, in addition to `host`, loopback names and the address that a "
            "request came to. A request with another name may come from a web page.",
            default="none",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting(
            ORIGINS,
            "Other sites whose web pages may send requests, in addition to the daemon's own pages.",
            default="none",
        ),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Setting(
            NETWORKS,
            "Proxies whose header `X-Forwarded-For` names the client, on both ports. Of several "
            "addresses, the last one counts that is not a proxy's of this setting. From all other "
            "senders, the header is ignored.",
            default="none",
        ),
    ] = ()
    console: Annotated[
        bool, Setting(SWITCH, "Serve the web console at `/console` of the HTTP services.")
    ] = True
    console_login_seconds: Annotated[
        float,
        Setting(seconds(1, 2_592_000), "How long a login to the console, and its sockets, last."),
    ] = 28_800.0
    sandbox: Annotated[
        Sandbox,
        Setting(
            choice(*get_args(Sandbox)),
            "`jail` refuses to start if it cannot restrict policies; `unsafe` runs them as plain "
            "processes, which is only for policies that you trust as much as the daemon itself.",
            flag="--sandbox",
        ),
    ] = "jail"
    isolation: Annotated[
        Isolation,
        Setting(
            choice(*get_args(Isolation)),
            "Which evaluations share a process: those of a version, those of a tenant, or none.",
        ),
    ] = "per_policy_version"
    policy_deadline_seconds: Annotated[
        float,
        Setting(
            seconds(0.01, DEADLINE_SECONDS_MAX),
            "Time limit of an evaluation without `deadline_seconds`.",
        ),
    ] = 10.0
    policy_deadline_seconds_max: Annotated[
        float,
        Setting(
            seconds(0.01, DEADLINE_SECONDS_MAX),
            "Longest `deadline_seconds` of a policy or a request.",
        ),
    ] = 60.0
    policy_memory_mib: Annotated[
        int,
        Setting(
            whole(16, 65536),
            "Memory that a policy's process may use in addition to that at its start, in MiB.",
        ),
    ] = 256
    policy_workers: Annotated[
        str,
        Setting(
            RAY,
            "Ray cluster on whose nodes policies are evaluated; without contact to it, this "
            "machine evaluates them. Needs `pip install '.[ray]'` in a checkout, here and on the "
            "nodes.",
            default="none: on this machine",
        ),
    ] = ""
    policy_worker_cells: Annotated[
        int,
        Setting(
            whole(1, 256),
            "Processes of policies on each Ray node, with one reserved processor each; fewer if "
            "the node has too few processors.",
        ),
    ] = 4
    policy_fallback_failures: Annotated[
        int,
        Setting(
            whole(0, 1_000_000),
            "Consecutive failed requests of a version after which its alias falls back to the "
            "last good version; 0: never.",
        ),
    ] = 5
    backends: Annotated[
        tuple[str, ...],
        Setting(
            choices(*kinds()),
            " ".join(
                (
                    "Backends that requests may name in `provision.backend`.",
                    *(x.about for x in kinds().values() if x.about),
                )
            ),
            default="`local,memory`",
        ),
    ] = BACKENDS_BY_DEFAULT
    policy_code_root: Annotated[
        Path | None,
        Setting(
            FOLDER,
            "Folder from which policies may be registered with a local path as their `code`; if "
            "not set, local paths are refused.",
            default="none",
        ),
    ] = None
    policy_code_hosts: Annotated[
        tuple[str, ...],
        Setting(
            HOSTS,
            "Hosts from which policies may be registered with a URL as their `code`; their "
            "addresses may be private.",
            default="all with public addresses only",
        ),
    ] = ()
    allocate_over_http: Annotated[
        bool,
        Setting(
            SWITCH, "Serve `POST /allocate`, which takes over HTTP the request of the WebSocket."
        ),
    ] = True
    candidates_max: Annotated[
        int, Setting(whole(1, 10_000), "Most clusters that one request may name or find.")
    ] = 10_000
    sessions_max: Annotated[
        int, Setting(whole(1, 1_000_000), "Most open WebSockets; further ones are refused.")
    ] = 10_000
    session_resume_seconds: Annotated[
        float, Setting(seconds(0, 3_600), "Time in which a lost session may be resumed; 0: never.")
    ] = 30.0
    message_bytes_max: Annotated[
        int, Setting(whole(1024, 1 << 26), "Largest message on the WebSocket, in bytes.")
    ] = 1 << 20
    deflate: Annotated[
        bool,
        Setting(
            SWITCH,
            "Offer compression on the WebSocket; it takes about 40 KiB of memory per session.",
        ),
    ] = False
    lease_ttl_seconds_max: Annotated[
        float, Setting(seconds(1, TTL_SECONDS_MAX), "Longest `ttl_seconds` of a request.")
    ] = 86_400.0
    keep_warm_seconds_max: Annotated[
        float,
        Setting(
            seconds(0, TTL_SECONDS_MAX),
            "Longest `keep_warm_seconds` of a request; 0 keeps nothing warm.",
        ),
    ] = 3_600.0
    stop_seconds_max: Annotated[
        float,
        Setting(
            seconds(0, 3_600),
            "Longest time between SIGTERM and SIGKILL for a workload, whatever `stop_seconds` or "
            "a manifest says. If the lease gives way, the time is at most its notice.",
        ),
    ] = 120.0
    agent_lost_seconds: Annotated[
        float,
        Setting(
            seconds(1, 86_400),
            "Time without contact after which a machine with an agent is `lost`: it gets no new "
            "leases, and its workloads run on. It must be at least 10 s longer than any agent's "
            "`--unheard-seconds`, after which the agent ends its workloads, so that their leases "
            "move.",
        ),
    ] = 60.0
    restart_grace_seconds: Annotated[
        float,
        Setting(
            seconds(0, 86_400),
            "Extra time after a restart, or after the server stood still for two seconds, for all "
            "that expired in that time: leases, waits, warm workloads and unused reservations.",
        ),
    ] = 30.0
    requeue_pause_seconds: Annotated[
        float,
        Setting(
            seconds(0, REQUEUE_PAUSE_SECONDS_MAX),
            "Pause before the second start of a failed workload; each later pause is twice as "
            f"long, but at most {REQUEUE_PAUSE_SECONDS_MAX:g} s. 0: no pause.",
        ),
    ] = REQUEUE_PAUSE_SECONDS
    checkpoint_every_facts: Annotated[
        int,
        Setting(
            whole(100, 100_000_000), "Number of facts after which the ledger writes a checkpoint."
        ),
    ] = 20_000
    history_days: Annotated[int, Setting(whole(0, 36_500), "Days of history in the ledger.")] = 30
    history_mib_max: Annotated[
        int,
        Setting(
            whole(1, 1 << 24),
            "Largest size of the ledger in MiB; beyond it the oldest history is deleted.",
        ),
    ] = 4096
    tenant_requests_per_second: Annotated[
        int,
        Setting(
            whole(0, 1_000_000),
            "Most messages of one tenant per second, on the WebSocket or over HTTP; 0: no limit.",
        ),
    ] = 0
    tenant_uploads_per_minute: Annotated[
        int,
        Setting(
            whole(0, 100_000), "Most policies that one tenant may publish per minute; 0: no limit."
        ),
    ] = 0
    tenant_evaluation_seconds_per_minute: Annotated[
        int,
        Setting(
            whole(0, 1_000_000),
            "Processor time per minute that policies may use for one tenant, in seconds; beyond "
            "it new requests are refused. 0: no limit.",
        ),
    ] = 0
    tenant_watchers_max: Annotated[
        int, Setting(whole(0, 100_000), "Most sessions of one tenant that may watch; 0: no limit.")
    ] = 0
    audit_days: Annotated[
        int, Setting(whole(0, 36_500), "Days of entries in the audit log; 0: no audit log.")
    ] = 400
    audit_mib_max: Annotated[
        int,
        Setting(
            whole(32, 1 << 24),
            "Largest size of the audit log in MiB; beyond it the oldest entries are deleted.",
        ),
    ] = 1024
    cluster_service_url: Annotated[
        str,
        Setting(
            URL,
            "Cluster registry to mirror instead of keeping clusters here. Also read from "
            "`CLUSTER_SERVICE_URL`.",
            default="none",
        ),
    ] = field(default="", repr=False)
    global_cluster_metrics_url: Annotated[
        str,
        Setting(
            URL,
            "Cluster metrics service to ask instead of keeping metrics here. Also read from "
            "`GLOBAL_CLUSTER_METRICS_URL`.",
            default="none",
        ),
    ] = field(default="", repr=False)
    global_block_metrics_url: Annotated[
        str,
        Setting(
            URL,
            "Block metrics service to ask instead of keeping block metrics here. Also read from "
            "`GLOBAL_BLOCK_METRICS_URL`.",
            default="none",
        ),
    ] = field(default="", repr=False)
    search_server_api_url: Annotated[
        str,
        Setting(
            URL,
            "Search service that answers `filter` and `search`. Also read from "
            "`SEARCH_SERVER_API_URL`.",
            default="none",
        ),
    ] = field(default="", repr=False)
    policy_db_url: Annotated[
        str,
        Setting(
            URL,
            "Policy store to take policies from instead of keeping them here. Also read from "
            "`POLICY_DB_URL`.",
            default="none",
        ),
    ] = field(default="", repr=False)
    policy_execution_mode: Annotated[
        str,
        Setting(
            NAME,
            "Where policies are evaluated: `local` is the sandbox of this server; any other value "
            "means `policy_executor_host_url`. Also read from `POLICY_EXECUTION_MODE`.",
        ),
    ] = "local"
    policy_executor_host_url: Annotated[
        str,
        Setting(
            URL,
            "Server that evaluates policies if `policy_execution_mode` is not `local`. Also read "
            "from "
            "`POLICY_EXECUTOR_HOST_URL`.",
            default="none",
        ),
    ] = field(default="", repr=False)
    policy_executor_id: Annotated[
        str,
        Setting(
            NAME,
            "Id of the executor at `policy_executor_host_url`. Also read from "
            "`POLICY_SYSTEM_EXECUTOR_ID`.",
        ),
    ] = "moorage"
    external_timeout_seconds: Annotated[
        float,
        Setting(
            seconds(0.05, 60),
            "Time limit of one request to an external service, including repetitions.",
        ),
    ] = 5.0
    cluster_refresh_seconds: Annotated[
        float,
        Setting(
            seconds(0.1, 3600),
            "Interval in which an external registry is read; changes are seen within this time.",
        ),
    ] = 30.0
    metrics_fresh_seconds: Annotated[
        float,
        Setting(seconds(0, 3600), "Age at which metrics of an external service are read again."),
    ] = 5.0
    policy_fresh_seconds: Annotated[
        float,
        Setting(seconds(0, 3600), "Age at which policies of an external store are read again."),
    ] = 30.0
    external_stale_seconds_max: Annotated[
        float,
        Setting(
            seconds(0, 86_400),
            "How long known clusters and policies are used, with a warning, while their external "
            "service does not answer.",
        ),
    ] = 300.0
    prometheus_url: Annotated[
        str, Setting(URL, "Prometheus server to take metrics of the fleet from.", default="none")
    ] = field(default="", repr=False)
    prometheus_interval_seconds: Annotated[
        float, Setting(seconds(0.1, 3600), "Pause between two rounds of queries to Prometheus.")
    ] = 30.0
    prometheus_stale_seconds: Annotated[
        float,
        Setting(
            seconds(1, 86_400),
            "Age from which a node's metrics from Prometheus are marked `stale: true`.",
        ),
    ] = 120.0
    prometheus_cluster: Annotated[
        str, Setting(NAME, "Cluster of series that have no label with a cluster.", default="none")
    ] = ""
    prometheus_cluster_label: Annotated[
        str, Setting(LABEL, "Label that holds the id of a series' cluster.")
    ] = "cluster"
    prometheus_node_labels: Annotated[
        tuple[str, ...],
        Setting(LABELS, "Labels that may hold a series' node; the first known node counts."),
    ] = ("node", "Hostname", "nodename", "instance")
    traces: Annotated[
        bool,
        Setting(
            SWITCH,
            "Send spans of requests to the OTLP receiver that `OTEL_EXPORTER_OTLP_ENDPOINT` names, "
            "over HTTP. Needs `pip install '.[otel]'` in a checkout.",
        ),
    ] = False
    log_level: Annotated[
        LogLevel, Setting(choice(*get_args(LogLevel)), "Lowest level of the log on stderr.")
    ] = "info"
    log_format: Annotated[
        LogFormat,
        Setting(
            choice(*get_args(LogFormat)),
            "`json`: one JSON object per line; `console`: lines for people; `auto`: `console` if "
            "stderr is a terminal, else `json`.",
        ),
    ] = "auto"

    of_backends: Mapping[str, Any] = field(
        default_factory=lambda: {name: kind.settings() for name, kind in kinds().items()}
    )
    """The settings of each kind of backend, by the kind's name."""

    def settings_of(self, kind: BackendKind[S]) -> S:
        """Return the settings of a kind of backend."""
        return cast("S", self.of_backends[kind.name])

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Config":
        """Return a configuration of these values, by name, and defaults for all others."""
        own = {name: values[name] for name in read_settings(cls) if name in values}
        return cls(
            **own,
            of_backends={
                name: kind.settings(
                    **{x: values[x] for x in read_settings(kind.settings) if x in values}
                )
                for name, kind in kinds().items()
            },
        )

    def values(self) -> dict[str, Any]:
        """Return all settings by name."""
        found = {name: getattr(self, name) for name in read_settings(Config)}
        for own in self.of_backends.values():
            found |= {name: getattr(own, name) for name in read_settings(type(own))}
        return found

    @classmethod
    def load(
        cls, argv_overrides: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None
    ) -> "Config":
        """Put a configuration together.

        Args:
            argv_overrides: Values of flags, by name of the setting; None: the flag was not given.
            environ: The process's environment.
            file: TOML file; None: the file in `MOORAGE_CONFIG`, or no file if that is unset.

        Raises:
            ConfigError: A setting is unknown, malformed, or contradicts another; an external
                service is this daemon itself; or an address beyond loopback has no tokens.
        """
        file = settings_file(environ, file)
        known = settings()
        given = {
            **(from_file(known, file) if file is not None else {}),
            **from_environment(known, environ),
            **from_flags(known, argv_overrides),
        }
        values: dict[str, Any] = {
            name: read(known[name], source, value) for name, (source, value) in given.items()
        }
        if "data_dir" not in values:
            values["data_dir"] = default_data_dir(environ)
        config = cls.of(values)
        chosen = {**config.values(), "http_host": config.http_host or config.host}
        if "backends" not in given and has_tenants(chosen):
            own = {name: value for each in AMONG_TENANTS.values() for name, value in each.items()}
            config = cls.of({**own, **values, "backends": tuple(AMONG_TENANTS)})
        check_together(chosen, {name: source for name, (source, _) in given.items()})
        return dataclasses.replace(config, http_host=chosen["http_host"])


def settings() -> dict[str, Setting]:
    """Return all settings by name, in the order of `Config`; those of backends after `backends`."""
    found: dict[str, Setting] = {}
    for name, setting in read_settings(Config).items():
        found[name] = setting
        if name == "backends":
            for kind in kinds().values():
                found |= read_settings(kind.settings)
    return found


def has_tenants(chosen: Mapping[str, Any]) -> bool:
    """Return whether callers may distrust each other: tokens exist, or other hosts can connect."""
    local = is_loopback(chosen["host"]) and is_loopback(chosen["http_host"])
    return _has_tokens(chosen) or not local


def _has_tokens(chosen: Mapping[str, Any]) -> bool:
    """Return whether the settings or the data folder have tokens, or an issuer is configured.

    True if the storage is a database, which may have tokens; the server checks it at the start.
    """
    if chosen["tokens"] or chosen["oidc_issuer"] or chosen["storage"]:
        return True
    try:
        return any((chosen["data_dir"] / name).exists() for name in (TOKENS_FILE, TOKENS_MARK))
    except PermissionError:  # The folder of a server that another user runs.
        return True


def check_together(chosen: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other.

    Args:
        chosen: The values of all settings, by name.
        sources: Sources of the values that are not defaults.

    Raises:
        ConfigError: Two settings contradict each other.
    """

    def refuse(setting: str, expected: str) -> NoReturn:
        raise ConfigError(setting, sources.get(setting, f"{setting} (default)"), expected)

    for setting in ("host", "http_host"):
        host = chosen[setting]
        if not is_loopback(host) and not _has_tokens(chosen):
            refuse(
                setting if setting in sources else "host",
                f"{host!r} can be reached from other machines, so `tokens` must say who may "
                f"connect: set {PREFIX}TOKENS=tenant:token,… or [tokens] in the file, "
                f"make named ones with `moored token create`, set `oidc_issuer`, or listen on "
                f"127.0.0.1",
            )
        shortest = min(map(len, chosen["tokens"]), default=REMOTE_TOKEN_CHARS_MIN)
        if not is_loopback(host) and shortest < REMOTE_TOKEN_CHARS_MIN:
            refuse(
                "tokens",
                f"expected tokens of {REMOTE_TOKEN_CHARS_MIN} characters or more, since other "
                f"machines reach {host}; 32 random ones are a good choice",
            )
    _check_issuer(chosen, refuse)
    _check_tls(chosen, sources, refuse)
    http_port = chosen["http_port"]
    for setting in EXTERNAL_SERVICES.values():
        url = urllib.parse.urlsplit(chosen[setting])
        if http_port and url.port == http_port and _is_here(url.hostname or "", chosen):
            refuse(
                setting,
                f"expected another service than this daemon's own HTTP port {http_port}; "
                f"leave it out to use what is built in",
            )
    if chosen["policy_execution_mode"] != "local" and not chosen["policy_executor_host_url"]:
        refuse(
            "policy_execution_mode",
            "expected `local`, or `policy_executor_host_url` to say which server executes policies",
        )
    if chosen["prometheus_url"] and chosen["global_cluster_metrics_url"]:
        refuse("prometheus_url", "expected one source of metrics: omit the metrics service")
    addresses = [(chosen["host"], chosen["port"]), (chosen["http_host"], http_port)]
    if chosen["port"] and addresses[0] == addresses[1]:
        refuse("http_port", f"expected another port than the WebSocket's, {chosen['port']}")


def _check_tls(
    chosen: Mapping[str, Any], sources: Mapping[str, str], refuse: Callable[[str, str], NoReturn]
) -> None:
    if (chosen["tls_cert"] is None) != (chosen["tls_key"] is None):
        missing = "tls_key" if chosen["tls_key"] is None else "tls_cert"
        refuse(missing, "expected both `tls_cert` and `tls_key`, or neither")
    if chosen["tls_client_ca"] is not None and chosen["tls_cert"] is None:
        refuse(
            "tls_client_ca",
            "expected `tls_cert` and `tls_key` as well: without them there is no TLS",
        )
    for setting in ("host", "http_host"):
        host = chosen[setting]
        if not (is_loopback(host) or chosen["tls_cert"] or chosen["insecure_plaintext"]):
            refuse(
                setting if setting in sources else "host",
                f"tokens and leases could be read on the way to {host!r}: set `tls_cert` and "
                f"`tls_key`, listen on 127.0.0.1 behind a proxy with TLS, or accept it with "
                f"--insecure-plaintext ({PREFIX}INSECURE_PLAINTEXT=true)",
            )


def _check_issuer(chosen: Mapping[str, Any], refuse: Callable[[str, str], NoReturn]) -> None:
    if chosen["oidc_issuer"] and not chosen["oidc_audience"]:
        refuse("oidc_audience", "expected the claim `aud` of the issuer's tokens for this server")
    for setting in ("oidc_audience", "oidc_client_id", "oidc_roles"):
        if chosen[setting] and not chosen["oidc_issuer"]:
            refuse(setting, "expected `oidc_issuer` as well: without it no token has claims")


def _is_here(host: str, chosen: Mapping[str, Any]) -> bool:
    return host == chosen["http_host"] or (is_loopback(host) and is_loopback(chosen["http_host"]))

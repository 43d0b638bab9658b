"""Which settings are fine alone and wrong together; `settings` asks once all are read."""

import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from moorage.config.kinds import REMOTE_TOKEN_CHARS_MIN
from moorage.config.sources import EXTERNAL_SERVICES, ConfigError
from moorage.protocol.origins import is_loopback
from moorage.setting_kinds import PREFIX
from moorage.storage.sqlite import TOKENS_FILE


def has_tenants(chosen: Mapping[str, Any]) -> bool:
    """Return whether callers may be strangers to one another and to this machine."""
    local = is_loopback(chosen["host"]) and is_loopback(chosen["http_host"])
    return _has_tokens(chosen) or not local


def _has_tokens(chosen: Mapping[str, Any]) -> bool:
    """Return whether there are tokens in the settings or the data folder, or an issuer of them.

    Those in a database may be there: the start looks.
    """
    named = chosen["data_dir"] / TOKENS_FILE
    return bool(chosen["tokens"] or chosen["oidc_issuer"] or chosen["storage"]) or named.exists()


def check_together(chosen: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other.

    Args:
        chosen: All settings, by name.
        sources: Where those that were given came from.

    Raises:
        ConfigError: Two of them do.
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
        refuse("prometheus_url", "expected one place for metrics: leave out the metrics service")
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
        refuse("tls_client_ca", "expected `tls_cert` and `tls_key`, too: without, there is no TLS")
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
        refuse("oidc_audience", "expected what the issuer's tokens for this server have as `aud`")
    for setting in ("oidc_audience", "oidc_client_id", "oidc_roles"):
        if chosen[setting] and not chosen["oidc_issuer"]:
            refuse(setting, "expected `oidc_issuer`, too: without, no token has claims")


def _is_here(host: str, chosen: Mapping[str, Any]) -> bool:
    return host == chosen["http_host"] or (is_loopback(host) and is_loopback(chosen["http_host"]))

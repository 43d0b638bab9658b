"""Tests of the configuration from flags, environment, file and defaults, and of its errors."""

import dataclasses
import json
import pwd
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from moorage.backends.registry import kinds
from moorage.commands.agent import agent
from moorage.config.described import settings_help, settings_markdown
from moorage.config.settings import (
    EXTERNAL_SERVICES,
    FILE_BYTES_MAX,
    PREFIX,
    Config,
    ConfigError,
    service_links,
    settings,
)
from moorage.config.sources import OTHER_NAMES
from moorage.model import Amounts, Quota
from moorage.protocol.origins import is_loopback
from moorage.records.rights import RESERVED_TENANTS, Role

HOME = {"HOME": "/home/ann"}
PAGES = ("https://a.b", "http://c:1")
NETWORKS = ("10.0.0.0/8", "::1/128")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(
    overrides: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config.load(overrides or {}, HOME | (environ or {}), file)
    return caught.value


def test_defaults_are_as_documented() -> None:
    config = Config.load({}, HOME)
    assert (config.host, config.port) == ("127.0.0.1", 8765)
    assert (config.http_host, config.http_port) == ("127.0.0.1", 8080)
    assert config.sandbox == "jail"
    assert config.data_dir == Path("/home/ann/.local/state/moored")


def test_the_server_needs_a_home_only_if_no_data_folder_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Config.load({"data_dir": tmp_path}, {}).data_dir == tmp_path
    assert Config.load({}, {"MOORAGE_DATA_DIR": str(tmp_path)}).data_dir == tmp_path
    assert Config.load({}, {"XDG_STATE_HOME": str(tmp_path)}).data_dir == tmp_path / "moored"
    with pytest.raises(ConfigError, match=r"no home folder; name one with --data"):
        Config.load({}, {})


def test_the_password_of_a_database_is_not_shown() -> None:
    error = refusal(environ={"MOORAGE_STORAGE": "mysql://m:hunter2@h/d"})
    assert error.setting == "storage"
    assert "hunter2" not in str(error)
    config = Config.load({}, HOME | {"MOORAGE_STORAGE": "postgresql://m:hunter2@h/d"})
    assert "hunter2" not in repr(config)


def test_flags_override_the_environment_which_overrides_the_file_which_overrides_defaults(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "moored.toml", "port = 1001\nhttp_port = 1002\nsessions_max = 1003\n")
    environ = HOME | {"MOORAGE_PORT": "2001", "MOORAGE_HTTP_PORT": "2002"}
    config = Config.load({"port": 3001, "http_port": None}, environ, file)
    assert (config.port, config.http_port, config.sessions_max) == (3001, 2002, 1003)
    assert config.message_bytes_max == 1 << 20


def test_the_settings_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "moored.toml"
    file.write_text("port = 1001\n", encoding="utf-8-sig")
    assert Config.load({}, HOME, file).port == 1001


def test_the_environment_can_name_the_settings_file_and_a_flag_overrides_the_name(
    tmp_path: Path,
) -> None:
    named = write(tmp_path / "named.toml", "port = 1\n")
    other = write(tmp_path / "other.toml", "port = 2\n")
    environ = HOME | {"MOORAGE_CONFIG": str(named)}
    assert Config.load({}, environ).port == 1
    assert Config.load({}, environ, other).port == 2


def test_each_setting_can_be_given_by_flag_and_environment_and_file(tmp_path: Path) -> None:
    """Each setting is given as text and as a TOML value."""
    quota = Quota(2.0, Amounts(gpu_milli=1500), Amounts(), Amounts(cpu_milli=7), 9.0)
    said = "ann/one weight=2 gpus=1.5 lend_cpu_milli=7 notice_seconds=9, * gpus=0"
    quotas = ("ann", "one", quota), ("*", None, Quota(nominal=Amounts(gpu_milli=0)))
    written: dict[str, tuple[str, str, Any]] = {
        "operators": ("ann,bob", '["ann", "bob"]', ("ann", "bob")),
        "quotas": (said, json.dumps(said.split(", ")), quotas),
        "usage_half_life_seconds": ("60", "60", 60.0),
        "overtaken_max": ("7", "7", 7),
        "host": ("::1", '"::1"', "::1"),
        "port": ("1", "1", 1),
        "http_host": ("localhost", '"localhost"', "localhost"),
        "http_port": ("2", "2", 2),
        "tls_cert": ("/t/c.pem", '"/t/c.pem"', Path("/t/c.pem")),
        "tls_key": ("/t/k.pem", '"/t/k.pem"', Path("/t/k.pem")),
        "tls_client_ca": ("/t/a.pem", '"/t/a.pem"', Path("/t/a.pem")),
        "insecure_plaintext": ("true", "true", True),
        "data_dir": ("/srv/m", '"/srv/m"', Path("/srv/m")),
        "storage": ("postgresql://m@h/d", '"postgresql://m@h/d"', "postgresql://m@h/d"),
        "advertise_url": ("wss://a:1", '"wss://a:1"', "wss://a:1"),
        "rollout": ("5d8f", '"5d8f"', "5d8f"),
        "tokens": ("ann:k1,bob:k2", '{ann = "k1", bob = ["k2"]}', {"k1": "ann", "k2": "bob"}),
        "oidc_issuer": ("https://i/r/", '"https://i/r/"', "https://i/r/"),
        "oidc_audience": ("moorage", '"moorage"', "moorage"),
        "oidc_tenant_claim": ("team", '"team"', "team"),
        "oidc_role_claim": ("a.roles", '"a.roles"', "a.roles"),
        "oidc_roles": ("x=y=admin", '{"x=y" = "admin"}', {"x=y": Role.ADMIN}),
        "oidc_client_id": ("cli", '"cli"', "cli"),
        "oidc_scopes": ("openid x", '"openid x"', "openid x"),
        "allowed_hosts": ("moored,GPU.lan", '["moored", "GPU.lan"]', ("moored", "gpu.lan")),
        "allowed_origins": ("https://a.b, http://c:1", '["https://a.b", "http://c:1"]', PAGES),
        "trusted_proxies": ("10.0.0.0/8, ::1", '["10.0.0.0/8", "::1"]', NETWORKS),
        "console": ("false", "false", False),
        "console_login_seconds": ("60", "60", 60.0),
        "sandbox": ("unsafe", '"unsafe"', "unsafe"),
        "isolation": ("per_eval", '"per_eval"', "per_eval"),
        "policy_deadline_seconds": ("0.5", "0.5", 0.5),
        "policy_deadline_seconds_max": ("90", "90", 90.0),
        "policy_memory_mib": ("64", "64", 64),
        "policy_workers": ("ray://r:10001", '"ray://r:10001"', "ray://r:10001"),
        "policy_worker_cells": ("8", "8", 8),
        "policy_fallback_failures": ("6", "6", 6),
        "backends": ("local", '["local"]', ("local",)),
        "local_here": ("false", "false", False),
        "local_nodes": ("a1, a2", '["a1", "a2"]', ("a1", "a2")),
        "local_address": ("10.0.0.5", '"10.0.0.5"', "10.0.0.5"),
        "aws_instance_profiles": ("one,two", '["one", "two"]', ("one", "two")),
        "aws_security_groups": ("sg-1", '["sg-1"]', ("sg-1",)),
        "kubernetes_clusters": ("a,b=c", '{a = "a", b = "c"}', {"a": "a", "b": "c"}),
        "kubernetes_config": ("/srv/kube", '"/srv/kube"', Path("/srv/kube")),
        "kubernetes_namespace": ("gpu-{tenant}", '"gpu-{tenant}"', "gpu-{tenant}"),
        "ray_address": ("ray://h:10001", '"ray://h:10001"', "ray://h:10001"),
        "ray_cluster": ("rays", '"rays"', "rays"),
        "ray_autoscale": ("true", "true", True),
        "policy_code_root": ("/srv/rules", '"/srv/rules"', Path("/srv/rules")),
        "policy_code_hosts": ("Git.lan,::1", '["git.lan", "::1"]', ("git.lan", "::1")),
        "allocate_over_http": ("false", "false", False),
        "candidates_max": ("3", "3", 3),
        "sessions_max": ("4", "4", 4),
        "session_resume_seconds": ("20", "20", 20.0),
        "message_bytes_max": ("4096", "4096", 4096),
        "deflate": ("true", "true", True),
        "lease_ttl_seconds_max": ("61", "61.0", 61.0),
        "keep_warm_seconds_max": ("62", "62.0", 62.0),
        "stop_seconds_max": ("45", "45", 45.0),
        "agent_lost_seconds": ("46", "46", 46.0),
        "restart_grace_seconds": ("0", "0", 0.0),
        "requeue_pause_seconds": ("0.25", "0.25", 0.25),
        "checkpoint_every_facts": ("100", "100", 100),
        "history_days": ("7", "7", 7),
        "history_mib_max": ("65", "65", 65),
        "tenant_requests_per_second": ("67", "67", 67),
        "tenant_uploads_per_minute": ("68", "68", 68),
        "tenant_evaluation_seconds_per_minute": ("70", "70", 70),
        "tenant_watchers_max": ("69", "69", 69),
        "audit_days": ("66", "66", 66),
        "audit_mib_max": ("67", "67", 67),
        "cluster_service_url": ("http://r", '"http://r"', "http://r"),
        "global_cluster_metrics_url": ("http://m:1", '"http://m:1/"', "http://m:1"),
        "global_block_metrics_url": ("http://m:2", '"http://m:2/"', "http://m:2"),
        "search_server_api_url": ("https://s/api", '"https://s/api"', "https://s/api"),
        "policy_db_url": ("http://bearer:k@p", '"http://bearer:k@p"', "http://bearer:k@p"),
        "policy_execution_mode": ("central", '"central"', "central"),
        "policy_executor_host_url": ("http://x:1", '"http://x:1"', "http://x:1"),
        "policy_executor_id": ("e1", '"e1"', "e1"),
        "external_timeout_seconds": ("1.5", "1.5", 1.5),
        "cluster_refresh_seconds": ("7", "7", 7.0),
        "metrics_fresh_seconds": ("0", "0", 0.0),
        "policy_fresh_seconds": ("8", "8", 8.0),
        "external_stale_seconds_max": ("9", "9", 9.0),
        "prometheus_url": ("http://p:9090", '"http://p:9090"', "http://p:9090"),
        "prometheus_interval_seconds": ("15", "15", 15.0),
        "prometheus_stale_seconds": ("60", "60", 60.0),
        "prometheus_cluster": ("lab", '"lab"', "lab"),
        "prometheus_cluster_label": ("site", '"site"', "site"),
        "prometheus_node_labels": ("node,host", '["node", "host"]', ("node", "host")),
        "traces": ("true", "true", True),
        "log_level": ("debug", '"debug"', "debug"),
        "log_format": ("console", '"console"', "console"),
    }
    assert list(written) == list(settings())
    for other in ("prometheus_url", "global_cluster_metrics_url"):  # Metrics have one source.
        given = {name: ways for name, ways in written.items() if name != other}
        toml = "".join(f"{name} = {value}\n" for name, (_, value, _) in given.items())
        expected = Config.of({name: value for name, (_, _, value) in given.items()})
        environ = {settings()[name].environment: text for name, (text, _, _) in given.items()}
        assert Config.load({}, HOME, write(tmp_path / "moored.toml", toml)) == expected
        assert Config.load({}, HOME | environ) == expected
        assert Config.load({name: text for name, (text, _, _) in given.items()}, HOME) == expected


def test_a_second_source_of_metrics_is_refused() -> None:
    both = {"MOORAGE_PROMETHEUS_URL": "http://p", "GLOBAL_CLUSTER_METRICS_URL": "http://m"}
    assert refusal(environ=both).setting == "prometheus_url"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("host", " 127.0.0.1"),
        ("port", "-1"),
        ("oidc_issuer", "http://login.example"),
        ("oidc_issuer", "https://a:b@login.example"),
        ("oidc_issuer", "login.example"),
        ("oidc_roles", "staff=king"),
        ("oidc_roles", "admin"),
        ("oidc_roles", "a=admin,a=client"),
        ("allowed_hosts", "moored:8080"),
        ("allowed_hosts", "http://moored"),
        ("allowed_hosts", "*"),
        ("allowed_origins", "console.example"),
        ("allowed_origins", "https://console.example/"),
        ("allowed_origins", "null"),
        ("allowed_origins", "*"),
        ("trusted_proxies", "proxy.example"),
        ("trusted_proxies", "10.0.0.1/8"),
        ("trusted_proxies", "10.0.0.1:80"),
        ("trusted_proxies", "10.0.0.0/33"),
        ("trusted_proxies", "*"),
        ("port", "65536"),
        ("port", "80.5"),
        ("port", "http"),
        ("port", "9" * 5000),
        ("sandbox", "none"),
        ("isolation", "per_policy"),
        ("policy_deadline_seconds", "0"),
        ("policy_deadline_seconds", "nan"),
        ("policy_deadline_seconds", "inf"),
        ("policy_deadline_seconds", "2s"),
        ("policy_code_root", "~nobody-of-that-name/rules"),
        ("deflate", "yes"),
        ("prometheus_cluster", " lab"),
        ("prometheus_cluster_label", "a-b"),
        ("prometheus_node_labels", "node,,host"),
        ("log_level", "verbose"),
    ],
)
def test_the_error_about_a_malformed_value_names_setting_and_source_and_expected_value(
    name: str, text: str
) -> None:
    setting = settings()[name]
    error = refusal(environ={setting.environment: text})
    assert error.setting == name
    assert str(error).startswith(f"{setting.environment}: expected {setting.kind.expected}, got ")
    assert text in str(error)


@pytest.mark.parametrize(
    "line",
    [
        "port = true",
        "port = 80.0",
        "port = [80]",
        "policy_deadline_seconds = true",
        "policy_deadline_seconds = {}",
        "host = ''",
        "host = 127",
        "data_dir = 7",
        'data_dir = "a\\u0000b"',
        "deflate = 1",
        "log_level = []",
        "tokens = 5",
    ],
)
def test_values_in_the_settings_file_must_have_the_right_types(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "moored.toml", line + "\n")
    error = refusal(file=file)
    assert error.setting == line.partition(" ")[0]
    assert error.source == f"{error.setting} in {file}"


LINKS = {
    "MOORAGE_SERVICE_HOST": "10.96.12.7",
    "MOORAGE_SERVICE_PORT": "8765",
    "MOORAGE_SERVICE_PORT_HTTP": "8080",
    "MOORAGE_PORT": "tcp://10.96.12.7:8765",
    "MOORAGE_PORT_8765_TCP": "tcp://10.96.12.7:8765",
    "MOORAGE_PORT_8765_TCP_PROTO": "tcp",
    "MOORAGE_PORT_8765_TCP_PORT": "8765",
    "MOORAGE_PORT_8765_TCP_ADDR": "10.96.12.7",
    "MOORAGE_HTTP_SERVICE_HOST": "10.96.12.8",
    "MOORAGE_HTTP_PORT": "tcp://10.96.12.8:8080",
    "MOORAGE_DNS_1_PORT": "udp://[fd00::7]:53",
    "MOORAGE_DNS_1_PORT_53_UDP_ADDR": "fd00::7",
    "MOORAGE_NAME": "/web2/moorage",
    "MOORAGE_ENV_PATH": "/usr/bin",
}
"""Variables that Kubernetes sets in pods beside Services moorage, moorage-http and moorage-dns-1,
and that Docker sets in a container with a link to a container `moorage`."""


def test_service_variables_of_kubernetes_are_not_settings() -> None:
    config = Config.load({}, HOME | LINKS)
    assert (config.port, config.http_port) == (8765, 8080)
    assert service_links(HOME | LINKS) == set(LINKS)
    assert Config.load({}, HOME | LINKS | {"MOORAGE_PORT": "1"}).port == 1
    for wrong in ("MOORAGE_SERVICE_HOTS", "MOORAGE_PORTS", "MOORAGE_PORT_TCP", "MOORAGE_HOST_X"):
        assert "no such setting" in str(refusal(environ=LINKS | {wrong: "10.96.12.7"}))
    assert refusal(environ={"MOORAGE_PORT": "http://10.96.12.7"}).setting == "port"


@pytest.mark.parametrize("name", sorted(RESERVED_TENANTS))
def test_a_token_may_not_name_a_tenant_of_the_server_itself(name: str, tmp_path: Path) -> None:
    assert "(server)" in RESERVED_TENANTS
    error = refusal(environ={"MOORAGE_TOKENS": f"ann:secret12,{name}:secret34"})
    assert f"`{name}`" in str(error)
    file = write(tmp_path / "moored.toml", f'[tokens]\n"{name}" = ["secret34"]\n')
    assert "of the server itself" in str(refusal(file=file))


@pytest.mark.parametrize(
    "quoted",
    ['"ann:secret"', "'ann:secret,bob:secrets'", "ann:'secret'", '"ann":"secret"', 'a:b2,"c":d2'],
)
def test_quotes_around_tokens_are_refused(quoted: str) -> None:
    error = refusal(environ={"MOORAGE_TOKENS": quoted})
    assert "without quotes around them" in str(error)
    assert "secret" not in str(error)


def test_a_token_may_contain_quotes() -> None:
    config = Config.load({}, HOME | {"MOORAGE_TOKENS": "ann:'se\"cret"})
    assert config.tokens == {"'se\"cret": "ann"}


def test_the_refusal_of_an_unknown_setting_suggests_the_nearest_name(tmp_path: Path) -> None:
    file = write(tmp_path / "moored.toml", "prot = 1\n")
    assert str(refusal(file=file)).endswith("there is no such setting; the nearest is port")
    assert "the nearest is MOORAGE_TOKENS" in str(refusal(environ={"MOORAGE_TOKNES": "a:b"}))
    assert "the nearest is sandbox" in str(refusal({"sandbx": "jail"}))


def test_variables_of_the_clients_and_empty_variables_are_not_settings() -> None:
    client = {"MOORAGE_URL": "ws://x", "MOORAGE_HTTP_URL": "http://x", "MOORAGE_TOKEN": "k"}
    client |= {"MOORAGE_STATE": "/x"}
    empty = {"MOORAGE_PORT": "", "MOORAGE_CONFIG": "", "POLICY_DB_URL": ""}
    assert Config.load({}, HOME | client | empty) == Config.load({}, HOME)


@pytest.mark.parametrize(("name", "setting"), EXTERNAL_SERVICES.items())
def test_an_external_service_is_set_by_its_old_or_its_new_name(name: str, setting: str) -> None:
    old = {name: "http://db:3000/"}
    assert getattr(Config.load({}, HOME | old), setting) == "http://db:3000"
    both = old | {PREFIX + setting.upper(): "https://u:secret@new/base"}
    config = Config.load({}, HOME | both)
    assert getattr(config, setting) == "https://u:secret@new/base"
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    "url",
    [
        "db:3000",
        "ftp://u:secret@db",
        "http://",
        "http://db:port",
        "http://u:secret@db?q",
        "http://d b",
    ],
)
def test_an_invalid_service_url_is_refused_and_not_quoted(url: str) -> None:
    error = refusal(environ={"POLICY_DB_URL": url})
    assert str(error).startswith("POLICY_DB_URL: expected an http or https URL")
    assert "secret" not in str(error)


def test_a_daemon_cannot_be_its_own_external_service() -> None:
    for host in ("localhost", "127.0.0.1", "[::1]"):
        error = refusal(environ={"CLUSTER_SERVICE_URL": f"http://{host}:8080"})
        assert "this daemon's own HTTP port 8080" in str(error)
    Config.load({}, HOME | {"CLUSTER_SERVICE_URL": "http://elsewhere:8080"})


def test_missing_or_too_large_or_malformed_settings_files_are_refused(tmp_path: Path) -> None:
    assert "cannot be read (No such file" in str(refusal(file=tmp_path / "none.toml"))
    assert "cannot be read (Is a directory" in str(refusal(file=tmp_path))
    assert "expected a TOML file" in str(refusal(file=write(tmp_path / "bad", "port 1")))
    (tmp_path / "latin").write_bytes(b"host = '\xff'")
    assert "expected a TOML file" in str(refusal(file=tmp_path / "latin"))
    large = write(tmp_path / "large", "#" * (FILE_BYTES_MAX + 1))
    assert f"expected at most {FILE_BYTES_MAX} bytes" in str(refusal(file=large))


@pytest.mark.parametrize(
    "text", ["ann", "ann:", ":k1", "ann:k 1", "a nn:k1", "ann:k1,bob:k1", "ann:k1,bob", "ann:k"]
)
def test_malformed_tokens_are_refused_and_not_repeated(text: str) -> None:
    error = refusal(environ={"MOORAGE_TOKENS": text})
    assert error.setting == "tokens"
    assert "k1" not in str(error)
    assert "2 characters or more (8 where other machines reach it)" in str(error)


@pytest.mark.parametrize("setting", ["host", "http_host"])
def test_a_short_token_is_refused_if_other_machines_can_guess_it(setting: str) -> None:
    environ = {
        f"MOORAGE_{setting.upper()}": "10.0.0.1",
        "MOORAGE_TOKENS": "ann:k1234567,bob:k123456",
    }
    error = refusal(environ=environ)
    assert (error.setting, "k12" in str(error)) == ("tokens", False)
    assert "8 characters or more" in error.expected


def test_a_tenant_may_have_two_tokens_and_no_output_shows_them(tmp_path: Path) -> None:
    file = write(tmp_path / "moored.toml", '[tokens]\nann = ["old", "s3cret"]\n')
    config = Config.load({}, HOME, file)
    assert config.tokens == {"old": "ann", "s3cret": "ann"}
    assert "s3cret" not in repr(config)


def test_beyond_loopback_an_issuer_replaces_tokens_and_needs_an_audience() -> None:
    given = {"MOORAGE_OIDC_ISSUER": "https://i", "MOORAGE_HOST": "10.0.0.1"}
    plain = {"MOORAGE_INSECURE_PLAINTEXT": "true"}
    config = Config.load({}, HOME | given | plain | {"MOORAGE_OIDC_AUDIENCE": "moorage"})
    assert not config.values()["local_here"]
    assert refusal(environ=given).setting == "oidc_audience"
    for name in ("oidc_audience", "oidc_client_id"):
        error = refusal(environ={f"MOORAGE_{name.upper()}": "x"})
        assert (error.setting, "oidc_issuer" in str(error)) == (name, True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "moorage.example", "128.0.0.1"])  # noqa: S104  # The test refuses these addresses.
def test_a_server_beyond_loopback_does_not_start_without_tokens(host: str) -> None:
    error = refusal({"host": host})
    assert error.setting == "host"
    assert error.source == "--host"
    assert "MOORAGE_TOKENS" in error.expected
    assert refusal(environ={"MOORAGE_HTTP_HOST": host}).setting == "http_host"
    tokens = HOME | {"MOORAGE_TOKENS": "ann:k1234567"}
    error = refusal({"host": host}, environ=tokens)
    assert (error.setting, "--insecure-plaintext" in error.expected) == ("host", True)
    allowed = Config.load({"host": host, "insecure_plaintext": True}, tokens)
    assert (allowed.host, allowed.http_host) == (host, host)
    tls = {"MOORAGE_TLS_CERT": "/c.pem", "MOORAGE_TLS_KEY": "/k.pem"}
    assert not Config.load({"host": host}, tokens | tls).insecure_plaintext


def test_with_several_tenants_the_backend_local_starts_only_on_agents(tmp_path: Path) -> None:
    def found(config: Config) -> tuple[tuple[str, ...], bool]:
        return config.backends, config.values()["local_here"]

    both = ("local", "memory")
    tokens = HOME | {"MOORAGE_TOKENS": "ann:k1234567", "MOORAGE_INSECURE_PLAINTEXT": "true"}
    assert found(Config.load({}, HOME)) == (both, True)
    assert found(Config.load({}, tokens)) == (both, False)
    assert found(Config.load({"host": "10.0.0.1"}, tokens)) == (both, False)
    here = tokens | {"MOORAGE_LOCAL_HERE": "true"}
    assert found(Config.load({"host": "10.0.0.1"}, here)) == (both, True)
    named = tokens | {"MOORAGE_BACKENDS": "local"}
    assert found(Config.load({"host": "10.0.0.1"}, named)) == (("local",), True)
    file = write(tmp_path / "moored.toml", 'backends = ["local", "aws"]\n[tokens]\nann = "k1"\n')
    assert found(Config.load({}, HOME, file)) == (("local", "aws"), True)


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "localhost.example", "[::1]")))  # noqa: S104  # As above.


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert refusal({"port": 8080}).setting == "http_port"
    assert Config.load({"port": 0, "http_port": 0}, HOME).port == 0


def test_the_data_folder_does_not_depend_on_the_working_folder() -> None:
    assert Config.load({}, {"XDG_STATE_HOME": "/state"}).data_dir == Path("/state/moored")
    relative = HOME | {"XDG_STATE_HOME": "state"}
    assert Config.load({}, relative).data_dir == Path("/home/ann/.local/state/moored")
    assert Config.load({"data_dir": "here"}, HOME).data_dir == Path.cwd() / "here"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.load({}, HOME).port = 1  # type: ignore[misc]  # That it cannot is the test.


def test_the_table_of_settings_and_the_help_name_every_setting() -> None:
    table, text = settings_markdown(), settings_help()
    for name, setting in settings().items():
        assert f"| `{name}`" in table
        assert setting.environment in text
        assert setting.about
    assert len(table.splitlines()) == len(settings()) + 2


def test_remote_execution_of_policies_needs_the_url_of_a_server() -> None:
    error = refusal(environ={"POLICY_EXECUTION_MODE": "central"})
    assert "policy_executor_host_url" in str(error)
    elsewhere = {"POLICY_EXECUTION_MODE": "central", "POLICY_EXECUTOR_HOST_URL": "http://x:10000"}
    config = Config.load({}, HOME | elsewhere | {"POLICY_SYSTEM_EXECUTOR_ID": "e1"})
    assert (config.policy_execution_mode, config.policy_executor_id) == ("central", "e1")


@pytest.mark.parametrize(
    ("given", "clusters"),
    [
        ("west", {"west": "west"}),
        (
            "west,east=arn:aws:eks:eu:1:cluster/x",
            {"west": "west", "east": "arn:aws:eks:eu:1:cluster/x"},
        ),
        ("here=in-cluster", {"here": "in-cluster"}),
        ("", {}),
    ],
)
def test_kubernetes_clusters_are_contexts_with_an_id(given: str, clusters: dict[str, str]) -> None:
    config = Config.load({}, HOME | {"MOORAGE_KUBERNETES_CLUSTERS": given})
    assert config.settings_of(kinds()["kubernetes"]).kubernetes_clusters == clusters


@pytest.mark.parametrize("given", ["a/b", "=ctx", "a=", "a,a=b", "query"])
def test_an_invalid_cluster_id_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="CLUSTER_ID=CONTEXT"):
        Config.load({}, HOME | {"MOORAGE_KUBERNETES_CLUSTERS": given})


def test_variables_of_an_agent_are_not_settings() -> None:
    """An agent loads a configuration, too."""
    names = {each.envvar for each in get_command(agent).params if isinstance(each.envvar, str)}
    assert "MOORAGE_AGENT_DATA" in names
    assert names <= OTHER_NAMES

"""`moored doctor`: whether the other services that the settings name answer."""

import os
import socket
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from moorage.config.settings import Config
from moorage.protocol.origins import authority_of
from moorage.records.findings import DoctorFinding

ANSWER_SECONDS_MAX: Final = 3.0
"""Seconds for a service to accept a connection."""
_URLS: Final = (
    "cluster_service_url",
    "global_cluster_metrics_url",
    "global_block_metrics_url",
    "search_server_api_url",
    "policy_db_url",
    "policy_executor_host_url",
    "prometheus_url",
)
_RECEIVER: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PORTS: Final = {"http": 80, "https": 443}


def examine_services(config: Config) -> Iterator[DoctorFinding]:
    """Yield a finding for each service of the settings, and for the folder of policies' code."""
    for name in _URLS:
        if url := getattr(config, name):
            yield _examine(name, url, "requests that need it are refused, or use older data")
    if config.traces:
        url = os.environ.get(_RECEIVER) or "http://localhost:4318"
        yield _examine("traces", url, f"spans are dropped: start the receiver, or set {_RECEIVER}")
    if (root := config.policy_code_root) is not None and not root.is_dir():
        detail = f"{root} is not a folder: no policy with a local path can be registered"
        yield DoctorFinding("policy_code_root", "warning", detail)


def _examine(name: str, url: str, otherwise: str) -> DoctorFinding:
    """Connect to a URL, which may have a password: only its host and port are shown."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        port = parts.port or _PORTS[parts.scheme]
        socket.create_connection((host, port), ANSWER_SECONDS_MAX).close()
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        return DoctorFinding(name, "warning", f"{host} does not answer ({reason}): {otherwise}")
    return DoctorFinding(name, "ok", f"{authority_of(host, port)} answers")

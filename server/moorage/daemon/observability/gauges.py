"""Gauges of `/metrics` whose values are read from other packages."""

import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Final

import numpy as np
from prometheus_client.metrics_core import Metric, UnknownMetricFamily

from moorage.catalog.mirrored.prometheus import PrometheusPoller
from moorage.core.allocator import Allocator
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.rates import LIMITS
from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.observability.counters import counter, counters, gauge, gauges, gauges_of
from moorage.daemon.observability.durations import OTHER
from moorage.daemon.observability.standard_streams import StandardStream
from moorage.gateway.server import GatewayStats
from moorage.ledger.base import Ledger
from moorage.policy.fleet import Fleet
from moorage.sandbox.host.contract import SandboxReport

CELLS_MAX: Final = 50
"""Maximum policies whose cells have series of their own."""
FLEET_KINDS_MAX: Final = 200
"""Maximum pairs of cluster and model with series of their own; all other pairs share one series."""


def core_gauges(allocator: Allocator) -> Iterable[Metric]:
    """Yield the amounts that are held, wanted by waiters, and free."""
    state, fleet = allocator.state, allocator.state.fleet
    warm = [share for name in state.warm for share in state.leases[name].placement]
    warm_milli = sum(len(share.gpus) * share.gpu_milli for share in warm)
    yield gauge("moorage_leases", "Leases that hold resources", len(state.leases))
    yield gauge(
        "moorage_leases_warm", "Leases without an owner, whose workload is warm", len(state.warm)
    )
    yield gauge("moorage_waiting", "Requests in the queue", len(state.waiting))
    # A requeued lease began to wait long after its request came, so it does not count.
    arrived = min((each.at for each in state.waiting.values() if each.lease is None), default=None)
    age = 0.0 if arrived is None else max(0.0, time.time() - arrived)
    yield gauge("moorage_oldest_wait_seconds", "Age of the oldest request in the queue", age)
    yield gauge(
        "moorage_undecided", "Requests that wait for their policy's answer", allocator.undecided
    )
    out = int(fleet.closed.sum())
    yield gauge("moorage_nodes", "Nodes of live clusters", len(fleet))
    yield gauge("moorage_nodes_unavailable", "Nodes that get no new leases: lost, cordoned, …", out)
    there_is = int(fleet.gpu_total.sum())  # A gauge; `promtool` has that suffix for counters alone.
    yield UnknownMetricFamily("moorage_gpu_milli_total", "GPU milli of live clusters", there_is)
    yield gauge("moorage_gpu_milli_free", "GPU milli free", int(fleet.gpu_free.sum()))
    yield gauge(
        "moorage_gpu_milli_warm", "GPU milli of warm leases, which requests may take", warm_milli
    )


def fleet_gauges(fleet: Fleet) -> Iterable[Metric]:
    """Yield GPUs by cluster and model; beyond the limit, the smallest are summed up as `other`."""
    devices = fleet.gpu_model >= 0
    models = len(fleet.models)
    kinds = (fleet.cluster[:, None] * models + fleet.gpu_model)[devices]
    length = len(fleet.cluster_ids) * models
    total = np.bincount(kinds, fleet.gpu_total[devices], length)
    free = np.bincount(kinds, fleet.gpu_free[devices], length)
    rows: list[tuple[tuple[str, str, str], float]] = []
    others = {"total": 0.0, "free": 0.0}
    for rank, kind in enumerate(np.argsort(-total, kind="stable").tolist()):
        if not total[kind]:
            break
        values = {"total": float(total[kind]), "free": float(free[kind])}
        if rank >= FLEET_KINDS_MAX:
            others = {what: others[what] + value for what, value in values.items()}
            continue
        place = fleet.cluster_ids[kind // models], fleet.models[kind % models]
        rows += (((*place, what), value) for what, value in values.items())
    if others["total"]:
        rows += (((OTHER, OTHER, what), value) for what, value in others.items())
    by_kind = "GPU milli by cluster and model: `total` and `free`"
    yield gauges_of("moorage_fleet_gpu_milli", by_kind, ("cluster", "model", "what"), rows)


def audit_counters(audit: AuditLog) -> Iterable[Metric]:
    """Yield the state of the audit log, and the counts of requests that exceed a limit."""
    yield counter(
        "moorage_audit_lost_total", "Entries of the audit log that could not be written", audit.lost
    )
    yield gauge(
        "moorage_audit_waiting_seconds",
        "Seconds for which entries of the audit log have been waiting for the disk",
        audit.waiting_seconds(),
    )
    refused = "Requests refused because of a tenant's limit, by setting"
    counts = ((setting, float(audit.surplus[setting])) for setting in LIMITS)
    yield counters("moorage_rate_refusals_total", refused, "setting", counts)


def entrance_metrics(
    failed: Mapping[str, int], certificate: tuple[float, float] | None, failing: bool | None
) -> Iterable[Metric]:
    """Yield the metrics of logins and certificates.

    Args:
        failed: Number of failed logins, by port.
        certificate: When the certificate expires, in seconds since the epoch, and for how many
            seconds it was made; None: there is no TLS.
        failing: Whether the issuer's keys cannot be fetched; None: there is no issuer.
    """
    counts = ((door, float(count)) for door, count in failed.items())
    yield counters(
        "moorage_failed_logins_total", "Failed logins (wrong or no token), by port", "door", counts
    )
    left = [] if certificate is None else [((), certificate[0] - time.time())]
    lifetime = [] if certificate is None else [((), certificate[1])]
    yield gauges_of(
        "moorage_certificate_expires_seconds",
        "Seconds until the server's certificate expires; no value without TLS",
        (),
        left,
    )
    yield gauges_of(
        "moorage_certificate_lifetime_seconds",
        "Seconds from begin to end of the server's certificate; no value without TLS",
        (),
        lifetime,
    )
    up = [] if failing is None else [((), float(not failing))]
    yield gauges_of(
        "moorage_oidc_keys_up",
        "1 if the issuer's keys could be fetched last time; no value without an issuer",
        (),
        up,
    )


def build_gauges() -> Iterable[Metric]:
    """Yield the versions of this server."""
    labels = (version("moorage"), platform.python_version())
    running = "1; the labels describe the server"
    yield gauges_of("moorage_build_info", running, ("version", "python"), [(labels, 1.0)])


def commit_gauges(ledger: Ledger, commit_loop: CommitLoop) -> Iterable[Metric]:
    """Yield the ledger's progress, and the number of events and facts under way."""
    yield gauge("moorage_ledger_seq", "Facts ever stored", ledger.last_seq)
    yield gauge("moorage_disk_full", "1 while the disk is full: no new leases", ledger.is_full)
    yield gauge("moorage_backlog", "Events and facts that are being processed", commit_loop.backlog)


def sandbox_gauges(report: SandboxReport) -> Iterable[Metric]:
    """Yield which protections from policies are in force, and counts of what policies did."""
    layers = ((name, 1.0) for name in report.layers)
    yield gauges("moorage_sandbox_layer", "Active layers of the jail", "layer", layers)
    counts = [(name, float(count)) for name, count in report.counters.items()]
    circuits = "Open circuits of policies, by the tenant whose requests overran"
    yield gauge("moorage_policies_circuit_open", circuits, report.circuits_open)
    cells = sorted(report.cells.items(), key=lambda each: -each[1])[:CELLS_MAX]
    living = "Living cells by policy; only the policies with most cells"
    yield gauges("moorage_cells", living, "policy", ((uri, float(n)) for uri, n in cells))
    workers = "Nodes of Ray on which policies are evaluated"
    yield gauge("moorage_policy_workers", workers, report.workers_up)
    yield gauges("moorage_sandbox", "Actions of the sandbox since the start", "what", counts)
    yield counters("moorage_sandbox_actions", "Actions of the sandbox", "what", counts)


def gateway_gauges(stats: GatewayStats) -> Iterable[Metric]:
    """Yield the number of connections and of news dropped for slow watchers."""
    yield gauge("moorage_sessions", "Open WebSockets", stats.sessions)
    missed = "News messages that slow watchers missed"
    yield counter("moorage_events_missed", missed, stats.missed_total)


def prometheus_gauges(prometheus: PrometheusPoller) -> Iterable[Metric]:
    """Yield the age of the metrics from Prometheus, and the number of failed queries."""
    up, last = prometheus.up, prometheus.last
    yield gauge("moorage_prometheus_up", "1 if Prometheus answered the last round of queries", up)
    ages = (("fresh", float(last.fresh)), ("stale", float(last.stale)))
    yield gauges("moorage_prometheus_nodes", "Nodes with metrics from Prometheus", "age", ages)


def log_counters(log: StandardStream) -> Iterable[Metric]:
    """Yield the counter of dropped log lines."""
    yield counter(
        "moorage_log_lines_dropped_total", "Lines of the log that could not be written", log.dropped
    )

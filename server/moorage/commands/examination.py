"""`moored doctor`: finds out what works on this machine, and why something does not.

The examination builds the sandbox layers, writes a fact in the data directory, and listens on the
ports. `access_examination` examines access.
"""

import asyncio
import dataclasses
import errno
import http.client
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from moorage.backends.registry import Examination, kinds
from moorage.commands.access_examination import examine_access, serves_certificate
from moorage.commands.port_holders import Listeners, find_listeners
from moorage.config.settings import Config
from moorage.core.state.facts import ClusterRemoved
from moorage.ledger.base import LedgerError
from moorage.ledger.stored import StoredLedger
from moorage.model import ClusterId
from moorage.policy import Fleet
from moorage.records.findings import DoctorFinding
from moorage.records.json_values import JsonValue
from moorage.sandbox.host.sandbox import JailError, Sandbox
from moorage.sandbox.wire.limits import Limits
from moorage.storage.base import StorageError
from moorage.storage.opening import need_postgres
from moorage.storage.sqlite import LEDGER_FILE
from moorage.storage.sqlite.storage import SqliteStorage
from moorage_client.inventory.control_groups import cpu_limit, memory_limit
from moorage_client.inventory.this_machine import cpu_milli, memory_mib

SERVICES: Final = "cluster registry, metrics store and policy store are built in"
ANSWER_SECONDS_MAX: Final = 5.0
"""Seconds for a program to answer a health check at a port."""
OWN_ANSWER_SECONDS_MAX: Final = 15.0
"""Seconds for the server of this data folder to answer: it may be busy."""
_WEBSOCKET_HEALTH: Final = b"ok\n"
"""The answer to `/healthz` at the port of the WebSocket; at the port of HTTP, the answer is
JSON."""
_OTHER_SETTINGS: Final = "restart it with these settings, or run this command with its settings"
_SILENT: Final = (
    "run this command with the server's settings of ports and TLS; if they agree, read its log"
)
_EVERY: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  # Compared, not bound.


def examine(config: Config, advice: str = "") -> list[DoctorFinding]:
    """Check all parts; append `advice` to findings about the data folder. Raises nothing."""
    listeners = find_listeners(config.data_dir)
    findings = [
        DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        DoctorFinding("kernel", "ok" if sys.platform == "linux" else "broken", platform.release()),
        *asyncio.run(_sandbox(config.sandbox)),
        *_storage(config, advice),
        *examine_access(config),
        _port(config, "websocket port", ("host", "port"), advice, listeners),
        _port(config, "http port", ("http_host", "http_port"), advice, listeners),
        _sizes(),
        DoctorFinding("services", "ok", SERVICES),
    ]
    for kind in kinds().values():
        wanted = kind.name in config.backends
        own = config.settings_of(kind)
        findings += kind.examine(Examination(config.data_dir, wanted, advice, own))
    return findings


class _NoServices:
    """Serves nothing to the policy of the self-test, which must not call any service."""

    async def call(self, client: str, method: str, arguments: tuple[JsonValue, ...]) -> JsonValue:
        """Refuse a policy's call of a service."""
        raise AssertionError((client, method, arguments))

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> Mapping[str, bytes]:
        """Return no prepared answers, so that the policy's calls reach `call`."""
        del client, method, ids
        return {}

    def documents(self, cluster_ids: JsonValue) -> list[JsonValue]:
        """Return no documents."""
        del cluster_ids
        return []


async def _sandbox(mode: str) -> list[DoctorFinding]:
    ignore: Callable[[object], None] = lambda _: None  # noqa: E731  # Nothing is consulted.
    sandbox = Sandbox(
        fleet=Fleet(), services=_NoServices(), deliver=ignore, limits=Limits(), mode="jail"
    )
    try:
        report = await sandbox.start()
    except JailError as error:
        if mode == "unsafe":
            reason = f"{error.reason}; policies run without it, as the setting `sandbox` says"
            return [DoctorFinding(f"sandbox: {error.layer}", "missing", reason)]
        reason = f"{error.reason}; `moored serve` refuses to start here without --sandbox unsafe"
        return [DoctorFinding(f"sandbox: {error.layer}", "broken", reason)]
    finally:
        await sandbox.close()
    layers = [DoctorFinding(f"sandbox: {name}", "ok", how) for name, how in report.layers.items()]
    held = ", ".join(report.probes)
    return [
        *layers,
        DoctorFinding("sandbox: self-test", "ok", f"{len(report.probes)} attacks: {held}"),
    ]


def _storage(config: Config, advice: str) -> list[DoctorFinding]:
    """Return the findings about the storage."""
    if not config.storage:
        found = asyncio.run(_ledger(config.data_dir))
        return [dataclasses.replace(found, detail=found.detail + advice)]
    try:
        need_postgres()
    except StorageError as error:
        return [DoctorFinding("storage", "broken", str(error))]
    from moorage.storage.postgres.examination import examine as examine_database  # noqa: PLC0415  # An extra.

    return examine_database(config.storage)


async def _ledger(folder: Path) -> DoctorFinding:
    parent = next(each for each in (folder, *folder.parents) if os.path.lexists(each))  # noqa: ASYNC240  # Nothing else runs on this loop.
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".moorage-doctor-") as trial:
            ledger = StoredLedger(SqliteStorage(Path(trial)).facts())
            await ledger.open()
            await ledger.append([ClusterRemoved(ClusterId("doctor"))], 0.0)
            await ledger.close()
    except OSError as error:
        expected = "expected a folder that this user may write: change data_dir, or its owner"
        return DoctorFinding("ledger", "broken", f"{parent}: {error.strerror}; {expected}")
    except LedgerError as error:
        return DoctorFinding("ledger", "broken", f"{folder}: {error}")
    return DoctorFinding("ledger", "ok", f"a fact was made durable beside {folder}")


def _sizes() -> DoctorFinding:
    """Report the CPU and memory that `--here` would register, and the limiting control group."""
    limits = [
        f"{name} by {limit.file}"
        for name, limit, here in (
            ("CPU", cpu_limit(), (os.cpu_count() or 1) * 1000),
            ("memory", memory_limit(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        )
        if limit is not None and limit.amount < here
    ]
    bounds = f", bounded: {', '.join(limits)}" if limits else ""
    return DoctorFinding(
        "this machine", "ok", f"{cpu_milli()} thousandths of a core, {memory_mib()} MiB{bounds}"
    )


def _is_served(config: Config, own: bool | None) -> bool:
    """Return whether the server at a port seems to have these settings.

    Args:
        config: The settings.
        own: Whether the server has the data folder open; None: unknown, since this user may not see
            it, or it is on another machine or in another container.
    """
    if own is not None:
        return own
    if config.storage or config.tls_cert is not None:  # No lock file, or the same certificate.
        return True
    lock = config.data_dir / f"{LEDGER_FILE}.lock"
    try:
        return f":{lock.stat().st_ino} " in Path("/proc/locks").read_text()
    except OSError:
        return False


def _answers(config: Config, host: str, port: int, seconds_max: float, *, websocket: bool) -> bool:
    """Return whether a healthy server is at a port: whether it answers `/healthz`.

    With TLS, the two ports of a server look the same.
    """
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # Nothing is bound.
    if config.tls_cert is not None:
        return serves_certificate(config, here, port, seconds_max)
    connection = http.client.HTTPConnection(here, port, timeout=seconds_max)
    try:
        connection.request("GET", "/healthz", headers={"Host": f"localhost:{port}"})
        answer = connection.getresponse()
        said = answer.read(len(_WEBSOCKET_HEALTH))
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return answer.status == http.HTTPStatus.OK and (said == _WEBSOCKET_HEALTH) == websocket


def _has_own_server(
    config: Config, host: str, port: int, listeners: Listeners, *, websocket: bool
) -> bool | None:
    """Return whether the healthy server at a port has these settings; None: no such server."""
    reached = [address for address, each in listeners.own if each == port]
    patience = OWN_ANSWER_SECONDS_MAX if reached else ANSWER_SECONDS_MAX
    if not _answers(config, host, port, patience, websocket=websocket):
        return None
    if listeners.own:
        return any(address.is_unspecified or host not in _EVERY for address in reached)
    return _is_served(config, False if port in listeners.others else None)


def _port(
    config: Config,
    name: str,
    settings: tuple[str, str],
    advice: str,
    listeners: Listeners,
) -> DoctorFinding:
    host, port = (getattr(config, each) for each in settings)
    sockets = listeners.own
    names = (f"[{at}]:{each}" if ":" in str(at) else f"{at}:{each}" for at, each in sockets)
    own = f"the server that uses {config.data_dir} listens"
    elsewhere = f"{own} at {' and '.join(sorted(names))}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            expected = f"expected a free port of this machine: change {' or '.join(settings)}"
            reason = f"{error.strerror}; {expected}"
            taken = error.errno == errno.EADDRINUSE
            websocket = "port" in settings
            fits = (
                _has_own_server(config, host, port, listeners, websocket=websocket)
                if taken
                else None
            )
            if fits:
                detail = f"{host}:{port}: a healthy server runs there already"
                return DoctorFinding(name, "ok", detail)
            if fits is not None and not sockets:
                other = f"a server runs there, but no server uses {config.data_dir}"
                reason = f"{other}; {expected}{advice}"
            if not any(each == port for _, each in sockets):
                more = f"; {elsewhere}" if sockets else ""
                return DoctorFinding(name, "broken", f"{host}:{port}: {reason}{more}")
            if fits is None:
                reason = f"{own} there, but does not answer as {name}: {_SILENT}"
                return DoctorFinding(name, "broken", f"{host}:{port}: {reason}")
    if sockets and port:
        # The flags of `serve` may set other ports; `doctor` has no such flags.
        detail = f"{host}:{port} ({', '.join(settings)}): {elsewhere} instead: {_OTHER_SETTINGS}"
        return DoctorFinding(name, "missing", detail)
    return DoctorFinding(name, "ok", f"{host}:{port} is free")

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
from moorage.commands.access_examination import (
    examine_access,
    is_certificate_of,
    shown_certificate,
)
from moorage.commands.folder_examination import examine_folder, examine_modes
from moorage.commands.service_examination import examine_services
from moorage.config.settings import Config
from moorage.core.state.facts import ClusterRemoved
from moorage.daemon.door_record import DoorRecord, read_doors
from moorage.ledger.base import LedgerError
from moorage.ledger.stored import StoredLedger
from moorage.model import ClusterId
from moorage.policy import Fleet
from moorage.protocol.origins import authority_of
from moorage.records.findings import DoctorFinding, DoctorState
from moorage.records.json_values import JsonValue
from moorage.sandbox.host.sandbox import JailError, Sandbox
from moorage.sandbox.wire.limits import Limits
from moorage.storage.base import StorageError
from moorage.storage.opening import need_postgres
from moorage.storage.sqlite.storage import SqliteStorage
from moorage_client.inventory.control_groups import cpu_limit, memory_limit
from moorage_client.inventory.this_machine import cpu_milli, memory_mib

SERVICES: Final = "cluster registry, metrics store and policy store are built in"
ANSWER_SECONDS_MAX: Final = 5.0
"""Seconds for a program to answer a health check at a port."""
OWN_ANSWER_SECONDS_MAX: Final = 15.0
"""Seconds for the server of this data folder to answer: it may be busy."""
_SETTINGS: Final = {"websocket": ("host", "port"), "http": ("http_host", "http_port")}
_WEBSOCKET_HEALTH: Final = b"ok\n"
"""The answer to `/healthz` at the port of the WebSocket; at the port of HTTP, the answer is
JSON."""
_OTHER_SETTINGS: Final = "restart it with these settings, or run this command with its settings"
_SILENT: Final = (
    "run this command with the server's settings of ports and TLS; if they agree, read its log"
)
_READS_AGAIN: Final = (
    "it reads a changed file within seconds; if this stays, its log says what is wrong with the "
    "file (tls_cert, tls_key)"
)
_RUNS: Final = ": a healthy server runs there already"
_EVERY: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  # Compared, not bound.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # As `_EVERY`.


def examine(config: Config, advice: str = "", file: Path | None = None) -> list[DoctorFinding]:
    """Check all parts. Raises nothing.

    Args:
        config: The settings.
        advice: Text to append to findings about the data folder.
        file: The TOML file of the settings.
    """
    runs = read_doors(config.data_dir) is not None
    ports = examine_ports(config, advice)
    findings = [
        DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        DoctorFinding("kernel", "ok" if sys.platform == "linux" else "broken", platform.release()),
        *asyncio.run(_sandbox(config.sandbox)),
        *_storage(config, advice, runs=runs),
        *examine_access(config),
        *examine_modes(config, file),
        *ports,
        _sizes(),
        DoctorFinding("services", "ok", SERVICES),
        *examine_services(config),
    ]
    for kind in kinds().values():
        wanted = kind.name in config.backends
        chosen = config.settings_of(kind)
        findings += kind.examine(Examination(config.data_dir, wanted, advice, chosen))
    return findings


def examine_ports(config: Config, advice: str = "") -> list[DoctorFinding]:
    """Return the findings about both ports; append `advice` where another folder may be meant."""
    own = read_doors(config.data_dir)
    return [_Port(config, advice, own, kind).examine() for kind in _SETTINGS]


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
    if mode == "unsafe":
        off = "policies run without the jail, as the setting `sandbox` says, though it works here"
        layers.append(DoctorFinding("sandbox", "warning", off))
    held = ", ".join(report.probes)
    return [
        *layers,
        DoctorFinding("sandbox: self-test", "ok", f"{len(report.probes)} attacks: {held}"),
    ]


def _storage(config: Config, advice: str, *, runs: bool) -> list[DoctorFinding]:
    """Return the findings about the storage; `runs`: whether a server uses the data folder."""
    if not config.storage:
        folder = config.data_dir
        found = [asyncio.run(_ledger(folder))]
        if found[0].state == "ok":
            found = examine_folder(folder, found[0], runs=runs)
        said = found[0].detail.rstrip(".") if advice else found[0].detail
        return [dataclasses.replace(found[0], detail=said + advice), *found[1:]]
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


class _Port:
    """The examination of a port; `own`: the ports of the server that uses the data folder."""

    def __init__(self, config: Config, advice: str, own: DoorRecord | None, kind: str) -> None:
        self._config = config
        self._advice = advice
        self._own = own
        self._kind = kind
        self._settings = _SETTINGS[kind]
        self._host, self._port = (getattr(config, each) for each in self._settings)

    def examine(self) -> DoctorFinding:
        """Try to listen; if that fails, find out whether the server of these settings is there."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, self._port))
            except OSError as error:
                return self._explain_failure(error)
        if self._own is not None and self._port:
            return self._report_other_ports(self._own)
        return self._make_finding("ok", " is free")

    def _explain_failure(self, error: OSError) -> DoctorFinding:
        expected = f"expected a free port of this machine: change {' or '.join(self._settings)}"
        own, reason = self._own, f": {error.strerror}; {expected}"
        if error.errno == errno.EADDRINUSE:
            if own is not None and own.is_here and self._port in {own.websocket[1], own.http[1]}:
                return self._examine_own_server(own)
            if self._answers(ANSWER_SECONDS_MAX):
                if own is None:
                    other = f"a server runs there, but no server uses {self._config.data_dir}"
                    reason = f": {other}; {expected}{self._advice}"
                elif not own.is_here:  # A container's engine may forward this port to the server.
                    return self._make_finding("ok", _RUNS)
        more = "" if own is None else f"; {self._describe_server(own)} at {_places(own)}"
        return self._make_finding("broken", reason + more)

    def _examine_own_server(self, own: DoorRecord) -> DoctorFinding:
        """Return the finding about a port at which the server of the data folder listens."""
        host, port = own.http if self._kind == "http" else own.websocket
        if self._port == port and (stale := self._find_other_certificate(host)):
            return stale
        if self._port != port or not self._answers(OWN_ANSWER_SECONDS_MAX):
            silent = f"{self._describe_server(own)} there, but does not answer as {self._kind} port"
            return self._make_finding("broken", f": {silent}: {_SILENT}")
        if self._host in _EVERY and host not in _EVERY:
            return self._report_other_ports(own)
        return self._make_finding("ok", _RUNS)

    def _find_other_certificate(self, host: str) -> DoctorFinding | None:
        """Return a finding if the data folder's server shows another certificate than the file.

        Args:
            host: The host at which that server listens; another program may have the port at
                another host.
        """
        if self._config.tls_cert is None or not (self._host == host or host in _EVERY):
            return None
        shown = shown_certificate(self._find_here(), self._port, OWN_ANSWER_SECONDS_MAX)
        if not shown or is_certificate_of(self._config, shown):
            return None
        other = f"the server there still has another certificate than {self._config.tls_cert}"
        return self._make_finding("warning", f": {other}: {_READS_AGAIN}")

    def _find_here(self) -> str:
        """Return the host at which this machine reaches the port."""
        return str(_LOOPBACK.get(self._host, self._host))

    def _report_other_ports(self, own: DoorRecord) -> DoctorFinding:
        # The flags of `serve` may set other ports; this command has no such flags.
        place = f" ({', '.join(self._settings)}): {self._describe_server(own)} at {_places(own)}"
        return self._make_finding("missing", f"{place} instead: {_OTHER_SETTINGS}")

    def _describe_server(self, own: DoorRecord) -> str:
        where = "" if own.is_here else " in another network, such as a container's,"
        return f"the server that uses {self._config.data_dir} listens{where}"

    def _make_finding(self, state: DoctorState, detail: str) -> DoctorFinding:
        at = authority_of(self._host, self._port)
        return DoctorFinding(f"{self._kind} port", state, at + detail)

    def _answers(self, seconds_max: float) -> bool:
        """Return whether a healthy server is at the port: whether it answers `/healthz`.

        With TLS, the two ports of a server look the same.
        """
        config, port, here = self._config, self._port, self._find_here()
        if config.tls_cert is not None:
            return is_certificate_of(config, shown_certificate(here, port, seconds_max))
        connection = http.client.HTTPConnection(here, port, timeout=seconds_max)
        try:
            connection.request("GET", "/healthz", headers={"Host": f"localhost:{port}"})
            answer = connection.getresponse()
            said = answer.read(len(_WEBSOCKET_HEALTH))
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        websocket = self._kind == "websocket"
        return answer.status == http.HTTPStatus.OK and (said == _WEBSOCKET_HEALTH) == websocket


def _places(own: DoorRecord) -> str:
    return " and ".join(sorted(authority_of(*door) for door in (own.websocket, own.http)))

"""Finds the kinds of backends; one object per kind tells the server all about the kind.

Each folder beside this file with a `kind.py` provides a kind, as `KIND`; other distributions
provide kinds by entry points in the group `moorage.backends`. Every command imports this module and
every `kind.py`. So a kind imports its backend, and the packages for it, only when it opens the
backend.
"""

import functools
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from moorage.extras import install_command
from moorage.model import Cluster, ClusterId, Lease, Tenant
from moorage.records.findings import DoctorFinding
from moorage.records.json_values import JsonValue
from moorage.setting_kinds import read_settings

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec
    from moorage.core.state.state import State
    from moorage.protocol.registry import ClusterDocuments
    from moorage.storage.base import SharedNames

ENTRY_POINTS: Final = "moorage.backends"
"""The group of entry points by which other packages add kinds."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class NoSettings:
    """The settings of kinds that have none."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Arguments from the daemon for a backend that it opens.

    Args:
        data_dir: The daemon's data folder; each backend uses the subfolder of its name.
        clusters: Returns the inventory as it is now.
        alone: Whether the server has no tokens, so that every caller is the operator.
        lease: Returns the lease that has, or last had, the workload of this name.
        names: Shares names, such as a server's id, with all servers of the database, so that a new
            leader finds the former leader's workloads; None: there is only one server.
    """

    data_dir: Path
    clusters: Callable[[], Mapping[ClusterId, Cluster]]
    alone: bool
    lease: Callable[[str], Lease | None]
    names: "SharedNames | None"


@dataclass(frozen=True, slots=True)
class Inventory:
    """Arguments from the daemon for a kind that follows clusters.

    Args:
        data_dir: The daemon's data folder.
        documents: The cluster documents, to read and change.
        known: Returns whether a cluster with an id exists.
        is_live: Returns whether a cluster with an id exists and may get new leases.
        state: The core's state; read only.
        spawn: Runs a coroutine until the daemon ends.
        watch: Adds a function that yields metrics; it is called whenever metrics are read.
        tell: Publishes news: topic, name, data, tenant.
    """

    data_dir: Path
    documents: "ClusterDocuments"
    known: Callable[[str], bool]
    is_live: Callable[[str], bool]
    state: "State"
    spawn: Callable[[Coroutine[object, object, None]], object]
    watch: "Callable[[Callable[[], Iterable[Metric]]], None]"
    tell: Callable[[str, str, JsonValue, Tenant], None]


@dataclass(frozen=True, slots=True)
class Examination:
    """The input when `moored doctor` examines a kind of backend.

    Args:
        data_dir: The server's data folder.
        wanted: Whether the setting `backends` lists the kind.
        advice: Text that ends each finding about the data folder.
        settings: The kind's settings on this server; None: unknown.
    """

    data_dir: Path
    wanted: bool
    advice: str = ""
    settings: object = None


class BackendKind(ABC, Generic[S]):
    """One kind of backend: its settings, its specs, and how to open it.

    Attributes:
        name: The kind's name in `provision.backend`.
        about: Sentences about the kind for operators.
        does: The kind's finding in `moored doctor`, for kinds that need no extra.
        settings: A dataclass of the kind's settings, whose names begin with the kind's name.
        by_default: Whether servers that name no backends have the kind.
        among_tenants: Settings on servers that name no backends and whose tenants do not trust each
            other; None: these servers do not have the kind.
        extra: The extra of its distribution that must be installed; empty: none.
        package: The distribution that this extra installs.
        distribution: The distribution that declares the extra.
        engine_names: Names of the kind in `ResourceEngine`; empty if the kind has no `open_alone`.
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    does: ClassVar[str] = ""
    settings: type[S]
    by_default: ClassVar[bool] = False
    among_tenants: ClassVar[Mapping[str, object] | None] = None
    extra: ClassVar[str] = ""
    package: ClassVar[str] = ""
    distribution: ClassVar[str] = "moorage"
    engine_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def open(self, settings: S, surroundings: Surroundings) -> "Backend":
        """Open the backend of this kind.

        Raises:
            BackendError: The backend cannot be opened.
            ModuleNotFoundError: The kind's extra is not installed.
        """

    def load(self, data_dir: Path) -> None:
        """Import the backend's modules before `open`, so that a standby takes over sooner."""
        del data_dir  # Some kinds override this.
        with suppress(ModuleNotFoundError):  # `open` reports that.
            importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.backend")

    def open_alone(self, folder: Path, environment: Mapping[str, str]) -> "Backend":
        """Open the backend in a program without a server, if the environment configures it.

        Raises:
            BackendError: The backend cannot be opened.
        """
        del folder, environment
        raise NotImplementedError(  # Not abstract: `engine_names` of such a kind is empty.
            f"the backend {self.name} needs a server"
        )

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        """Return the spec classes that this kind adds to those that all backends share."""
        return ()

    def follow(self, settings: S, backend: "Backend | None", inventory: Inventory) -> None:
        """Start to follow the clusters that the kind's settings name, if any.

        Args:
            settings: The kind's settings.
            backend: The open backend; None if the setting `backends` does not name the kind.
            inventory: Arguments from the daemon, e.g. the cluster documents.

        Raises:
            BackendError: A package or file that following needs is missing or unreadable.
        """

    def examine(self, examination: Examination) -> Iterable[DoctorFinding]:
        """Yield the findings of `moored doctor`: whether the extra is installed and needed."""
        name = f"backend: {self.name}"
        wanted = examination.wanted
        if not self.package:
            yield DoctorFinding(name, "ok", self.does)
            return
        if not self.installed:
            way = f"{self.install_command}, then list it in the setting backends"
            yield DoctorFinding(name, "broken" if wanted else "missing", way)
            return
        found = f"{self.package} {importlib.metadata.version(self.package)}"
        if wanted:
            yield DoctorFinding(name, "ok", found)
        else:
            yield DoctorFinding(name, "missing", f"{found}; the setting backends does not list it")

    @property
    def installed(self) -> bool:
        """Whether the packages that this kind needs are installed."""
        try:
            return not self.package or bool(importlib.metadata.version(self.package))
        except importlib.metadata.PackageNotFoundError:
            return False

    @property
    def install_command(self) -> str:
        """The command that installs the packages that this kind needs."""
        if not self.extra:
            return f"pip install {self.distribution}"
        return install_command(self.extra, self.distribution)


class BrokenKind(BackendKind[NoSettings]):
    """Stands for a kind that failed to load; `moored doctor` and `open` report the reason.

    Args:
        name: Name of its entry point.
        reason: The error.
    """

    settings = NoSettings

    def __init__(self, name: str, reason: str) -> None:
        self.name = name  # type: ignore[misc]  # A class attribute elsewhere.
        self.reason = reason

    def open(self, settings: NoSettings, surroundings: Surroundings) -> "Backend":
        """Raise an error with the reason why the kind failed to load."""
        from moorage.backends.base import BackendError  # noqa: PLC0415  # As the module says.

        del settings, surroundings
        raise BackendError(f"the backend {self.name} cannot be loaded: {self.reason}")

    def examine(self, examination: Examination) -> Iterable[DoctorFinding]:
        """Yield the reason why the kind failed to load."""
        yield DoctorFinding(
            f"backend: {self.name}",
            "broken" if examination.wanted else "missing",
            f"cannot be loaded: {self.reason}",
        )


@functools.cache
def kinds() -> Mapping[str, BackendKind[Any]]:
    """Return all kinds by name: shipped ones, then those that other packages add."""
    shipped = [
        importlib.import_module(f"{__package__}.{file.parent.name}.kind").KIND
        for file in Path(__file__).parent.glob("*/kind.py")
    ]
    found = {kind.name: kind for kind in sorted(shipped, key=lambda x: (not x.by_default, x.name))}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        kind = _load(point)
        if point.name in found:
            kind = BrokenKind(f"{point.name} of {point.value}", f"{point.name} is taken")
        found[kind.name] = kind
    return found


def _load(point: importlib.metadata.EntryPoint) -> BackendKind[Any]:
    try:
        kind = point.load()
    except Exception as error:  # noqa: BLE001  # Foreign code may raise anything.
        return BrokenKind(point.name, f"{type(error).__name__}: {error}")
    if not isinstance(kind, BackendKind) or kind.name != point.name:
        return BrokenKind(point.name, f"{point.value} is not a BackendKind named {point.name}")
    for name in read_settings(kind.settings):
        if not name.startswith(f"{kind.name}_"):
            return BrokenKind(point.name, f"its setting {name} must begin with {kind.name}_")
    return kind


def specs() -> "list[type[BaseResourceSpec]]":
    """Return the spec classes of all kinds, in the order of `kinds`."""
    found: list[type[BaseResourceSpec]] = []
    for kind in kinds().values():
        try:
            found += kind.specs()
        except Exception as error:  # noqa: BLE001  # As in `_load`.
            import structlog  # noqa: PLC0415  # As the module says.

            log = structlog.get_logger("moored")
            log.warning("backend_specs_unread", backend=kind.name, reason=str(error))
    return found


def open_backend(kind: BackendKind[S], settings: S, surroundings: Surroundings) -> "Backend":
    """Open the backend of a kind.

    Raises:
        BackendError: The backend cannot be opened, or its extra is not installed.
    """
    from moorage.backends.base import BackendError  # noqa: PLC0415  # As the module says.

    try:
        return kind.open(settings, surroundings)
    except ModuleNotFoundError as error:
        way = f"{kind.install_command}, or take {kind.name} out of the setting backends"
        raise BackendError(f"the backend {kind.name} needs {error.name}: {way}") from error

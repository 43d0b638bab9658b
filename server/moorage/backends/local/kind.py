"""The kind `local`, for the registry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from moorage.backends.registry import BackendKind, Examination, Surroundings
from moorage.records.findings import DoctorFinding
from moorage.setting_kinds import NAME, NAMES, SWITCH, Setting

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """The settings of the kind `local`."""

    local_here: Annotated[
        bool,
        Setting(
            SWITCH,
            "Whether `local` also starts workloads on the server's own machine, and not only on "
            "machines with agents.",
            default="true; false where `backends` is not set and there are `tokens` or `storage`, "
            "or other machines reach `host` or `http_host`",
        ),
    ] = True
    local_nodes: Annotated[
        tuple[str, ...],
        Setting(
            NAMES,
            "Nodes of the inventory that stand for this machine, for the backend `local`.",
            default="this machine under all names that it has had, `localhost`",
        ),
    ] = ()
    local_address: Annotated[
        str,
        Setting(
            NAME,
            "Address of this machine for members of a gang on other machines.",
            default="the address at which the gang's first machine reaches the server",
        ),
    ] = ""


class LocalKind(BackendKind[LocalSettings]):
    """Runs commands and containers on this machine and on agents' machines."""

    name = "local"
    about = (
        "`local` runs commands of clients as the user of the daemon, or of the agent of a machine, "
        "and containers that may mount any folder of the machine."
    )
    settings = LocalSettings
    by_default = True
    among_tenants: ClassVar[Mapping[str, object]] = {"local_here": False}

    def load(self, data_dir: Path) -> None:
        from moorage.backends.local.backend import confinement_of  # noqa: PLC0415  # See registry.

        confinement_of(data_dir)

    def open(self, settings: LocalSettings, surroundings: Surroundings) -> "Backend":
        from moorage.backends.agents.backend import FleetBackend  # noqa: PLC0415  # See registry.
        from moorage.backends.agents.own_machine import OwnLook  # noqa: PLC0415  # See registry.
        from moorage.backends.local.backend import LocalBackend  # noqa: PLC0415  # See registry.
        from moorage.backends.local.machine import names_of, place_of  # noqa: PLC0415  # As above.

        folder = surroundings.data_dir / self.name
        nodes = settings.local_nodes or names_of(folder, surroundings.clusters().values())
        own = LocalBackend(folder, nodes, hidden=surroundings.data_dir)
        look = OwnLook(lambda: place_of(folder, surroundings.clusters()), own.measured)
        address, here = settings.local_address, settings.local_here
        return FleetBackend(own, surroundings.lease, address, look, here=here)

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        from moorage.backends import specs  # noqa: PLC0415  # See registry.

        return (
            specs.ContainerResourceSpec,
            specs.ServiceResourceSpec,
            specs.VLLMModelResourceSpec,
            specs.ProcessResourceSpec,
            specs.APIModelResourceSpec,
        )

    def examine(self, examination: Examination) -> Iterable[DoctorFinding]:
        from moorage.backends.local.examination import examine  # noqa: PLC0415  # See registry.

        own = examination.settings
        return examine(examination, here=not isinstance(own, LocalSettings) or own.local_here)


KIND: Final = LocalKind()

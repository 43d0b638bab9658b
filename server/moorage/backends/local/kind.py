"""The kind `local`, for the registry."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from moorage.backends.registry import BackendKind, Examination, Surroundings
from moorage.records.findings import DoctorFinding
from moorage.setting_kinds import NAME, NAMES, Setting

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Which nodes are this machine."""

    local_nodes: Annotated[
        tuple[str, ...],
        Setting(
            NAMES,
            "Nodes of the inventory that are this machine, for the backend `local`.",
            default="this machine under all names that it has had, `localhost`",
        ),
    ] = ()
    local_address: Annotated[
        str,
        Setting(
            NAME,
            "Address at which members of a gang on other machines find this one.",
            default="where the first of them reaches the server",
        ),
    ] = ""


class LocalKind(BackendKind[LocalSettings]):
    """Runs commands and containers on this machine, and on those that have agents."""

    name = "local"
    about = (
        "`local` runs commands of clients on this machine, as the daemon's own user, and "
        "containers with any of its folders that they mount."
    )
    settings = LocalSettings
    by_default = True

    def open(self, settings: LocalSettings, surroundings: Surroundings) -> "Backend":
        from moorage.backends.agents.backend import FleetBackend  # noqa: PLC0415  # See registry.
        from moorage.backends.agents.own_machine import OwnLook  # noqa: PLC0415  # See registry.
        from moorage.backends.local.backend import LocalBackend  # noqa: PLC0415  # See registry.
        from moorage.backends.local.machine import names_of, place_of  # noqa: PLC0415  # Likewise.

        folder = surroundings.data_dir / self.name
        nodes = settings.local_nodes or names_of(folder, surroundings.clusters().values())
        own = LocalBackend(folder, nodes, hidden=surroundings.data_dir)
        look = OwnLook(lambda: place_of(folder, surroundings.clusters()), own.measured)
        return FleetBackend(own, surroundings.lease, settings.local_address, look)

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

        return examine(examination)


KIND: Final = LocalKind()

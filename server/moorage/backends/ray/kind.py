"""The kind `ray`, for the registry."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from moorage.backends.registry import BackendKind, Inventory, Surroundings
from moorage.setting_kinds import NAME, SWITCH, Setting

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The address of a Ray cluster, and the settings for following its nodes."""

    ray_address: Annotated[
        str,
        Setting(
            NAME,
            "Ray cluster of the backend `ray`: `HOST:PORT`, `ray://HOST:PORT`, or `auto` for the "
            "cluster that runs on this machine.",
        ),
    ] = "auto"
    ray_cluster: Annotated[
        str, Setting(NAME, "Id of the Ray cluster's document, which the daemon keeps up to date.")
    ] = "ray"
    ray_autoscale: Annotated[
        bool,
        Setting(
            SWITCH,
            "Request nodes for queued requests from Ray's autoscaler. This replaces requests of "
            "other programs to it.",
        ),
    ] = False


class RayKind(BackendKind[RaySettings]):
    """Starts workloads on the nodes of a Ray cluster, and follows its capacity."""

    name = "ray"
    about = (
        "`ray` starts on the nodes of a Ray cluster, and needs `pip install '.[ray]'` in a "
        "checkout."
    )
    settings = RaySettings
    extra = "ray"
    package = "ray"
    engine_names = ("ray",)

    def open(self, settings: RaySettings, surroundings: Surroundings) -> "Backend":
        from moorage.backends.ray.backend import RayBackend  # noqa: PLC0415  # See registry.

        if importlib.util.find_spec("ray") is None:  # Only the driver imports it.
            raise ModuleNotFoundError(name="ray")
        from moorage.backends.ray.records import Records  # noqa: PLC0415  # As above.

        folder = surroundings.data_dir / self.name
        if surroundings.names is not None:
            Records(folder).join(partial(surroundings.names.agree, self.name))
        return RayBackend(folder, settings.ray_address)

    def open_alone(self, folder: Path, environment: Mapping[str, str]) -> "Backend":
        """Open a backend on the Ray cluster at `RAY_ADDRESS`, or on this machine's cluster."""
        from moorage.backends.ray.backend import RayBackend  # noqa: PLC0415  # See registry.

        address = environment.get("RAY_ADDRESS") or environment.get("MOORAGE_RAY_ADDRESS") or "auto"
        return RayBackend(folder, address, leased=False)

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        from moorage.backends.ray.specs import RayActorResourceSpec, RayJobResourceSpec  # noqa: PLC0415  # See registry.

        return RayActorResourceSpec, RayJobResourceSpec

    def follow(
        self, settings: RaySettings, backend: "Backend | None", inventory: Inventory
    ) -> None:
        if backend is None:  # Do not import Ray in vain.
            return
        from moorage.backends.ray.backend import RayBackend  # noqa: PLC0415  # See registry.
        from moorage.backends.ray.following import RayFollower  # noqa: PLC0415  # See registry.

        if isinstance(backend, RayBackend):
            follower = RayFollower(settings.ray_cluster, settings.ray_autoscale, backend, inventory)
            inventory.spawn(follower.run())


KIND: Final = RayKind()

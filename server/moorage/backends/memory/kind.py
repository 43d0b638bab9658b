"""The kind `memory`, for the registry."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from moorage.backends.registry import BackendKind, NoSettings, Surroundings

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec


class MemoryKind(BackendKind[NoSettings]):
    """Starts nothing, and needs no settings or packages."""

    name = "memory"
    does = "starts nothing, and only records the workloads that it would run"
    settings = NoSettings
    by_default = True
    among_tenants: ClassVar[Mapping[str, object]] = {}

    def open(self, settings: NoSettings, surroundings: Surroundings) -> "Backend":
        from moorage.backends.memory.backend import MemoryBackend  # noqa: PLC0415  # See registry.

        del settings, surroundings  # Needs neither.
        return MemoryBackend()

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        from moorage.backends.specs import MemoryResourceSpec  # noqa: PLC0415  # See registry.

        return (MemoryResourceSpec,)


KIND: Final = MemoryKind()

"""`Context`: gets the resources of one rollout, and ends or releases them at the rollout's end.

Source: docs/reference/resource-engine.md, "Contexts". At the end, resources with the scope `global`
become free for other rollouts; a rollout's own resources are ended.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from moorage.backends.base import BackendError
from moorage.backends.spec_documents import pool_key
from moorage.backends.specs import BaseResourceSpec, ContainerResourceSpec
from moorage.records.json_values import JsonMapping
from moorage.resources.resource_engine import ResourceEngine
from moorage.resources.resources import BaseResource

Scope = Literal["rollout", "global"]


@dataclass(kw_only=True)
class ContextConfig:
    """The settings of a context.

    Args:
        resource_backend: The backend for calls that name none. If it is `local`, the context's
            metadata may name another backend.
    """

    resource_backend: str = "local"


@dataclass(slots=True)
class _Held:
    spec: BaseResourceSpec
    backend: str
    scope: Scope


@dataclass
class Context:
    """Gets resources for one rollout, and ends or releases them at its end.

    Args:
        rollout_id: The id of the rollout.
        group_id: The id of the group of rollouts that belong together.
        metadata: `image_id`: image of the container for calls without a spec; `resource_backend`:
            the backend for calls that name none.
        context_config: The settings of the context, such as the default backend.
        engine: The engine that has the resources; None: the engine that the process shares.
    """

    rollout_id: str
    group_id: str | None = None
    metadata: JsonMapping | None = None
    context_config: ContextConfig | None = None
    engine: ResourceEngine = field(default_factory=ResourceEngine.shared)
    last_acquire_was_first: bool = field(default=False, init=False)
    _held: dict[str, _Held] = field(default_factory=dict[str, _Held], init=False, repr=False)

    def __post_init__(self) -> None:
        self.metadata = dict(self.metadata or {})

    async def acquire_resource(
        self,
        id: str | None = None,  # noqa: A002  # The documented name.
        spec: BaseResourceSpec | None = None,
        scope: Scope = "rollout",
        backend: str | None = None,
        timeout: float | None = 600.0,  # noqa: ASYNC109  # The documented name.
    ) -> BaseResource:
        """Get a resource for this rollout.

        Args:
            id: The resource's id; None: derived from the rollout and the spec, so two specs of one
                rollout never share an id.
            spec: The spec of the resource; None: a container of `metadata["image_id"]`.
            scope: `rollout`: ended when the rollout ends; `global`: then free for other rollouts.
            backend: The name of the backend; None: that of the settings or the metadata.
            timeout: Maximum seconds for the start of the resource.

        Raises:
            ValueError: The scope or the backend does not exist, or the id has a resource of another
                spec.
            BackendError: The resource could not be started.
            TimeoutError: The start took too long.
        """
        if scope not in {"rollout", "global"}:
            raise ValueError(f"scope: expected rollout or global, not {scope!r}")
        wanted = spec or ContainerResourceSpec(image=(self.metadata or {}).get("image_id"))
        place = backend or self._backend()
        name = id or f"{self.rollout_id}/{pool_key(wanted, place)}"
        first = name not in self._held
        resource = await self.engine.acquire(name, wanted, place, timeout)
        self.last_acquire_was_first = first
        self._held[name] = _Held(wanted, place, scope)
        return resource

    def is_spec_acquired(self, spec: BaseResourceSpec) -> bool:
        """Return whether this rollout has a resource of an equal spec, at any backend."""
        return any(
            pool_key(held.spec, held.backend) == pool_key(spec, held.backend)
            for held in self._held.values()
        )

    async def monitor_resources(self) -> dict[str, dict[str, int]]:
        """Count resources by pool, as `ResourceEngine.monitor` does."""
        return await self.engine.monitor()

    async def reset_resource(self, scope: Scope | None = None, *args: Any, **kwargs: Any) -> None:
        """Reset the resources of `scope`, or without a scope all; skip those that have ended."""
        for name in self._names(scope):
            try:
                await self.engine.reset(name, *args, **kwargs)
            except BackendError:
                raise  # Some backend errors are a ValueError, too.
            except ValueError:
                del self._held[name]

    async def release_resource(self, scope: Scope | None = None) -> None:
        """Make the rollout's resources free: those of `scope`, or without a scope all."""
        for name in self._names(scope):
            del self._held[name]
            await self.engine.release(name)

    async def end_resource(self, scope: Scope | None = None) -> None:
        """End this rollout's resources: those of `scope`, or without a scope all."""
        for name in self._names(scope):
            del self._held[name]
            await self.engine.end(name)

    async def close(self) -> None:
        """End the rollout: release its global resources, and end its own resources."""
        try:
            await self.release_resource("global")
        finally:
            await self.end_resource("rollout")

    def _names(self, scope: Scope | None) -> list[str]:
        return [name for name, held in self._held.items() if scope in {None, held.scope}]

    def _backend(self) -> str:
        configured = (self.context_config or ContextConfig()).resource_backend
        if configured != "local":
            return configured
        return str((self.metadata or {}).get("resource_backend") or configured)

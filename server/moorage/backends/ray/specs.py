"""The specs that only the backend `ray` has."""

from dataclasses import dataclass, field

from moorage.backends.specs import BaseResourceSpec, ProcessResourceSpec
from moorage.records.json_values import JsonObject, JsonValue


@dataclass(kw_only=True)
class RayActorResourceSpec(BaseResourceSpec):
    """An actor of a Ray cluster.

    Args:
        actor_cls_path: `package.module.Class`, importable on the cluster.
        init_args: Positional arguments of the class.
        init_kwargs: Keyword arguments of the class.
        ray_actor_options: Options for `ray.remote(...).options`.
    """

    category: str = "ray_actor"

    actor_cls_path: str = ""
    init_args: list[JsonValue] = field(default_factory=list[JsonValue])
    init_kwargs: JsonObject = field(default_factory=JsonObject)
    ray_actor_options: JsonObject = field(default_factory=JsonObject)

    @property
    def title(self) -> str:
        """Return the class of the spec, which is its title in messages."""
        return self.actor_cls_path or "default"


@dataclass(kw_only=True)
class RayJobResourceSpec(ProcessResourceSpec):
    """A command that calls `ray.init()`; its tasks and actors are limited to the lease's share."""

    category: str = "job"

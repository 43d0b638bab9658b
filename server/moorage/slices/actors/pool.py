"""A pool of actors: the slices of `SlicePoolManager`, or the hosts of a slice."""

import logging
from typing import Final, Generic

from moorage.slices.ray_values import RayValue
from moorage.slices.records import ActorInfoT, ActorPoolMember
from moorage.slices.settings import SliceSettings
from moorage.slices.waiting import kill, outcomes

logger: Final = logging.getLogger("ray")


class ResourcePoolManager(Generic[ActorInfoT]):
    """A pool of actors that can grow and shrink; subclasses define the actors.

    Actors answer `get_info()`, `healthy()` and `shutdown()`.

    Args:
        settings: Time limits; None: from the environment.
    """

    def __init__(self, settings: SliceSettings | None = None) -> None:
        self._settings = settings or SliceSettings.from_environment()
        self._actor_pool: list[ActorPoolMember[ActorInfoT]] = []

    def create_actor(self) -> RayValue:
        """Start one actor, and return its handle.

        Raises:
            NotImplementedError: The subclass does not define this method.
        """
        raise NotImplementedError(  # Not abstract: existing programs create the class itself.
            f"{type(self).__name__} does not say how actors are created"
        )

    def get_all_actors_in_pool(self) -> list[RayValue]:
        """Return the handles of all members, as a new list."""
        return [member.actor for member in self._actor_pool]

    def get_all_pool_members(self) -> list[ActorPoolMember[ActorInfoT]]:
        """Return all members, as a new list."""
        return list(self._actor_pool)

    def get_actor_pool_name(self) -> str:
        """Return this pool's name for messages."""
        return type(self).__name__

    def get_actor_name_from_actor_info(self, actor_info: ActorInfoT) -> str:
        """Return an actor's name for messages."""
        return str(actor_info)

    def drain_actor_pool(self) -> None:
        """Shut down all actors, kill those that remain, and empty the pool; may be repeated."""
        members, self._actor_pool = self._actor_pool, []
        self._dismiss(members)

    def _scale_actor_pool(self, desired_num_actors: int) -> None:
        """Remove unhealthy members, then add or remove some until the pool has the given size."""
        self._remove_unhealthy_members_from_actor_pool()
        if len(self._actor_pool) < desired_num_actors:
            self._add_members_to_actor_pool(desired_num_actors)
        else:
            self._remove_members_from_actor_pool(desired_num_actors)

    def _remove_unhealthy_members_from_actor_pool(self) -> list[ActorPoolMember[ActorInfoT]]:
        """Kill and return the members that do not report that they are healthy."""
        checks = [member.actor.healthy.remote() for member in self._actor_pool]
        answers = outcomes(checks, self._settings.health_check_seconds_max)
        unhealthy = []
        healthy = []
        for member, answer in zip(self._actor_pool, answers, strict=True):
            if answer is True:
                healthy.append(member)
                continue
            unhealthy.append(member)
            name = self.get_actor_name_from_actor_info(member.actor_info)
            logger.warning("%s: %s is unhealthy (%s)", self.get_actor_pool_name(), name, answer)
        self._actor_pool = healthy
        for member in unhealthy:
            self._end(member)
        return unhealthy

    def _add_members_to_actor_pool(self, desired_num_actors: int) -> None:
        """Start missing actors, and add those that start in time."""
        missing = desired_num_actors - len(self._actor_pool)
        actors = [self.create_actor() for _ in range(missing)]
        infos = [actor.get_info.remote() for actor in actors]
        answers = outcomes(infos, self._settings.slice_start_seconds_max)
        for actor, answer in zip(actors, answers, strict=True):
            if isinstance(answer, Exception):
                logger.warning("%s: an actor did not start: %s", self.get_actor_pool_name(), answer)
                kill(actor)
            else:
                self._actor_pool.append(ActorPoolMember(actor, answer))

    def _remove_members_from_actor_pool(self, desired_num_actors: int) -> None:
        """Shut down the last members, until the pool has the given size."""
        surplus = self._actor_pool[desired_num_actors:]
        del self._actor_pool[desired_num_actors:]
        self._dismiss(surplus)

    def _dismiss(self, members: list[ActorPoolMember[ActorInfoT]]) -> None:
        """Shut down actors, within `drain_seconds_max` in total, then kill them."""
        answers = [member.actor.shutdown.remote() for member in members]
        outcomes(answers, self._settings.drain_seconds_max)
        for member in members:
            self._end(member)

    def _end(self, member: ActorPoolMember[ActorInfoT]) -> None:
        """Kill an actor, and free the resources that the pool holds for it."""
        kill(member.actor)

"""A pool of slices: scale it, prepare its hosts, and run functions on them."""

import logging
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from moorage.slices.actors.pool import ResourcePoolManager
from moorage.slices.cluster import addresses, alive_nodes, request_bundles
from moorage.slices.errors import (
    HostUnhealthyError,
    InsufficientSlicesError,
    SliceDegraded,
    SlicesError,
    SliceTimeoutError,
)
from moorage.slices.lazy_ray import ray
from moorage.slices.leases import LeasedHosts
from moorage.slices.ray_values import RayValue, UserFunction
from moorage.slices.records import ActorPoolMember, DegradedSlice, MultisliceInfo, SliceInfo
from moorage.slices.reservations import Reservation, Reservations
from moorage.slices.results import HostCall, collect
from moorage.slices.settings import SliceSettings
from moorage.slices.shapes import GpuSlices, Shape, TpuSlices, find_degraded, slices_possible
from moorage.slices.tasks import plain
from moorage.slices.waiting import Deadline, kill, outcomes

SCALE_UP_SECONDS_MIN: Final = 60
"""Minimum seconds between two attempts to scale up."""
ANSWER_SECONDS: Final = 10
"""Extra seconds for the answer to a call, beyond the limit of the call itself."""
_REPORT_SECONDS_MAX: Final = 20
"""Maximum seconds until Ray's monitor reports whether there is an autoscaler; usually 5."""

logger: Final = logging.getLogger("ray")


class SlicePoolManager(ResourcePoolManager[SliceInfo]):
    """A pool of TPU or GPU slices. One thread at a time may use it.

    Member `i` of the pool is slice `i`. A slice keeps its number while the pool grows and while
    other slices are replaced; its replacement gets the same number. The slices that join in one
    call are numbered in the order of their names.

    Args:
        tpu_type: The type of TPU slices, such as `v4-8`.
        shape: The shape of the slices, in place of `tpu_type`: `GpuSlices`, or `TpuSlices` with
            details.
        settings: Time limits; None: from the environment.
        hosts: Takes the hosts of each slice as a lease of a Moorage server; None: Ray chooses free
            hosts.
    """

    def __init__(
        self,
        tpu_type: str | None = None,
        *,
        shape: Shape | None = None,
        settings: SliceSettings | None = None,
        hosts: LeasedHosts | None = None,
    ) -> None:
        super().__init__(settings)
        if tpu_type is not None and shape is not None:
            raise ValueError("a pool has slices of one kind: give tpu_type or shape, not both")
        self._tpu_type = tpu_type
        self._given = TpuSlices(tpu_type) if tpu_type is not None else shape
        self._leased = hosts
        if hosts is not None:
            hosts.check(self._shape)
        self._had_slices = False
        self._last_scale_ts: float | None = None
        self._last_scale_check_ts: float | None = None
        self._slots: dict[int, ActorPoolMember[SliceInfo]] = {}
        self._reservations: list[Reservation] = []
        self._losses: list[DegradedSlice] = []

    def get_actor_pool_name(self) -> str:
        """Return the name of this pool in messages: `SlicePool(<type>)`."""
        return f"SlicePool({self._given.name if self._given else None})"

    def get_actor_name_from_actor_info(self, actor_info: SliceInfo) -> str:
        """Return the name of a slice in messages."""
        return actor_info.slice_name

    def create_actor(self) -> RayValue:
        """Start an actor for one more slice, and return its handle; a drain ends the actor.

        Ray keeps the reservation when the actor has ended, until the next `scale_multislice`,
        `prepare_all_slices` or drain of this pool.
        """
        self._reservations.append(Reservation.open(self._shape, self._settings))
        return self._reservations[-1].actor

    def scale_multislice(
        self, num_slices: int | Sequence[int], timeout: float | None = None
    ) -> None:
        """Scale to a number of slices. Healthy slices stay, with their running tasks.

        The sizes are tried from the largest to the smallest. With `n` sizes left, a size gets an
        `n`th of the remaining time. A size that the cluster can never hold is skipped at once. But
        if it is the last size, and the cluster has or had room for a slice, the pool waits for
        joining nodes, for at most `host_health_seconds_max`. A slice that lost a host does not
        count as available, unless the setting `moderate` is on.

        Args:
            num_slices: The number of slices, or a list of all acceptable numbers.
            timeout: Maximum seconds for the whole call; None: `scale_add_seconds_max`.

        Raises:
            ValueError: No number is given, or a number is not whole, or not above 0.
            InsufficientSlicesError: No requested number is available; the pool keeps its healthy
                slices.
            SliceDegraded: No requested number is available, since a slice has lost hosts.
        """
        sizes = _sizes(num_slices)
        deadline = Deadline(self._settings.scale_add_seconds_max if timeout is None else timeout)
        self._last_scale_ts = time.time()
        self._remove_unhealthy_members_from_actor_pool()
        held = len(self._actor_pool)
        reservations = Reservations(self._shape, self._settings, held, self._leased)
        try:
            for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
                share = Deadline(deadline.left / left)
                if size <= held or self._wait(reservations, size, held, share, last=left == 1):
                    self._settle(size, reservations.take() if size > held else [])
                    return
            most = self._most()
            never = most is not None and max(held, most) < min(sizes)
            within = f"; the cluster has room for {most} in all"
            message = (
                f"Requested one of {sorted(sizes)}, but only {held + len(reservations.ready)}"
                f" slices available for {self.get_actor_pool_name()}"
                + (within if never else f" within {deadline.seconds:g} s")
                + self._why(reservations)
            )
            raise self._short(message, InsufficientSlicesError)
        finally:
            reservations.close()
            request_bundles(self._shape.bundles() * len(self._actor_pool))

    def should_scale_up_multislice(self, valid_sizes: Sequence[int]) -> bool:
        """Return whether to try a larger size: the last attempt must be at least a minute ago."""
        self._last_scale_check_ts = time.time()
        if not any(size > len(self._actor_pool) for size in valid_sizes):
            return False
        last = self._last_scale_ts
        return last is None or self._last_scale_check_ts - last >= SCALE_UP_SECONDS_MIN

    def prepare_all_slices(self, timeout: float | None = None) -> None:
        """Reserve all hosts of all slices; a slice that is unhealthy is replaced first.

        Args:
            timeout: Maximum seconds for the whole call; None: `slice_start_seconds_max`.

        Raises:
            SlicesError: The pool is empty, or a slice is unhealthy and may not be replaced
                (`EFORMER_SAFE_GATHER=0`).
            InsufficientSlicesError: An unhealthy slice cannot be replaced.
            SliceDegraded: An unhealthy slice that has lost hosts cannot be replaced.
            SliceTimeoutError: The hosts of a slice are not ready in time.
            HostUnhealthyError: A slice was lost during the call.
        """
        deadline = Deadline(self._settings.slice_start_seconds_max if timeout is None else timeout)
        wanted = len(self._actor_pool)
        unhealthy = self._remove_unhealthy_members_from_actor_pool()
        if unhealthy and not self._settings.safe_gather:
            names = ", ".join(each.actor_info.slice_name for each in unhealthy)
            raise self._short(f"{self.get_actor_pool_name()} has lost {names}", SlicesError)
        if not wanted:
            raise SlicesError("No SliceActors available after pruning.")
        if unhealthy:
            self.scale_multislice(wanted, deadline.left)
        self._settle(len(self._actor_pool), [])
        request_bundles(self._host_bundles())
        seconds = deadline.left
        calls = [member.actor.prepare_hosts.remote(seconds) for member in self._actor_pool]
        infos = self._answers(calls, seconds + ANSWER_SECONDS)
        for slot, info in enumerate(infos):
            self._slots[slot] = ActorPoolMember(self._slots[slot].actor, info)
        self._publish()

    def multislice_infos(self) -> list[MultisliceInfo]:
        """Return for each slice the address of the coordinator and the slice's number."""
        infos = [member.actor_info for member in self._actor_pool]
        port = self._settings.coordinator_port
        first = infos[0].ip_address if infos else ""
        return [MultisliceInfo(first, index, len(infos), port) for index in range(len(infos))]

    def execute_on_each_slice(
        self,
        remote_fn: UserFunction,
        env: Mapping[str, RayValue] | None = None,
        runtime_env: Mapping[str, RayValue] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[list[RayValue]]:
        """Run a function on all hosts; return for each slice the references of its hosts.

        Args:
            remote_fn: A function, or Ray's remote function.
            env: Environment variables.
            runtime_env: Ray's runtime environment.
            timeout: Maximum seconds for each task; None: no limit.
        """
        calls = self.start_on_hosts(remote_fn, env=env, runtime_env=runtime_env, timeout=timeout)
        return [[call.ref for call in calls_of_slice] for calls_of_slice in calls]

    def execute_on_each_host_flat(
        self,
        remote_fn: UserFunction,
        env: Mapping[str, RayValue] | None = None,
        runtime_env: Mapping[str, RayValue] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[RayValue]:
        """Run a function on all hosts, and return one flat list of references."""
        nested = self.execute_on_each_slice(remote_fn, env, runtime_env, timeout=timeout)
        return [ref for refs in nested for ref in refs]

    schedule_on_each_host = execute_on_each_host_flat

    def execute_on_each_host(
        self,
        fn: UserFunction,
        *args: RayValue,
        env: Mapping[str, RayValue] | None = None,
        timeout: float | None = None,
        **kwargs: RayValue,
    ) -> list[list[RayValue]]:
        """Run a function on all hosts; return for each slice the results of its hosts.

        Args:
            fn: A function, or Ray's remote function.
            *args: Positional arguments of the function.
            env: Environment variables.
            timeout: Maximum seconds for all tasks together; None: no limit.
            **kwargs: Keyword arguments of the function.

        Raises:
            HostTaskError: A task failed, and all others were cancelled; the error has slice and
                host.
            SliceTimeoutError: The time limit passed, and all tasks were cancelled.
        """
        calls = self.start_on_hosts(fn, args, kwargs, env=env)
        return collect(calls, timeout, self._settings.task_cancel_seconds_max)

    def start_on_hosts(
        self,
        function: UserFunction,
        args: tuple[RayValue, ...] = (),
        kwargs: Mapping[str, RayValue] | None = None,
        *,
        env: Mapping[str, RayValue] | Callable[[int, int], Mapping[str, RayValue]] | None = None,
        runtime_env: Mapping[str, RayValue] | None = None,
        timeout: float | None = None,
        hosts_max: int | None = None,
    ) -> list[list[HostCall]]:
        """Prepare all slices, and start a function on all hosts.

        Args:
            function: A function, or Ray's remote function.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.
            env: Environment variables, or a function that returns them for a slice and a host.
            runtime_env: Ray's runtime environment.
            timeout: Maximum seconds for each task; None: no limit.
            hosts_max: Maximum hosts of each slice, from the first host on; None: all.
        """
        function = plain(function)
        hosts = self._hosts()
        remote = ray.put(function)
        return [
            [
                HostCall(
                    host.run_remote_fn.remote(
                        remote,
                        f_args=args,
                        f_kwargs=dict(kwargs or {}),
                        runtime_env=runtime_env,
                        env=env(index, host_id) if callable(env) else env,
                        timeout=timeout,
                    ),
                    host,
                    index,
                    self._slots[index].actor_info.slice_name,
                    host_id,
                )
                for host_id, host in enumerate(hosts_of_slice[:hosts_max])
            ]
            for index, hosts_of_slice in enumerate(hosts)
        ]

    def drain_actor_pool(self) -> None:
        """Shut down all slices, kill those that remain, and free every reservation."""
        reserved = bool(self._reservations)
        super().drain_actor_pool()
        self._slots = {}
        for each in self._reservations:
            each.close()
        self._reservations = []
        if reserved:
            request_bundles([])

    def _hosts(self) -> list[list[RayValue]]:
        """Prepare all slices, and return the actors of their hosts.

        Ray may notice the loss of a node only after this call has begun, so this method tries a
        second time.
        """
        for again in (True, False):
            try:
                self.prepare_all_slices()
                calls = [member.actor.ensure_host_pool.remote() for member in self._actor_pool]
                seconds = self._settings.host_health_seconds_max + ANSWER_SECONDS
                return self._answers(calls, seconds + self._settings.health_check_seconds_max)
            except HostUnhealthyError as error:
                lost = self._lost_slices()
                if not lost:
                    raise
                if not again:
                    raise SliceDegraded("; ".join(map(str, lost)), lost) from error
        raise AssertionError("the second attempt returns or raises")

    @property
    def _shape(self) -> Shape:
        if self._given is None:
            raise ValueError("a pool needs a tpu_type, such as 'v4-8', or shape=GpuSlices(…)")
        return self._given

    def _wait(
        self, reservations: Reservations, size: int, held: int, share: Deadline, *, last: bool
    ) -> bool:
        """Wait until the pool has `size` slices; return whether it has them.

        Shortly after its start, Ray does not know yet how many slices its cluster can hold; later,
        the cluster may lose hosts.
        """
        report = Deadline(min(share.left, _REPORT_SECONDS_MAX))
        joining: Deadline | None = None
        while share.left:
            possible = self._most()
            if possible is None or size <= possible:
                joining = None
            else:
                joining = joining or Deadline(self._joining_seconds(size, possible, last=last))
                if not joining.left:
                    return False
            pause = 1 if possible is None and report.left else self._settings.scale_poll_seconds
            seconds = min(share.left, pause, share.left if joining is None else joining.left)
            if reservations.wait(size - held, Deadline(seconds)):
                return True
        return False

    def _joining_seconds(self, size: int, possible: int, *, last: bool) -> float:
        """Return the seconds to wait for more nodes until `size` slices fit; 0: do not wait."""
        name = self.get_actor_pool_name()
        logger.warning("%s: %s slices are wanted; there is room for %s", name, size, possible)
        may_come = last and (possible or self._had_slices or self._degraded_slices())
        return self._settings.host_health_seconds_max if may_come else 0

    def _most(self) -> int | None:
        """Return the largest number of slices that the cluster can hold; None if unknown."""
        without = {each.slice_name for each in self._degraded_slices()}
        return slices_possible(self._shape, list(alive_nodes().values()), without)

    def _degraded_slices(self) -> list[DegradedSlice]:
        """Return the slices of the cluster that lack hosts, and so do not count as available."""
        if self._settings.moderate:
            return []
        return find_degraded(self._shape, list(alive_nodes().values()))

    def _lost_slices(self) -> list[DegradedSlice]:
        """Return the slices of the pool with dead nodes, as far as Ray has noticed."""
        alive, known = alive_nodes(), addresses()
        placed = {each.actor: each.node_ids for each in self._reservations}
        found = []
        for member in self._actor_pool:
            info = member.actor_info
            nodes = info.node_ids or placed.get(member.actor, ())
            lost = tuple(known.get(node, node) for node in nodes if node not in alive)
            here = tuple(alive[node].ip for node in nodes if node in alive)
            if lost:
                found.append(DegradedSlice(info.slice_name, info.num_hosts, here, lost))
        return found

    def _short(self, message: str, kind: type[SlicesError]) -> SlicesError:
        """Return the error for too few slices: `SliceDegraded` if some slices lost hosts."""
        each_once = {each.slice_name: each for each in [*self._losses, *self._degraded_slices()]}
        if not each_once:
            return kind(message)
        degraded = list(each_once.values())
        return SliceDegraded("; ".join([message, *map(str, degraded)]), degraded)

    def _why(self, reservations: Reservations) -> str:
        return f"; last error: {reservations.trouble}" if reservations.trouble else ""

    def _settle(self, size: int, new: list[Reservation]) -> None:
        """Fill free numbers below `size`: first with slices of higher numbers, then with new ones.

        All other slices of higher numbers end.
        """
        self._had_slices = self._had_slices or size > 0
        self._losses = []
        above = sorted(slot for slot in self._slots if slot >= size)
        for slot in range(size):
            if slot in self._slots:
                continue
            if above:
                self._slots[slot] = self._slots.pop(above.pop(0))
            else:
                taken = new.pop(0)
                assert taken.member is not None
                self._slots[slot] = taken.member
                self._reservations.append(taken)
        surplus = [self._slots.pop(slot) for slot in above]
        self._publish()
        self._dismiss(surplus)

    def _publish(self) -> None:
        """Publish the pool's members, sorted by their numbers."""
        self._actor_pool = [self._slots[slot] for slot in sorted(self._slots)]

    def _remove_unhealthy_members_from_actor_pool(self) -> list[ActorPoolMember[SliceInfo]]:
        lost = self._lost_slices()  # Before their reservations are freed.
        unhealthy = super()._remove_unhealthy_members_from_actor_pool()
        gone = {member.actor_info.slice_name for member in unhealthy}
        self._losses += [each for each in lost if each.slice_name in gone]
        members = {id(member) for member in self._actor_pool}
        self._slots = {slot: each for slot, each in self._slots.items() if id(each) in members}
        self._free_ended_strays()
        return unhealthy

    def _free_ended_strays(self) -> None:
        """Free the reservations of ended slices that are not members of the pool."""
        members = {member.actor for member in self._actor_pool}
        strays = [each for each in self._reservations if each.actor not in members]
        begun = [each for each in strays if ray.wait([each.answer], timeout=0)[0]]
        checks = [each.actor.healthy.remote() for each in begun]
        answers = outcomes(checks, self._settings.health_check_seconds_max)
        for each, answer in zip(begun, answers, strict=True):
            if answer is not True:
                each.close()
                self._reservations.remove(each)

    def _end(self, member: ActorPoolMember[SliceInfo]) -> None:
        """Kill the actors of a slice and of its hosts, and free the reservation."""
        kill(member.actor)
        for each in [each for each in self._reservations if each.actor == member.actor]:
            each.close()
            self._reservations.remove(each)

    def _host_bundles(self) -> list[dict[str, float]]:
        """Return the bundles of the hosts of all slices, for the autoscaler."""
        if isinstance(self._shape, GpuSlices):
            return self._shape.bundles() * len(self._actor_pool)
        infos = [member.actor_info for member in self._actor_pool]
        return [{info.slice_name: 1} for info in infos for _ in range(info.num_hosts)]

    def _answers(self, calls: list[RayValue], seconds: float) -> list[RayValue]:
        """Return the answers of all slices to a call."""
        answers = outcomes(calls, seconds)
        for slot, answer in enumerate(answers):
            if not isinstance(answer, Exception):
                continue
            cause = getattr(answer, "cause", None) or answer  # Without the text that Ray adds.
            where = f"slice {slot} ({self._slots[slot].actor_info.slice_name}): {cause}"
            if isinstance(answer, SliceTimeoutError):
                raise SliceTimeoutError(where) from answer
            raise HostUnhealthyError(where) from answer
        return answers


def _sizes(num_slices: int | Sequence[int]) -> list[int]:
    """Return the sizes of the pool to try, the largest first."""
    sizes = list(num_slices) if isinstance(num_slices, Iterable) else [num_slices]
    if not sizes:
        raise ValueError("valid sizes list is empty")
    for size in sizes:
        if not isinstance(size, numbers.Integral) or size <= 0:
            raise ValueError(f"Target slice count must be > 0 and whole, got {size!r}")
    return sorted(set(sizes), reverse=True)

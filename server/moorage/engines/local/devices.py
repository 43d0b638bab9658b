"""Which processors and GPUs of this machine a workload is bound to.

A lease names its GPUs itself; processors have no names in a placement, and a user of the library
names neither. Both are handed out here, the least used processors first.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from moorage.engines.base import Order, UnsupportedSpecError

__all__ = ["Devices", "Grant"]

_CPU_MILLI: Final = 1000
_WHOLE_MILLI: Final = 1000


@dataclass(frozen=True, slots=True)
class Grant:
    """What one workload is bound to.

    Args:
        cpus: Processors; empty for any.
        gpus: Ids of the devices it may see; None where it may see what the daemon sees.
        environment: The variables that say so.

    """

    cpus: list[int] = field(default_factory=list[int])
    gpus: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])


class Devices:
    """The processors and GPUs of this machine.

    Args:
        gpus: Ids of the GPUs that may be handed out to workloads without a lease.

    """

    def __init__(self, gpus: Iterable[str] = ()) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._gpus = list(gpus)
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}

    def take(self, order: Order) -> Grant:
        """Choose for a workload. Doing it again gives the same.

        Raises:
            UnsupportedSpecError: It wants more than this machine has, or has left.

        """
        with self._lock:
            there = self._grants.get(order.id)
            if there is not None:
                return there
            wanted = getattr(order.spec, "cpu_count", None)
            share = order.placement[0] if order.placement else None
            if wanted is None and share is not None and share.cpu_milli:
                wanted = share.cpu_milli / _CPU_MILLI
            cpus = self._choose(wanted)
            environment: dict[str, str] = {}
            if share is not None:
                gpus = list(share.gpus)
                if share.gpu_milli < _WHOLE_MILLI:
                    percentage = str(max(1, share.gpu_milli * 100 // _WHOLE_MILLI))
                    environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percentage
            elif isinstance(count := getattr(order.spec, "gpus", None), int):
                gpus = self._free_gpus(count)
            else:
                gpus = None
            if gpus is not None:
                # An empty list hides all of them: what holds none must not use any.
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
                environment["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus) or "void"
            grant = self._grants[order.id] = Grant(cpus, gpus, environment)
            return grant

    def restore(self, workload: str, cpus: Collection[int], gpus: Collection[str] | None) -> None:
        """Note what a workload of an earlier daemon is bound to."""
        with self._lock:
            grant = Grant(list(cpus), None if gpus is None else list(gpus))
            self._grants.setdefault(workload, grant)

    def resize(self, workload: str, cpu_count: float) -> list[int]:
        """Choose anew how many processors a workload is bound to.

        Raises:
            UnsupportedSpecError: This machine has fewer.

        """
        with self._lock:
            before = self._grants.pop(workload, Grant())
            try:
                cpus = self._choose(cpu_count)
            except UnsupportedSpecError:
                self._grants[workload] = before
                raise
            self._grants[workload] = Grant(cpus, before.gpus, before.environment)
            return cpus

    def give(self, workload: str) -> None:
        """Take back what a workload was bound to. A second time does nothing."""
        with self._lock:
            self._grants.pop(workload, None)

    def _choose(self, wanted: float | None) -> list[int]:
        """Return the processors that the fewest workloads are bound to."""
        if wanted is None:
            return []
        if wanted <= 0:
            raise UnsupportedSpecError(f"cpu_count: expected a number above 0, not {wanted!r}")
        count = math.ceil(wanted)
        if count > len(self._cpus):
            reason = f"cpu_count: this machine has {len(self._cpus)} processors, not {count}"
            raise UnsupportedSpecError(reason)
        load = Counter(cpu for grant in self._grants.values() for cpu in grant.cpus)
        return sorted(sorted(self._cpus, key=lambda cpu: (load[cpu], cpu))[:count])

    def _free_gpus(self, count: int) -> list[str]:
        used = {gpu for grant in self._grants.values() for gpu in grant.gpus or ()}
        free = [gpu for gpu in self._gpus if gpu not in used]
        if count > len(free):
            reason = f"gpus: {count} wanted, {len(free)} of this machine's {len(self._gpus)} free"
            raise UnsupportedSpecError(reason)
        return free[:count]

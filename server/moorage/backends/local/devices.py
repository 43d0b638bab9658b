"""Binds workloads to processors and GPUs of this machine, by a slot pool.

A lease names its GPUs, but not its processors; a user of the library names neither. The pool
chooses devices that are not named. The core promises each GPU of a node once, but one machine may
be registered as two nodes. So this module books shares on the physical device, as it was at the
workload's start, whatever its present names (`backends.local.gpus.Device`). A workload whose share
would overbook a device is not started.
"""

import contextlib
import importlib.util
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moorage.backends.base import BackendError, Order, UnsupportedSpecError
from moorage.backends.local.gpus import Device, device_of, find_device, look_again
from moorage.backends.spec_fields import CPUS_MAX
from moorage.extras import install_command
from moorage.model import DeviceId, Share
from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots import ResourceUnavailable, SlotsError, make_resource_pool

_WHOLE_MILLI: Final = 1000
_ROUNDING: Final = 1e-6

_LEASED: Final = "leased"
DEVICE_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA number GPUs as NVML and our ids do; by default, CUDA's first GPU is the fastest."""

Rows = dict[str, list[JsonObject]]
"""A workload's devices, as JSON: `{"cpus": [{"id", "slots"}], "gpus": […]}` from the slot pool.

Devices of its lease: `{"leased": [{"id", "slots", "of", "device"}]}`. `of` is the leased node, and
`device` the GPU at the start as `[GPU, MIG instance]`, if that was known."""


@dataclass(frozen=True, slots=True)
class DeviceBinding:
    """The devices that one workload is bound to.

    Args:
        rows: The bound devices, as `Rows`.
        environment: The variables that show its GPUs to the workload.
        gpus: Ids of its GPUs.
    """

    rows: Rows = field(default_factory=Rows)
    environment: dict[str, str] = field(default_factory=dict[str, str])
    gpus: tuple[str, ...] = ()

    @property
    def cpus(self) -> list[int]:
        """Numbers of the processors that the workload is bound to; empty if it may use any."""
        return sorted({int(row["id"]) for row in self.rows.get("cpus", ())})

    @property
    def cpu_count(self) -> float:
        """The number of processors that the workload is bound to; it may have a fraction."""
        return float(sum(row["slots"] for row in self.rows.get("cpus", ())))


class Devices:
    """Binds workloads to processors and GPUs of this machine, and frees them again.

    Args:
        gpus: Ids of the GPUs for workloads without a lease.
        held: Devices of workloads that an earlier daemon started, by workload.
    """

    def __init__(self, gpus: Iterable[str], held: Mapping[str, Rows]) -> None:
        self._pool = make_resource_pool({"gpu_ids": list(gpus)})
        self._lock = threading.Lock()
        self._held: dict[str, Rows] = {}
        self._adopted: Counter[tuple[str, str]] = Counter()
        self._adopt(held)

    def take(self, order: Order) -> DeviceBinding:
        """Bind a workload to devices; a second call returns the same devices.

        Raises:
            UnsupportedSpecError: This machine has fewer devices than requested.
            BackendError: Too few devices are free now.
        """
        share = order.placement[0] if order.placement else None
        cpus = getattr(order.spec, "cpu_count", None)
        if cpus is None and share is not None and share.cpu_milli:
            cpus = share.cpu_milli / 1000
        wanted = _cpus(cpus)
        count = getattr(order.spec, "gpus", None)
        environment: dict[str, str] = {}
        if share is None and isinstance(count, int):
            wanted += [{"type": "gpus"}] * count
        with self._lock:
            look_again()
            leased = _leased_gpus(order, share)
            rows = self._held.get(order.id)
            if rows is None:
                named = getattr(order.spec, "cpu_count", None) is not None
                rows = self._check_out(wanted, must=share is None, could=share is None or named)
                try:
                    self._refuse_twice(leased or _whole(rows))
                except BackendError:
                    self._check_in(rows)
                    raise
                rows = self._held[order.id] = rows | ({_LEASED: leased} if leased else {})
        gpus = None
        if share is not None:
            gpus = tuple(row["id"] for row in leased)
            if gpus and share.gpu_milli < _WHOLE_MILLI:
                percentage = max(1, share.gpu_milli * 100 // _WHOLE_MILLI)
                environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
        elif isinstance(count, int):
            gpus = tuple(str(row["id"]) for row in rows.get("gpus", ()))
        if gpus is not None:
            environment |= _visible(leased or [{"id": gpu} for gpu in gpus])
        return DeviceBinding(rows, environment, gpus or ())

    def environment(self, workload: str) -> dict[str, str]:
        """Return variables with the present names of a workload's GPUs; {} if none changed."""
        with self._lock:
            look_again()
            held = [row for row in self._held.get(workload, {}).get(_LEASED, ()) if "device" in row]
            try:
                named = [{**row, "id": find_device(row["id"], _device_of(row))[0]} for row in held]
            except LookupError:
                return {}
            return {} if named == held else _visible(named)

    def gpus_in_use(self) -> frozenset[str]:
        """Return all names, in lower case, of GPUs and MIG instances that workloads have."""
        with self._lock:
            rows = [
                row
                for each in self._held.values()
                for row in (*each.get(_LEASED, ()), *each.get("gpus", ()))
            ]
        names = {str(row["id"]) for row in rows}
        names |= {(row["device"][1] or row["device"][0]) for row in rows if row.get("device")}
        return frozenset(name.lower() for name in names)

    def cpu_count(self, workload: str) -> float | None:
        """Return the number of processors that a workload is bound to; None if it may use any."""
        with self._lock:
            return DeviceBinding(self._held.get(workload, {})).cpu_count or None

    def resize(self, workload: str, cpu_count: float | None) -> DeviceBinding:
        """Bind a workload to new processors; None removes the binding. An error changes nothing.

        Raises:
            UnsupportedSpecError: This machine has fewer processors.
            BackendError: Too few processors are free now.
        """
        wanted = _cpus(cpu_count)
        with self._lock:
            before = self._held.get(workload, {})
            others = {kind: rows for kind, rows in before.items() if kind != "cpus"}
            self._check_in({"cpus": before.get("cpus", [])})
            try:
                rows = self._check_out(wanted, must=True, could=True)
            except BackendError:
                cpus = _cpus(len(before.get("cpus", ())) or None)
                self._held[workload] = {**others, **self._check_out(cpus, must=False, could=False)}
                raise
            self._held[workload] = {**others, **rows}
            return DeviceBinding(self._held[workload])

    def give(self, workload: str) -> None:
        """Take back the devices of a workload. A second call does nothing."""
        with self._lock:
            self._check_in(self._held.pop(workload, {}))

    def _refuse_twice(self, wanted: Sequence[JsonMapping]) -> None:
        """Refuse a workload's devices if other workloads leave too small a share of them."""
        for row in wanted:
            left = 1.0
            for workload, rows in self._held.items():
                for held in (*rows.get(_LEASED, ()), *_whole(rows)):
                    left -= _part_of(row, held)
                    if left + _ROUNDING < float(row["slots"]):
                        raise _twice(row, workload, held)

    def _check_out(self, members: Sequence[JsonMapping], *, must: bool, could: bool) -> Rows:
        """Check devices out of the slot pool; leave out optional devices that are not free.

        Args:
            members: The requested devices, as the pool takes them.
            must: Whether to raise an error if the devices are not free now.
            could: Whether to raise an error if this machine has too few devices, free or held.
        """
        if not members:
            return {}
        try:
            has = self._pool.accommodates(members)
            if could and not has:
                reason = f"this machine does not have the requested resources: {has.reason}"
                raise UnsupportedSpecError(f"{reason}{self._unseen(members)}")
            return {kind: list(rows) for kind, rows in self._pool.checkout(members).items()}
        except ResourceUnavailable as error:
            if must:
                raise BackendError(
                    f"this machine does not have the requested resources free now: {error}"
                ) from error
        except SlotsError as error:
            if must:
                raise UnsupportedSpecError(
                    f"this machine does not have the requested resources: {error}"
                ) from error
        return {}

    def _unseen(self, members: Sequence[JsonMapping]) -> str:
        """Return a hint to install NVML, if a request wants GPUs and this machine shows none."""
        wanted = any(each["type"] == "gpus" for each in members)
        if wanted and not self._pool.count("gpus") and importlib.util.find_spec("pynvml") is None:
            return f"; to find NVIDIA GPUs: {install_command('nvml')}"
        return ""

    def _check_in(self, rows: Rows) -> None:
        """Return devices to the slot pool, except those that another workload also has.

        Workloads of an earlier daemon may share a device; see `_adopt`.
        """
        for kind, each in rows.items():
            if kind == _LEASED:
                continue
            for row in each:
                place = (kind, str(row["id"]))
                if self._adopted[place]:
                    self._adopted[place] -= 1
                    if self._adopted[place]:
                        continue
                self._pool.checkin({kind: [row]})

    def _adopt(self, held: Mapping[str, Rows]) -> None:
        """Take the devices of an earlier daemon's workloads out of the slot pool, as whole devices.

        The pool, not its caller, chooses devices. So this method checks all devices out, and then
        checks those in again that no workload has.
        """
        for workload, rows in held.items():
            self._held[workload] = {
                kind: [row if kind == _LEASED else {**row, "slots": 1} for row in each]
                for kind, each in rows.items()
            }
            for kind, each in rows.items():
                if kind != _LEASED:
                    self._adopted.update({(kind, str(row["id"])) for row in each})
        if not self._adopted:
            return
        kinds = [kind for kind in self._pool.types for _ in range(self._pool.count(kind))]
        everything = self._pool.checkout([{"type": kind} for kind in kinds])
        for kind, each in everything.items():
            rest = [row for row in each if not self._adopted[kind, str(row["id"])]]
            with contextlib.suppress(ValueError):
                self._pool.checkin({kind: rest})
        known = {(kind, str(row["id"])) for kind, each in everything.items() for row in each}
        for place in self._adopted.keys() - known:  # Devices that have vanished.
            del self._adopted[place]
        for rows in self._held.values():
            for kind, each in rows.items():
                if kind != _LEASED:
                    each[:] = [row for row in each if (kind, str(row["id"])) in known]


def _whole(rows: Rows) -> list[JsonObject]:
    """Return the rows of the pool's GPUs as whole GPUs: the pool never divides a GPU."""
    return [{**row, "slots": 1.0} for row in rows.get("gpus", ())]


def _leased_gpus(order: Order, share: Share | None) -> list[JsonObject]:
    """Return the GPUs of this machine that a lease holds, under their present ids.

    Raises:
        BackendError: This machine lacks a GPU of the lease.
    """
    if share is None:
        return []
    of, slots = f"{share.cluster_id}/{share.node_id}", share.gpu_milli / _WHOLE_MILLI
    devices = next(iter(order.devices), ()) or [DeviceId()] * len(share.gpus)
    rows: list[JsonObject] = []
    for gpu, meant in zip(share.gpus, devices, strict=True):
        try:
            name, device = find_device(gpu, meant)
        except LookupError:
            raise BackendError(
                f"GPU {gpu} of {of} is {meant.uuid}, which this machine does not have at present; "
                "register the machine again"
            ) from None
        known = {} if device is None else {"device": [*device]}
        rows.append({"id": name, "slots": slots, "of": of, **known})
    return rows


def _part_of(wanted: JsonMapping, held: JsonMapping) -> float:
    """Return the share of the wanted device that `held` takes, from 0 to 1."""
    known = "device" in wanted and "device" in held
    one, other = (_device(row, known=known) for row in (wanted, held))
    if one.gpu.lower() != other.gpu.lower():
        return 0.0
    if one.instance.lower() == other.instance.lower():
        return float(held["slots"])
    # A MIG instance is part of its GPU: a holder of either excludes users of the other.
    return 0.0 if one.instance and other.instance else 1.0


def _device_of(row: JsonMapping) -> DeviceId:
    gpu, instance = row["device"]
    return DeviceId(instance or gpu, gpu if instance else "")


def _device(row: JsonMapping, *, known: bool) -> Device:
    """Return the device of a row: the recorded one if known, else the present one with its id."""
    return Device(*row["device"]) if known else device_of(str(row["id"]))


def _visible(rows: Sequence[JsonMapping]) -> dict[str, str]:
    """Return the variables that show these GPUs, and no others, to a workload."""
    # An empty list hides all GPUs: a lease without GPUs must not use any.
    names = ",".join(str(row["id"]) for row in rows)
    # CUDA accepts an instance only by its UUID.
    cuda = ",".join(str(row.get("device", ("", ""))[1] or row["id"]) for row in rows)
    return {"CUDA_VISIBLE_DEVICES": cuda, "NVIDIA_VISIBLE_DEVICES": names or "void"}


def _twice(row: JsonMapping, workload: str, held: JsonMapping) -> BackendError:
    of, other = row.get("of"), held.get("of")
    reason = f"GPU {row['id']} of this machine is in use by the workload {workload}"
    if other and of and other != of:
        return BackendError(
            f"{reason}, which has it as one of {other}, not of {of}: the same machine is registered"
            " twice; take one of the two nodes out of its cluster"
        )
    return BackendError(f"{reason}; release the lease of that workload, or wait until it ends")


def _cpus(count: float | None) -> list[JsonObject]:
    """Return the pool request for some processors; the last one may be a fraction."""
    if count is None:
        return []
    if not 0 < count <= CPUS_MAX:
        raise UnsupportedSpecError(f"cpu_count: expected a number above 0, not {count}")
    whole, share = divmod(count, 1)
    members: list[JsonObject] = [{"type": "cpus", "slots": 1}] * int(whole)
    return [*members, {"type": "cpus", "slots": share}] if share else members

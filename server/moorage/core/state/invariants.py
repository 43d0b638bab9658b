"""Invariants of the state between any two turns."""

from collections import Counter

from moorage.core.state.accounts import Accounts
from moorage.core.state.state import RELEASED, State
from moorage.core.state.tenant_loads import TenantLoads
from moorage.model import DEVICE, GPU_MILLI
from moorage.policy import Fleet


def check(state: State) -> None:
    """Assert the invariants of the state between two turns.

    The check takes time proportional to the state's size. The first invariant: the leases on a
    device hold at most its 1000 milli in total.
    """
    held: Counter[tuple[str, str, str]] = Counter()
    for lease in state.leases.values():
        assert lease.state not in {"queued", "ended"}
        assert not lease.retry_at, "a lease that holds capacity pauses"
        assert lease.fencing <= state.fencing
        for share in lease.placement:
            for gpu in share.gpus:
                held[share.cluster_id, share.node_id, gpu] += share.gpu_milli
    assert all(milli <= GPU_MILLI for milli in held.values()), "a GPU is promised twice"
    _check_devices(state)
    devices = Counter(
        key
        for cluster in state.clusters.values()
        for node in cluster.nodes
        for key in (() if node.duplicate_of else node.identity)
        if key.startswith(DEVICE)
    )
    assert all(count == 1 for count in devices.values()), "a device counts on two nodes"
    assert len({lease.fencing for lease in state.leases.values()}) == len(state.leases)
    assert state.warm.keys() == {n for n, each in state.leases.items() if each.state == "warm"}
    released = {n for n, each in state.leases.items() if each.reason == RELEASED and each.likeness}
    assert state.resetting.keys() == released - state.warm.keys()
    assert state.noticed.keys() == {n for n, each in state.leases.items() if each.notice}
    workloads = [each.workload for each in state.leases.values() if each.provision is not None]
    assert len(set(workloads)) == len(workloads), "a workload has two leases"
    assert state.leases.keys().isdisjoint(state.ended)
    assert state.leases.keys().isdisjoint(state.waiting)
    loads = TenantLoads()
    for waiter in state.waiting.values():
        loads.add(waiter.ask)
    assert vars(state.waiting_loads) == vars(loads)
    assert all(lease.state == "ended" for lease in state.ended.values())
    for waiter in state.waiting.values():
        if (queued := waiter.lease) is not None:
            assert (queued.id, queued.state, queued.ask) == (waiter.ask.id, "queued", waiter.ask)
            assert not queued.placement, "a lease in the queue holds something"
            assert queued.expires_at == waiter.deadline
    for (tenant, _), request in state.keys.items():
        owner = state.lease(request) or state.waiting[request].ask
        assert owner.tenant == tenant
    derived = Fleet()
    derived.install(map(state.offered, state.clusters.values()))
    for lease in state.leases.values():
        for share in lease.placement:
            derived.take(share)
    state.lost.withhold(derived, state.identities.place_of)
    fleet = state.fleet
    same = (fleet.node_ids, fleet.gpu_ids) == (derived.node_ids, derived.gpu_ids)
    assert same, "the names drifted from the inventory"
    assert (fleet.gpu_model == derived.gpu_model).all(), "the columns drifted from the inventory"
    assert (fleet.gpu_total == derived.gpu_total).all()
    assert (fleet.gpu_free == derived.gpu_free).all(), "capacity drifted from the lease rows"
    assert (fleet.cpu_free == derived.cpu_free).all()
    assert (fleet.memory_free == derived.memory_free).all()
    _check_reservations(state)
    _check_usage(state)


def _check_devices(state: State) -> None:
    """Assert that no device is over-allocated, even after its node renamed it."""
    held: Counter[str] = Counter()
    parents = set[str]()
    for lease in state.leases.values():
        for share, devices in zip(lease.placement, lease.devices, strict=bool(lease.devices)):
            for device in devices:
                held[device.uuid.lower()] += share.gpu_milli
                parents.add(device.parent.lower())
    del held[""]
    assert all(milli <= GPU_MILLI for milli in held.values()), "a device is promised twice"
    assert held.keys().isdisjoint(parents), "a device is promised whole and in parts"


def _check_reservations(state: State) -> None:
    for reservation in state.reserved.by_id.values():
        for place in reservation.nodes:
            part, held = reservation.part(place), Counter[str]()
            for name, share in state.places.get(place, {}).items():
                lease = state.leases[name]
                if lease.tenant == reservation.tenant or lease.over or lease.state == "failing":
                    continue
                if lease.granted_at <= state.clock_moved_at:
                    continue  # The calendar was set: the lease keeps its time left.
                if (
                    lease.expires_at > reservation.starts_at
                    and lease.granted_at < reservation.ends_at
                ):
                    assert part is not None, "a lease runs into a reservation"
                    held.update(dict.fromkeys(share.gpus, share.gpu_milli))
            for gpu in part.gpus if part is not None else ():
                fits = held[gpu] + part.gpu_milli <= GPU_MILLI  # type: ignore[union-attr]  # The line above.
                assert fits, "a lease runs into a reservation"


def _check_usage(state: State) -> None:
    accounts = Accounts()
    for account, quota in state.accounts.quotas.items():
        accounts.set_quota(account, quota)
    for lease in state.leases.values():
        accounts.add(lease, 1, None)
    assert state.accounts.usages() == accounts.usages(), "usage drifted from the lease rows"
    rooms, again = (
        {each: known.row(each) for each in state.accounts.usages()}
        for known in (state.accounts, accounts)
    )
    assert rooms == again, "room in quotas drifted from the lease rows"

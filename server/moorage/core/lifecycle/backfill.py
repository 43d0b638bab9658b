"""Gives waiters their turns when capacity is freed, and reserves nodes for the head of the queue.

The allocator is the only caller: at the end of each turn in which capacity may have been freed.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

from moorage.core.lifecycle.preemption import Preemption
from moorage.core.lifecycle.requests import RequestLifecycle
from moorage.core.lifecycle.warm_reuse import WarmReuse
from moorage.core.queue import alternatives
from moorage.core.queue.open_requests import OpenRequests, Pending
from moorage.core.queue.order import CONSULTED_MAX
from moorage.core.queue.ranking import WakeLimits
from moorage.core.state.growth import GrownPlace
from moorage.core.state.state import State
from moorage.core.state.waiters import WaiterLine
from moorage.model import Ask, Nodes, PolicyRef, Tenant

LOOKS_MAX: Final = 64
"""Maximum checks of one tenant's waiters per turn; the other waiters are checked in later turns."""
NODES_OF_A_LOOK: Final = 256
"""Fleet size at which a check counts twice; at two times this size three times, and so on."""


class Backfill:
    """Serves the waiters of the queue, in order, when capacity is freed.

    Args:
        state: The present state, which is only read.
        requests: The open requests.
        warm: Evicts warm leases.
        lifecycle: Consults policies, grants and refuses.
        preemption: Preempts leases.
    """

    def __init__(
        self,
        state: State,
        requests: OpenRequests,
        warm: WarmReuse,
        lifecycle: RequestLifecycle,
        preemption: Preemption,
    ) -> None:
        self._state = state
        self._requests = requests
        self._warm = warm
        self._lifecycle = lifecycle
        self._preemption = preemption
        self._reserved_at = (-1, 0)
        self._led_at = -1
        """Value of `queue.changes` when the queue's head was last checked."""
        self._looks = Counter[Tenant]()
        self._spent = frozenset[Tenant]()

    @property
    def is_unfinished(self) -> bool:
        """Whether this turn reached its limit and left waiters for the next turn."""
        return bool(self._spent)

    def wake(self) -> None:
        """Consult policies for the waiters that may now be served, also those behind the head.

        At most `LOOKS_MAX` checks are made per tenant and turn, so that no tenant delays others.
        """
        self._looks.clear()
        self._spent = frozenset()
        while self._any_took_over():
            pass  # The lines have changed.

    def _any_took_over(self) -> bool:
        """Wake each line of waiters; stop and return True once the lines have changed.

        A waiter took over a warm lease, or was refused.
        """
        queue = self._requests.queue
        grown = self._state.growth.take()
        queue.grew(grown)
        if not queue:
            return False
        if (self._state.warm and self._any_before_head_took_over()) or self._lead(grown):
            return True
        queue.rethink()
        if queue.is_head_alone:
            queue.note_exhausted()
        else:
            lines = queue.servable(self._limits)
            for line in lines:
                if self._wake_line(line, queue.nodes_reserved_for(line)):
                    lines.close()
                    return True
        for ask in queue.take_over_quota():
            self._lifecycle.make_quota_room(ask)
        return False

    def _any_before_head_took_over(self) -> bool:
        """Wake the lines before the head: no nodes are reserved for requests that cannot wait."""
        queue = self._requests.queue
        head = queue.first()
        lines = queue.servable(self._limits, head)
        for line in lines if head is not None else ():
            if self._wake_line(line, queue.nodes_reserved_for(line)):
                lines.close()
                return True
        return False

    def _lead(self, grown: Collection[GrownPlace] | None) -> bool:
        """Wake the head of the queue, and reserve nodes for it while it waits.

        Args:
            grown: Places where capacity grew since the last call; None: everywhere.
        """
        queue = self._requests.queue
        head = queue.first()
        if head is None:
            queue.reserve(None, ())
            return False
        gains = self._state.gains
        ask = self._state.waiting[next(iter(head.waiters))].ask
        is_new = head is not queue.head  # The head's former exclusions no longer apply.
        is_judged = not is_new and head.refused_at == self._led_at
        is_current = self._reserved_at[1] == self._preemption.spared
        if is_judged and is_current and self._grew_for_others(ask, grown):
            head.refused_at = self._led_at = queue.changes
            self._reserved_at = gains, self._preemption.spared
            return False
        if (is_new or head.refused_at != queue.changes) and self._wake_line(head, ()):
            return True
        own = self._lifecycle.exclusions.find_on_empty(ask).by_others
        # Nodes in `own` begin a reservation before the head's lease would end.
        moved = bool(own) and not set(own).isdisjoint(queue.reservation)
        if is_new or moved or self._reserved_at != (self._state.gains, self._preemption.spared):
            if head.refused_at == queue.changes:
                capacity = self._warm.capacity(ask, ())
                if capacity is None:
                    capacity = self._preemption.capacity(ask)
                queue.reserve(head, self._lifecycle.nodes_to_reserve(ask, (), capacity))
            else:
                queue.reserve_later(head, lambda: self._nodes_for(head))
            self._reserved_at = self._state.gains, self._preemption.spared
        self._led_at = queue.changes
        return self._state.gains != gains  # A preempted lease without a workload has ended at once.

    def _nodes_for(self, head: WaiterLine) -> Nodes:
        ask = self._state.waiting[next(iter(head.waiters))].ask
        return self._lifecycle.nodes_to_reserve(ask, (), None)

    def _grew_for_others(self, ask: Ask, grown: Collection[GrownPlace] | None) -> bool:
        """Return whether capacity grew only in clusters where a request cannot be placed.

        False if quotas, warm leases or reservations make this uncertain.
        """
        state = self._state
        if grown is None or ask.candidates is None or ask.alternatives:
            return False
        if state.warm or state.resetting or state.reserved or state.accounts.quotas:
            return False
        return all(cluster not in ask.candidates for cluster, _ in grown)

    def _wake_line(self, line: WaiterLine, reserved: Nodes) -> bool:
        """Consult policies for a line's waiters; return True if a waiter left it instead."""
        oldest = (self._state.waiting[name] for name in islice(line.waiters, CONSULTED_MAX))
        idle = [
            Pending(waiter.ask, waiter.at)
            for waiter in oldest
            if self._requests.undecided.get(waiter.ask.id) is None
        ]
        self._count_looks(line, len(idle))
        groups: dict[tuple[Nodes, ...], list[Pending]] = {}  # By excluded nodes.
        for each in idle:
            found = [
                self._lifecycle.exclusions.find(x, reserved) for x in alternatives.each(each.ask)
            ]
            groups.setdefault(tuple(x.by_others for x in found), []).append(each)
        for group in groups.values():
            if any(self._lifecycle.take_over(each, reserved) for each in group):
                return True
        fitting: list[Pending] = []
        for group in groups.values():
            if self._lifecycle.settle(group[0], reserved) is None:  # A line has one demand.
                if self._any_refused(group, reserved):
                    return True
                continue
            fitting += [
                each
                for each in group
                if not each.ask.alternatives or self._lifecycle.settle(each, reserved) is not None
            ]
        if idle and not fitting:
            self._pass_over(idle[0], reserved, excluded=any(map(any, groups)))
        consulted = self._requests.undecided.waiters.get(line.of.policy, Counter[int]())
        ahead = sum(many for priority, many in consulted.items() if priority >= line.of.priority)
        for each in fitting[: max(0, CONSULTED_MAX - ahead)]:
            self._lifecycle.consult(each, self._lifecycle.exclusions.find(each.ask, reserved))
        return False

    def _any_refused(self, group: Iterable[Pending], reserved: Nodes) -> bool:
        """End warm leases for waiters that do not fit; return whether a waiter was refused."""
        refused = False
        for each in group:
            if self._warm.capacity(each.ask, reserved) is None:
                refused |= self._lifecycle.refuse_hopeless(each)
        return refused

    def _count_looks(self, line: WaiterLine, waiters: int) -> None:
        """Count checks of waiters in a line; in a large fleet, a check counts several times."""
        tenant = line.of.tenant
        each = max(1, len(line.of.alternatives)) * (1 + len(self._state.fleet) // NODES_OF_A_LOOK)
        self._looks[tenant] += waiters * each
        if self._looks[tenant] >= LOOKS_MAX:
            self._spent |= {tenant}

    def _pass_over(self, first: Pending, reserved: Nodes, *, excluded: bool) -> None:
        """Record that the first waiter of a line does not fit, or would exceed its quota."""
        queue, gains = self._requests.queue, self._state.gains
        if first.over is not None:
            queue.declined(first.ask, first.over, gains, reserved)
        else:
            queue.does_not_fit(first.ask, gains, reserved, excluded=excluded)

    def _limits(self) -> WakeLimits:
        return WakeLimits(self._policies_at_cap(), self._spent)

    def _policies_at_cap(self) -> dict[PolicyRef, int]:
        """Return the highest blocked priority of each policy at its limit of consultations."""
        capped: dict[PolicyRef, int] = {}
        for policy, consulted in self._requests.undecided.waiters.items():
            ahead = 0
            for priority in sorted(consulted, reverse=True):
                ahead += consulted[priority]
                if ahead >= CONSULTED_MAX:
                    capped[policy] = priority
                    break
        return capped

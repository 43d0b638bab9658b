"""Chooses the node that runs next, for both executors.

This module uses no clock, starts no threads and runs no tasks. An executor picks a node here, runs
the node, and records its end. Each call costs O(log n) or O(successors).

Ready nodes with equal requirements form a group: if one node of a group does not fit, no other node
of the group does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush, heapreplace
from typing import Final

BLOCKED_MAX: Final = 64
"""Maximum groups that do not fit and are skipped by one `pick` while a node runs. Groups behind
them wait for the next release. While no node runs, all groups are checked."""

PASSED_MAX: Final = 8
"""Maximum nodes that start while a group with larger requirements does not fit. After them, this
group precedes groups of better rank: else a large node might always run last."""

Admit = Callable[[int, int], bool]
"""Takes the resources of a group for one of its nodes; returns False if the resources are not
free."""

_WAITING, _READY, _RUNNING, _OVER = range(4)


class Schedule:
    """Chooses among the ready nodes of one run. Nodes and groups are numbers.

    Args:
        successors: The successors of each node.
        predecessor_counts: The number of predecessors of each node.
        ranks: The rank of each node, all different; lower ranks run sooner.
        groups: The group of each node, from 0; nodes of one group have equal requirements.
        runnable: Whether each node has a task. Nodes without a task are skipped, and delay no other
            node.
        fail_fast: Whether the descendants of a failed node are skipped; if not, they
            run.
    """

    def __init__(
        self,
        successors: Sequence[Sequence[int]],
        predecessor_counts: Sequence[int],
        ranks: list[int],
        groups: list[int],
        runnable: list[bool],
        *,
        fail_fast: bool,
    ) -> None:
        self._successors = list(successors)
        self._waiting_for = list(predecessor_counts)
        self._ranks = ranks
        self._nodes = [0] * len(ranks)
        for node, rank in enumerate(ranks):
            self._nodes[rank] = node
        self._groups = groups
        self._runnable = runnable
        self._fail_fast = fail_fast
        self._states = bytearray(len(ranks))
        self._ready: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
        # Pairs of a group's best rank and the group; stale pairs are dropped when popped.
        self._heads: list[tuple[int, int]] = []
        self._blocked: dict[int, None] = {}
        # By group: how many nodes had been picked when its best node was first refused.
        self._refused: dict[int, int] = {}
        self._passed_too_often: set[int] = set()
        self._grown: set[int] = set()
        self._picked = 0
        self.left = len(ranks)
        """Number of nodes that have not ended."""
        self.running = 0
        """Number of nodes that were picked, or granted in the queue, and have not ended."""

    def start(self) -> list[int]:
        """Make nodes without predecessors ready; return the skipped nodes."""
        skipped: list[int] = []
        free = [node for node, count in enumerate(self._waiting_for) if count == 0]
        for node in free:
            if self._states[node] == _WAITING:
                over: list[int] = []
                self._admit(node, skipped, over)
                for each in over:
                    skipped += self._resolve(each)
        return skipped

    @property
    def waiting(self) -> bool:
        """Whether a node is ready."""
        return bool(self._heads or self._blocked)

    @property
    def blocked(self) -> bool:
        """Whether a ready node does not fit."""
        return bool(self._blocked)

    def pick(self, admit: Admit) -> int | None:
        """Return the first ready node whose group fits, and mark it as running.

        Args:
            admit: Takes a group's resources. A refused group is tried again after `unblock`.
        """
        heads = self._heads
        while heads:
            rank, group = heads[0]
            ready = self._ready[group]
            if not ready or ready[0] != rank or group in self._blocked:
                heappop(heads)
            elif admit(group, self._nodes[rank]):
                heappop(ready)
                if ready:
                    heapreplace(heads, (ready[0], group))
                else:
                    heappop(heads)
                if self._refused:
                    self._refused.pop(group, None)
                node = self._nodes[rank]
                self.note_run(node)
                return node
            else:
                heappop(heads)
                self._blocked[group] = None
                self._refused.setdefault(group, self._picked)
                if self.running and len(self._blocked) >= BLOCKED_MAX:
                    return None
        return None

    def unblock(self) -> None:
        """Check every group again, after resources were freed."""
        if self._blocked:
            for group in self._blocked:
                heappush(self._heads, (self._ready[group][0], group))
            self._blocked.clear()

    def reserve(
        self, eligible: Callable[[int], bool], outsized: Callable[[int, int], bool]
    ) -> int | None:
        """Return a blocked node, which then queues for a grant.

        The node is the best one, unless a larger node was passed over `PASSED_MAX` times.

        Args:
            eligible: Returns whether a group may queue at all.
            outsized: Returns whether the first group is blocked because it needs more than the
                second.
        """
        waiting = list(filter(eligible, self._blocked))
        if not waiting:
            return None
        best = min(waiting, key=lambda each: self._ready[each][0])
        group = min(waiting, key=self._refused.__getitem__)
        if self._picked - self._refused[group] < PASSED_MAX or not outsized(group, best):
            return self.reserve_of(best)
        node = self.reserve_of(group)
        self._passed_too_often.add(node)
        return node

    def reserve_of(self, group: int) -> int:
        """Return the best ready node of a group, which then queues for a grant."""
        ready = self._ready[group]
        node = self._nodes[heappop(ready)]
        self._states[node] = _RUNNING
        self._refused.pop(group, None)
        if group not in self._blocked:
            if ready:
                heappush(self._heads, (ready[0], group))
        elif ready:
            self._refused[group] = self._picked
        else:
            del self._blocked[group]
        return node

    def grown(self) -> set[int]:
        """Return the groups in which nodes became ready since the last call."""
        grown = self._grown
        if grown:
            self._grown = set()
        return grown

    def ahead_of(self, reserved: int, groups: Iterable[int]) -> tuple[int, int] | None:
        """Return the best ready node of some groups, and its group, if it precedes a reserved node.

        Return None if no node precedes it, or if the reserved node was passed over too often.
        """
        heads = ((self._ready[each][0], each) for each in groups if self._ready[each])
        rank, group = min(heads, default=(len(self._ranks), -1))
        if rank > self._ranks[reserved] or reserved in self._passed_too_often:
            return None
        return self._nodes[rank], group

    @property
    def blocked_groups(self) -> Iterable[int]:
        """The groups that are ready and do not fit."""
        return self._blocked.keys()

    def worst(self, reserved: Iterable[int]) -> int:
        """Return the node that would run last."""
        return max(reserved, key=self._ranks.__getitem__)

    def again(self, node: int) -> None:
        """Make a node ready for another attempt."""
        self.running -= 1
        self.make_ready(node)

    def note_end(self, node: int, *, well: bool) -> list[int]:
        """Note the end of a node; return the nodes that are skipped after it, in order."""
        self.running -= 1
        self._finish(node)
        if well or not self._fail_fast:
            return self._resolve(node)
        return self._skip_after(node)

    def note_restored(self, node: int) -> None:
        """Note, before `start`, that a node completed in an earlier run."""
        self._finish(node)
        for successor in self._successors[node]:
            self._waiting_for[successor] -= 1

    def waits(self, node: int) -> bool:
        """Return whether a node waits for a predecessor."""
        return self._states[node] == _WAITING

    def grow(
        self,
        group: int,
        edges: Sequence[tuple[Sequence[int], Sequence[int]]],
        names: Sequence[str],
    ) -> list[int]:
        """Add nodes of one group, last in rank; return those without open predecessors.

        Args:
            group: The group of the new nodes.
            edges: For each new node its predecessors and successors; new nodes get the next
                numbers.
            names: The names of all nodes, for the error.

        Raises:
            ValueError: The edges would form a cycle, which the message names; the schedule is
                unchanged.
        """
        first = len(self._states)
        following: dict[int, list[int]] = {}
        for number, (before, after) in enumerate(edges, first):
            following.setdefault(number, []).extend(after)
            for node in before:
                following.setdefault(node, []).append(number)
        self._refuse_cycles(range(first, first + len(edges)), following, names)
        for number in range(first, first + len(edges)):
            self._successors.append([])
            self._waiting_for.append(0)
            self._ranks.append(number)
            self._nodes.append(number)
            self._groups.append(group)
            self._runnable.append(True)
            self._states.append(_WAITING)
            self.left += 1
        for node, added in following.items():
            if self._states[node] != _OVER:
                self._successors[node] = [*self._successors[node], *added]
                for successor in added:
                    self._waiting_for[successor] += 1
        return [n for n in range(first, len(self._states)) if not self._waiting_for[n]]

    def drop(self, node: int, *, failed: bool) -> list[int]:
        """Remove a waiting node; return the nodes skipped after it.

        If `failed`, its descendants are treated as those of a failed node; if not, they no longer
        wait for it.
        """
        self._finish(node)
        return self._skip_after(node) if failed else self._resolve(node)

    def _refuse_cycles(
        self, added: Iterable[int], following: Mapping[int, list[int]], names: Sequence[str]
    ) -> None:
        reached: dict[int, list[int]] = {}
        left = list(added)
        while left:
            node = left.pop()
            if node not in reached:
                own = self._successors[node] if node < len(self._successors) else ()
                reached[node] = [*own, *following.get(node, ())]
                left += reached[node]
        try:
            TopologicalSorter(reached).prepare()
        except CycleError as error:
            cycle = [names[number] for number in reversed(error.args[1])]
            raise ValueError(f"these nodes form a cycle: {' -> '.join(cycle)}") from error

    def cancel(self) -> list[int]:
        """End all nodes that are not running; return these nodes."""
        given_up = [node for node, state in enumerate(self._states) if state < _RUNNING]
        for node in given_up:
            self._finish(node)
        for ready in self._ready:
            ready.clear()
        self._heads.clear()
        self._blocked.clear()
        self._refused.clear()
        return given_up

    def make_ready(self, node: int) -> None:
        """Make a node ready: a new node, a queued node, or a node for another attempt."""
        self._states[node] = _READY
        group, rank = self._groups[node], self._ranks[node]
        ready = self._ready[group]
        self._grown.add(group)
        heappush(ready, rank)
        if ready[0] == rank and group not in self._blocked:
            heappush(self._heads, (rank, group))

    def note_run(self, node: int) -> None:
        """Note that a node runs from now on."""
        self._states[node] = _RUNNING
        self._picked += 1
        self.running += 1

    def _finish(self, node: int) -> None:
        assert self._states[node] != _OVER, f"node {node} ended twice"
        self._states[node] = _OVER
        self.left -= 1

    def _resolve(self, node: int) -> list[int]:
        """Make nodes ready that waited only for this node; return the skipped nodes."""
        skipped: list[int] = []
        over = [node]
        waiting_for, states = self._waiting_for, self._states
        while over:
            for successor in self._successors[over.pop()]:
                left = waiting_for[successor] - 1
                waiting_for[successor] = left
                if not left and states[successor] == _WAITING:
                    self._admit(successor, skipped, over)
        return skipped

    def _admit(self, node: int, skipped: list[int], over: list[int]) -> None:
        """Make a node without open predecessors ready, or skip it if it has no task."""
        if self._runnable[node]:
            self.make_ready(node)
            return
        self._finish(node)
        skipped.append(node)
        over.append(node)

    def _skip_after(self, failed: int) -> list[int]:
        """Skip all descendants of a node; return those that were not skipped before."""
        skipped: list[int] = []
        over = [failed]
        while over:
            for successor in self._successors[over.pop()]:
                if self._states[successor] == _WAITING:
                    self._finish(successor)
                    skipped.append(successor)
                    over.append(successor)
        return skipped

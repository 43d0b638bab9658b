"""Which cell does what: routing, replacing, and what happens when one dies.

Used by `sandbox`. Work is bound to a cell as late as possible: it waits in its policy's backlog and
goes into a pipe when that cell is quick and has room, so a slow evaluation holds up only what was
already behind it. A cell's death costs exactly its head; everything behind it is sent again, to
another cell, in order. Policies share nothing here but the count of cells.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from moorage.core.facts import Refusal
from moorage.model import Code, PolicyRef, Tenant
from moorage.policy import Fleet
from moorage.sandbox.host import work as outcomes
from moorage.sandbox.host.cell_sync import World
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.circuit_breaker import CircuitBreaker
from moorage.sandbox.host.contexts import Contexts
from moorage.sandbox.host.contract import HostServices, JailError, Mode, OpenCircuit, PolicyCode
from moorage.sandbox.host.groups import Group, GroupKey
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.work import Work
from moorage.sandbox.host.zygote import ORPHANED, Death, Spawned, SpawnError
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import Limits

WATCH_SECONDS: Final = 0.005
"""How often the clocks of busy cells are looked at."""
FAULT_SECONDS: Final = 5.0
"""How long a policy that could not be loaded is refused without trying again."""


class CellPool:
    """All cells and what they are to do.

    Args:
        fleet: Read when a frame is built.
        services: Answer the cells' calls.
        limits: All bounds.
        mode: With or without the wall.
        finish: Told the outcome of every piece of work: a value, or a refusal; and the cell
            that answered, if one did.
        printed: Told what a policy printed, and at what work.
        circuits: Called when a policy's circuit opens.

    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        services: HostServices,
        limits: Limits,
        mode: Mode,
        finish: Callable[[Work, Any, Refusal | None, Cell | None], None],
        printed: Callable[[Work, str], None],
        circuits: Callable[[OpenCircuit], None],
    ) -> None:
        self.world = World(fleet)
        self.services = services
        self.limits = limits
        self.contexts = Contexts()
        self.counters: Counter[str] = Counter()
        self.spawner = Spawner(limits, mode, self._make, self._mark_all, self.counters)
        self.jailed, self.probed = self.spawner.jailed, self.spawner.probed
        self._finish = finish
        self._printed = printed
        self.circuits = CircuitBreaker(limits, self.counters, circuits)
        self._groups: OrderedDict[GroupKey, Group] = OrderedDict()
        self._group_of: dict[Cell, Group] = {}
        self._dirty: dict[GroupKey, Group] = {}
        self._pumping: asyncio.Handle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._closing = False

    def _make(self, spawned: Spawned) -> Cell:
        return Cell(spawned, self)

    async def close(self) -> None:
        """Kill every cell and the zygote; what still waited is refused. Bounded."""
        self._closing = True
        for handle in (self._pumping, self._watching):
            if handle is not None:
                handle.cancel()
        refusal = Refusal(Code.SHUTTING_DOWN, "the server is shutting down")
        for group in list(self._groups.values()):
            self._refuse_backlog(group, refusal)
        for cell in list(self.spawner.living.values()):
            for work in self._remove(cell):
                self._finish(work, None, refusal, None)
        await self.spawner.close()

    # Work ----------------------------------------------------------------------------------

    def submit(
        self, work: Work, isolation: str, *, single_use: bool = False, aside: bool = False
    ) -> Refusal | None:
        """Send work to an idle cell at once, else at the end of this turn; or say why not.

        Args:
            work: What is to be done.
            isolation: Work of one policy version shares cells where this is equal.
            single_use: A cell does one piece of work.
            aside: It must not be in the way of other work: one cell at low priority, and none
                where that would take the place of another.

        """
        now = time.monotonic()
        if (refusal := self.circuits.refusal(work, now)) is not None:
            return refusal
        ref = work.code.ref
        key = (ref.uri, ref.digest, isolation)
        group = self._groups.get(key)
        if group is None:
            self._forget_idle_groups()
            group = self._groups[key] = Group(key, work.code, single_use, aside)
        else:
            self._groups.move_to_end(key)
            if group.code is not work.code and group.code != work.code:
                self._replace_code(group, work.code)
        if group.fault is not None and now < group.fault_until:
            return group.fault
        group.fault = None
        work.submitted_at, work.fleet_version = now, self.world.fleet.version
        group.asked(work)
        cell = group.idle_cell(work, self.limits.cells_per_policy_max, now)
        if cell is not None:
            return self._begin(group, cell, work, now)
        most = self.limits.queue_max
        if (len(self._groups) > most) if single_use else group.backlog.is_full(work.tenant, most):
            self.counters["busy"] += 1
            if single_use:
                del self._groups[key]
            return outcomes.too_many(ref, self.limits)
        group.backlog.append(work)
        self._mark(group)
        return None

    def is_crowded(self, ref: PolicyRef, tenant: Tenant, isolation: str, coming: int) -> bool:
        """Tell whether work of a tenant would be one too many, with what is `coming` already."""
        most = max(self.limits.queue_max - coming, 0)
        group = self._groups.get((ref.uri, ref.digest, isolation))
        return most == 0 if group is None else group.backlog.is_full(tenant, most)

    def _begin(self, group: Group, cell: Cell, work: Work, now: float) -> Refusal | None:
        """Let an idle cell begin at once: it works while the rest of this turn is collected."""
        work.alone = group.heavy(work, now)
        refusal = cell.put(work)
        if refusal is None:
            cell.retired = group.single_use
            cell.flush()
            self.watch_soon()
        return refusal

    def settled(self, cell: Cell, *, granted: bool) -> None:
        """Note what became of a proposal of a cell for a lease."""
        if (group := self._group_of.get(cell)) is not None:
            group.settled(self.limits.cells_per_policy_max, granted=granted)

    def withdraw(self, work: Work) -> None:
        """Take back work, if it was not sent yet."""
        any(group.backlog.remove(work) for group in self._groups.values())

    def documents_changed(self, cluster_id: str) -> None:
        """Tell every cell that holds this document."""
        for cell in self._group_of:
            cell.document_changed(cluster_id)

    def cells(self) -> dict[str, int]:
        """Return the number of living cells per policy URI."""
        return dict(Counter(group.key[0] for group in self._group_of.values()))

    def watch_soon(self, within_seconds: float = WATCH_SECONDS) -> None:
        """Have the clocks looked at as long as any cell is busy."""
        if self._watching is None and not self._closing:
            self._watching = asyncio.get_running_loop().call_later(within_seconds, self._watch)

    def _forget_idle_groups(self) -> None:
        """Keep the number of groups within bounds; those without cells and work hold nothing."""
        if len(self._groups) > self.limits.cells_max * 4:
            idle = [g for g in self._groups.values() if not (g.cells or g.backlog or g.spawning)]
            for group in idle:
                del self._groups[group.key]

    def _replace_code(self, group: Group, code: PolicyCode) -> None:
        """The document's defaults changed: cells of the old ones finish what they have."""
        group.code, group.fault = code, None
        for cell in list(group.cells):
            cell.retired = True
            if not cell.sent:
                self._remove(cell)

    def _mark(self, group: Group) -> None:
        self._dirty[group.key] = group
        if self._pumping is None and not self._closing:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def _mark_all(self) -> None:
        for group in self._groups.values():
            if group.backlog:
                self._mark(group)

    def _pump(self) -> None:
        """Send what can be sent, one write per cell."""
        self._pumping = None
        dirty, self._dirty = self._dirty, {}
        now, cells_max = time.monotonic(), self.limits.cells_per_policy_max
        for group in dirty.values():
            self._refuse_stale(group, now)
            touched: dict[Cell, None] = {}
            while (turn := group.turn(cells_max, now)) is not None:
                work, cell = turn
                group.backlog.take(work)
                work.alone = group.heavy(work, now)
                refusal = group.refuse_late(work, self.world.fleet.version) or cell.put(work)
                if refusal is None:
                    touched[cell] = None
                    cell.retired = cell.retired or group.single_use
                else:
                    self._finish(work, None, refusal, None)
            if group.needs_cell(cells_max, now):
                self._need_cell(group)
            for cell in touched:
                cell.flush()
            if touched:
                self.watch_soon()

    def _refuse_stale(self, group: Group, now: float) -> None:
        """Refuse what has waited too long behind a slow policy's other consultations."""
        limit = self.limits.queue_seconds
        while stale := [w for w in group.backlog.heads() if w.submitted_at < now - limit]:
            for work in stale:
                self.counters["busy"] += 1
                group.backlog.take(work)
                self._finish(work, None, outcomes.too_slow(group.code.ref, limit), None)

    # Spawning ------------------------------------------------------------------------------

    def _need_cell(self, group: Group) -> None:
        """Get the group another cell, unless it has enough."""
        if group.aside and group.cells:
            return
        if len(group.cells) >= self.limits.cells_per_policy_max or not self._evict(group):
            return
        group.spawning += 1
        spare = self.spawner.spare()
        if spare is not None:
            self._adopt(group, spare)
            self.spawner.refill_soon()
        else:
            self.spawner.run(self._spawn_for(group))

    def _evict(self, wanting: Group) -> bool:
        """Return whether one more cell may live, after ending an idle one where that is needed."""
        spawning = sum(group.spawning for group in self._groups.values())
        # Bursts leave a quarter to policies that have no cell yet: these wait for no other's.
        reserved = self.limits.cells_max // 4 if wanting.cells else 0
        if len(self._group_of) + spawning < self.limits.cells_max - reserved:
            return True
        for group in () if wanting.aside else self._groups.values():
            for cell in group.cells:
                if not cell.sent and not group.backlog:
                    self._remove(cell)
                    self.counters["evicted"] += 1
                    return True
        return False

    async def _spawn_for(self, group: Group) -> None:
        try:
            cell = await self.spawner.blank()
        except (SpawnError, JailError) as error:
            group.spawning -= 1
            refusal = Refusal(Code.UNAVAILABLE, f"no cell can be started: {error}")
            self._refuse_backlog(group, refusal)
            return
        self._adopt(group, cell)
        await self.spawner.refill()

    def _adopt(self, group: Group, cell: Cell) -> None:
        """Make a blank cell the group's newest and load the policy."""
        group.spawning -= 1
        if cell.alive:
            group.cells.append(cell)
            if group.aside:
                cell.step_aside()
            self._group_of[cell] = group
            if group.hogs and not group.owes(time.monotonic()) and cell.demote():
                self.counters["demotions"] += 1
            cell.load(Work("load", group.code, ""), self.limits.output_bytes_max, check=False)
            cell.flush()
        self._mark(group)

    # The clock -----------------------------------------------------------------------------

    def _watch(self) -> None:
        self._watching = None
        now = time.monotonic()
        busy = [cell for cell in self.spawner.living.values() if cell.sent]
        if busy:
            # A request behind a policy that never returns waits no moment longer than it must.
            soonest = min(cell.remaining_seconds(now) for cell in busy)
            self.watch_soon(min(WATCH_SECONDS, soonest) if soonest > 0 else WATCH_SECONDS)
        for cell in busy:
            if not cell.sent:
                continue
            verdict = cell.watch(now)
            group = self._group_of.get(cell)
            if cell.slow and group is not None:
                group.took_long(cell.sent[0], now)
                if len(cell.sent) > 1 and self.limits.cells_per_policy_max > 1 and not group.aside:
                    self._resend(group, cell.take_back())
            if verdict == "overrun":
                self._overran(cell, now)
            elif verdict == "hog" and cell.demote():
                self.counters["demotions"] += 1
            if cell.slow and group is not None and group.backlog:
                self._mark(group)

    def _overran(self, cell: Cell, now: float) -> None:
        head = cell.sent[0]
        loading = head.kind == "load"
        limit = self.limits.load_seconds if loading else head.deadline_seconds(self.limits)
        self.counters["timeouts"] += 1
        self.counters["kills"] += 1
        group = self._group_of.get(cell)
        self._bury(
            cell,
            outcomes.overran(limit, head.code, "load" if loading else "answer", cell.traceback),
        )
        if group is None or loading:
            return
        group.overruns += 1
        if self.circuits.overran(head, now):
            self._refuse_open(head.code.ref, now)

    def _refuse_open(self, ref: PolicyRef, now: float) -> None:
        """Refuse what waits for a policy whose circuit is open: it would overrun, too."""
        for group in [g for g in self._groups.values() if g.key[:2] == (ref.uri, ref.digest)]:
            for work in group.backlog.clear():
                refusal = self.circuits.refusal(work, now)
                if refusal is None:
                    group.backlog.append(work)
                else:
                    self._finish(work, None, refusal, None)

    # Deaths --------------------------------------------------------------------------------

    def lost(self, cell: Cell, cause: str) -> None:
        """As in `Owner`: the channel closed, or the cell broke the protocol and is killed."""
        if self.spawner.channel_closed(cell):
            return
        if cause != "exit":
            self.counters["protocol_breaches"] += 1
            self.counters["kills"] += 1
            self._bury(cell, outcomes.crashed(cause, cell.sent[0].code.ref) if cell.sent else None)
            return
        self.counters["crashes"] += 1
        group = self._group_of.get(cell)
        if not cell.sent:
            self._bury(cell, None)
        elif cell.sent[0].kind == "load":
            works = self._detach(cell)
            self.spawner.when_ended(cell, partial(self._died, group, works))
        else:
            # How it died arrives by another way; the rest of the pipe need not wait for that.
            head, *behind = self._detach(cell)
            self._resend(group, behind)
            self.spawner.when_ended(cell, partial(self._died, group, [head]))

    def _died(self, group: Group | None, works: list[Work], death: Death) -> None:
        """The head, or all that stood behind the load of its policy, learns how a cell ended."""
        ref = works[0].code.ref
        if not death.innocent and works[0].kind == "load":
            self._fault(group, works, outcomes.crashed(f"{death.cause}, while it was loaded", ref))
        elif not death.innocent:
            self._finish(works[0], None, outcomes.crashed(death.cause, ref), None)
        else:
            self.counters["killed_outside"] += death is not ORPHANED
            refused = {work: outcomes.killed(death, work, self.limits) for work in works}
            for work, refusal in refused.items():
                if refusal is not None:
                    self._finish(work, None, refusal, None)
            self._resend(group, [work for work in works if refused[work] is None])

    def _bury(self, cell: Cell, refusal: Refusal | None) -> None:
        """Remove a cell: its head gets `refusal`, what was behind it is sent again."""
        group = self._group_of.get(cell)
        works = self._remove(cell)
        if works and works[0].kind == "load" and refusal is not None:
            self._fault(group, works, refusal)
            return
        if works and refusal is not None:
            self._finish(works.pop(0), None, refusal, None)
        self._resend(group, works)

    def _fault(self, group: Group | None, works: list[Work], refusal: Refusal) -> None:
        """A policy cannot be loaded: refuse all that waits for it, and do not try at once again."""
        for work in works:
            self._finish(work, None, refusal, None)
        if group is not None:
            group.fault, group.fault_until = refusal, time.monotonic() + FAULT_SECONDS
            self._refuse_backlog(group, refusal)
        self._wake_starving()

    def _resend(self, group: Group | None, works: list[Work]) -> None:
        again = [work for work in works if work.kind != "load" and not work.forgotten]
        if group is not None and (again or group.backlog):
            self.counters["resent"] += len(again)
            self.counters["respawns"] += 1
            group.backlog.put_back(again)
            self._groups.setdefault(group.key, group)
            self._mark(group)
        self._wake_starving()

    def _remove(self, cell: Cell) -> list[Work]:
        """Kill a cell and return what was in its pipe."""
        works = self._detach(cell)
        self.spawner.destroy(cell)
        return works

    def _detach(self, cell: Cell) -> list[Work]:
        works = list(cell.sent)
        group = self._group_of.pop(cell, None)
        if group is not None:
            group.cells.remove(cell)
            if group.single_use and not group.backlog and not group.spawning:
                self._groups.pop(group.key, None)
        cell.destroy()
        cell.sent.clear()
        return works

    def _refuse_backlog(self, group: Group, refusal: Refusal) -> None:
        for work in group.backlog.clear():
            self._finish(work, None, refusal, None)

    def _wake_starving(self) -> None:
        """A place became free: let those look again who have no cell at all."""
        for group in self._groups.values():
            if group.backlog and not group.cells and not group.spawning:
                self._mark(group)

    # What cells say ------------------------------------------------------------------------

    def loaded(self, cell: Cell, work: Work, frame: frames.PolicyLoaded) -> None:
        """As in `Owner`."""
        self._printed(work, frame.output)
        if work.future is not None:
            if not work.future.done():
                work.future.set_result(frame)
        elif frame.faults:
            group = self._group_of.get(cell)
            self._fault(group, self._remove(cell), outcomes.refusal_of_faults(frame, work.code.ref))
        else:
            self._after_answer(cell)

    def answered(self, cell: Cell, work: Work, frame: frames.Result, value: Any) -> None:
        """As in `Owner`."""
        self.counters["evaluations"] += 1
        if frame.output:
            self._printed(work, frame.output)
        self.circuits.answered(work)
        self._finish(work, value, None, cell)
        self._after_answer(cell, work)

    def failed(self, cell: Cell, work: Work, frame: frames.Failed) -> None:
        """As in `Owner`."""
        self.counters["evaluations"] += 1
        self.counters["failures"] += 1
        if frame.output:
            self._printed(work, frame.output)
        if frame.kind == "memory":
            cell.retired = True  # Its address space may be full of what is left.
        self.circuits.answered(work)
        self._finish(work, None, outcomes.refusal_of(frame, work.code.ref), cell)
        self._after_answer(cell)

    def _after_answer(self, cell: Cell, answered: Work | None = None) -> None:
        group = self._group_of.get(cell)
        if group is None:
            return
        if answered is not None:
            group.overruns = 0
            group.answered(answered)
        if cell.evaluations >= self.limits.evaluations_per_cell_max:
            cell.retired = True
        if not cell.sent:
            worn = cell.demoted and not group.backlog and not cell.restore()
            unwanted = group.single_use and not group.backlog  # Its one piece of work was refused.
            if cell.retired or worn or unwanted:
                self._remove(cell)
                self.counters["recycled"] += 1
        if group.backlog:
            self._mark(group)
        elif not cell.sent and len(self._group_of) + 1 >= self.limits.cells_max:
            self._wake_starving()

"""Assigns work to cells, and replaces cells; `deaths` says what follows the death of a cell.

`sandbox` uses this module. Work is bound to a cell as late as possible: it waits in its policy's
backlog and goes into a pipe when that cell is quick and has room. So a slow evaluation holds up
only the work that already waits after it in the pipe. Policies share nothing here but the count of
cells.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from moorage.core.fit.verification import Stale, Unsound, verify
from moorage.core.state.facts import Refusal
from moorage.model import Cluster, Code, PolicyRef, Tenant
from moorage.policy import Fleet, ProposalError, parse_proposal
from moorage.records.json_values import JsonValue
from moorage.sandbox.host import work as outcomes
from moorage.sandbox.host.cell_sync import World
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.circuit_breaker import CircuitBreaker
from moorage.sandbox.host.contexts import Contexts
from moorage.sandbox.host.contract import (
    HostServices,
    JailError,
    Meter,
    Mode,
    OpenCircuit,
    PolicyCode,
    WorkerSettings,
)
from moorage.sandbox.host.deaths import CellsAndDeaths, Finish
from moorage.sandbox.host.groups import Group, GroupKey
from moorage.sandbox.host.processes import CellProcess
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.supply import CellSupply
from moorage.sandbox.host.work import Work
from moorage.sandbox.host.worker import RemoteWorker
from moorage.sandbox.host.workers import Workers
from moorage.sandbox.host.zygote import SpawnError
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import Limits

WATCH_SECONDS: Final = 0.005
"""Seconds between two checks of busy cells' deadlines."""
STALE_LOOK_SECONDS: Final = 0.5
"""Seconds between two checks for work that has waited too long, while cells are busy."""


class CellPool(CellsAndDeaths):
    """Assigns work to cells, and replaces cells that end.

    Args:
        fleet: The live fleet, which is read when a frame for a cell is built.
        limits: All limits of the sandbox.
        mode: `jail`, or `unsafe` without the jail.
        finish: Called with the outcome of every piece of work: a value or a refusal, and the cell
            that answered, if any.
        printed: Called with a policy's output, and its work.
        circuits: Called when a policy's circuit opens.
        workers: Other machines that run cells; None: there are none.
        meter: Counts processor time of evaluations; None: it is not counted.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        services: HostServices,
        limits: Limits,
        mode: Mode,
        finish: Finish,
        printed: Callable[[Work, str], None],
        circuits: Callable[[OpenCircuit], None],
        workers: WorkerSettings | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(limits, finish)
        self.meter = meter
        self.world = World(fleet)
        self.services = services
        self.contexts = Contexts()
        self.spawner = Spawner(limits, mode, self._make, self._mark_all, self.counters)
        self.workers: Workers | None = None
        if workers is not None:
            self.workers = Workers(
                workers, limits, mode, self._make, self._worker_came, self.counters
            )
        self._printed = printed
        self.circuits = CircuitBreaker(limits, self.counters, circuits)
        self._supply = CellSupply(
            limits, self.spawner, self.workers, self._groups, self._group_of, self._evict
        )
        self._dirty: dict[GroupKey, Group] = {}
        self._pumping: asyncio.Handle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._closing = False

    def _make(self, process: CellProcess, home: Spawner) -> Cell:
        cell = Cell(process, self)
        self._home_of[cell] = home
        return cell

    def note_jail(self, cell: Cell, frame: frames.CellJailed) -> None:
        """Handle the report of a new cell about its jail; see `Owner`."""
        self._home_of[cell].note_jail(cell, frame)

    def note_probe(self, cell: Cell, outcome: str) -> None:
        """Handle the report of a cell that survived an attack; see `Owner`."""
        self._home_of[cell].note_probe(cell, outcome)

    def _living(self) -> list[Cell]:
        elsewhere = () if self.workers is None else self.workers.living()
        return [*self.spawner.living.values(), *elsewhere]

    async def close(self) -> None:
        """Kill every cell and the zygote, and refuse all waiting work, in limited time."""
        self._closing = True
        for handle in (self._pumping, self._watching):
            if handle is not None:
                handle.cancel()
        refusal = Refusal(Code.SHUTTING_DOWN, "the server is shutting down")
        for group in list(self._groups.values()):
            self._refuse_backlog(group, refusal)
        for cell in self._living():
            for work in self._remove(cell):
                self._finish(work, None, refusal, None)
        if self.workers is not None:
            await self.workers.close()
        await self.spawner.close()

    # Work ----------------------------------------------------------------------------------

    def submit(
        self, work: Work, isolation: str, *, single_use: bool = False, aside: bool = False
    ) -> Refusal | None:
        """Send work to an idle cell at once, else at the end of this turn; or return a refusal.

        Args:
            work: The work.
            isolation: Works of one policy version share cells if this is equal.
            single_use: Whether a cell does only one piece of work.
            aside: Whether the work must not disturb other work: it gets one cell at low priority,
                and no cell if that cell would replace another cell.
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
        group.note_use(work)
        cell = group.idle_cell(work, self._supply.cells_per_policy_max, now)
        if cell is not None:
            return self._begin(group, cell, work, now)
        most = self.limits.queue_max
        if self._is_full(work.tenant) if single_use else group.backlog.is_full(work.tenant, most):
            self.counters["busy"] += 1
            if single_use:
                del self._groups[key]
            return outcomes.too_many(ref, self.limits)
        group.backlog.append(work)
        self._mark(group)
        return None

    def _is_full(self, tenant: str) -> bool:
        """Return whether one more group would exceed the limit of all groups or of its tenant."""
        most, count = self.limits.queue_max, len(self._groups)
        if count <= most:
            return False
        own = sum(group.is_of(tenant) for group in self._groups.values())
        return count > 2 * most or own > most // 2

    def is_crowded(self, ref: PolicyRef, tenant: Tenant, isolation: str, coming: int) -> bool:
        """Return whether a tenant has too much waiting work, counting `coming` more pieces."""
        most = max(self.limits.queue_max - coming, 0)
        group = self._groups.get((ref.uri, ref.digest, isolation))
        return most == 0 if group is None else group.backlog.is_full(tenant, most)

    def _begin(self, group: Group, cell: Cell, work: Work, now: float) -> Refusal | None:
        """Send work to an idle cell at once: the cell evaluates while this turn goes on."""
        work.alone = group.heavy(work, now)
        refusal = cell.put(work)
        if refusal is None:
            cell.retired = group.single_use
            cell.flush()
            self.watch_soon()
        return refusal

    def settle(self, cell: Cell, *, granted: bool) -> None:
        """Note the core's decision on a cell's proposal for a lease."""
        if (group := self._group_of.get(cell)) is not None:
            group.settle(self._supply.cells_per_policy_max, granted=granted)

    def withdraw(self, work: Work) -> None:
        """Remove waiting work that no cell has received."""
        any(group.backlog.remove(work) for group in self._groups.values())

    def drop_documents(self, cluster_id: str) -> None:
        """Inform every cell that has a copy of this document."""
        for cell in self._group_of:
            cell.drop_document(cluster_id)

    def cells(self) -> dict[str, int]:
        """Return the number of living cells per policy URI."""
        return dict(Counter(group.key[0] for group in self._group_of.values()))

    def watch_soon(self, within_seconds: float = WATCH_SECONDS) -> None:
        """Check the deadlines again soon, as long as any cell is busy."""
        if self._watching is None and not self._closing:
            self._watching = asyncio.get_running_loop().call_later(within_seconds, self._watch)

    def _forget_idle_groups(self) -> None:
        """Drop groups without cells and work if there are too many groups."""
        if len(self._groups) > self.limits.cells_max * 4:
            idle = [g for g in self._groups.values() if not (g.cells or g.backlog or g.spawning)]
            for group in idle:
                del self._groups[group.key]

    def _replace_code(self, group: Group, code: PolicyCode) -> None:
        """Handle changed defaults of a document: cells with the old ones finish their work."""
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
        """Send all work that can be sent, with one write per cell."""
        self._pumping = None
        dirty, self._dirty = self._dirty, {}
        now, cells_max = time.monotonic(), self._supply.cells_per_policy_max
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
            if (waiting := group.needs_cell(cells_max, now)) is not None:
                self._need_cell(group, waiting, now)
            for cell in touched:
                cell.flush()
            if touched:
                self.watch_soon()

    def _refuse_stale(self, group: Group, now: float) -> None:
        """Refuse consultations that have waited too long behind others of a slow policy."""
        limit = self.limits.queue_seconds
        while stale := [w for w in group.backlog.heads() if w.submitted_at < now - limit]:
            for work in stale:
                self.counters["busy"] += 1
                group.backlog.take(work)
                shortage = "" if group.cells else self._supply.shortage(work.tenant)
                refusal = outcomes.too_slow(group.code.ref, limit, shortage)
                self._finish(work, None, refusal, None)

    # Spawning ------------------------------------------------------------------------------

    def _need_cell(self, group: Group, work: Work, now: float) -> None:
        """Get the group another cell for this work, unless the group has enough cells."""
        if group.aside and group.cells:
            return
        if len(group.cells) >= self._supply.cells_per_policy_max:
            return
        home = self._supply.home(group, work, now)
        if home is None:
            return
        group.spawning += 1
        group.wanted_by = work.tenant
        spare = home.spare()
        if spare is not None:
            self._adopt(group, spare)
            home.refill_soon()
        else:
            home.spawning += 1
            self.spawner.run(self._spawn_for(group, home))

    def _worker_came(self) -> None:
        """Send waiting work to the new worker, and stop idle cells here to make room for it."""
        now = time.monotonic()
        for cell, group in list(self._group_of.items()):
            if not cell.sent and self._supply.returns(cell, group, now):
                self._remove(cell)
        self._mark_all()

    async def _spawn_for(self, group: Group, home: Spawner) -> None:
        try:
            cell = await home.blank()
        except (SpawnError, JailError) as error:
            group.spawning -= 1
            if isinstance(home, RemoteWorker):
                self._doubt(group, home.name)
                return
            refusal = Refusal(Code.UNAVAILABLE, f"no cell can be started: {error}")
            self._refuse_backlog(group, refusal)
            return
        finally:
            home.spawning -= 1
        self._adopt(group, cell)
        if home is self.spawner:
            await home.refill()

    def _adopt(self, group: Group, cell: Cell) -> None:
        """Make a blank cell the group's newest and load the policy."""
        group.spawning -= 1
        if cell.alive:
            group.cells.append(cell)
            if group.aside:
                cell.step_aside()
            self._group_of[cell] = group
            now = time.monotonic()
            hogs = group.hogs or self._supply.burns(group.wanted_by, now)
            if hogs and not group.owes(now) and cell.demote():
                self.counters["demotions"] += 1
            cell.load(Work("load", group.code, ""), self.limits.output_bytes_max, check=False)
            cell.flush()
        self._mark(group)

    # Deadlines -----------------------------------------------------------------------------

    def _watch(self) -> None:
        self._watching = None
        now = time.monotonic()
        busy = [cell for cell in self._living() if cell.sent]
        if now - self._looked_at > STALE_LOOK_SECONDS:  # Work may wait for another group's cell.
            self._looked_at = now
            self._mark_all()
        if busy:
            # A request behind a policy that never returns must not wait any longer.
            soonest = min(cell.remaining_seconds(now) for cell in busy)
            self.watch_soon(min(WATCH_SECONDS, soonest) if soonest > 0 else WATCH_SECONDS)
        for cell in busy:
            if not cell.sent:
                continue
            verdict = cell.watch(now)
            group = self._group_of.get(cell)
            if cell.slow and group is not None:
                group.took_long(cell.sent[0], now)
                if len(cell.sent) > 1 and self._supply.cells_per_policy_max > 1 and not group.aside:
                    self._resend(group, cell.take_back())
            if verdict == "overrun":
                self._overran(cell, now)
            elif verdict == "hog" and cell.demote():
                self.counters["demotions"] += 1
            if cell.slow and group is not None and group.backlog:
                self._mark(group)

    def _overran(self, cell: Cell, now: float) -> None:
        if not cell.traceback and self._run_here(cell):
            return
        head = cell.sent[0]
        loading = head.kind == "load"
        limit = self.limits.load_seconds if loading else head.deadline_seconds(self.limits)
        self.counters["timeouts"] += 1
        self.counters["kills"] += 1
        cell.count_burnt()
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
        """Refuse work that waits for a policy whose circuit is open: it would overrun, too."""
        for group in [g for g in self._groups.values() if g.key[:2] == (ref.uri, ref.digest)]:
            for work in group.backlog.clear():
                refusal = self.circuits.refusal(work, now)
                if refusal is None:
                    group.backlog.append(work)
                else:
                    self._finish(work, None, refusal, None)

    # Reports of cells ----------------------------------------------------------------------

    def note_load(self, cell: Cell, work: Work, frame: frames.PolicyLoaded) -> None:
        """Handle the report that a policy was loaded or has faults; see `Owner`."""
        self._printed(work, frame.output)
        if work.future is not None:
            if not work.future.done():
                work.future.set_result(frame)
        elif frame.faults:
            group = self._group_of.get(cell)
            works = self._remove(cell)
            if not self._again_here(cell, group, [work, *works]):
                self._fault(group, works, outcomes.refusal_of_faults(frame, work.code.ref))
        else:
            self._after_answer(cell)

    def take_answer(self, cell: Cell, work: Work, frame: frames.Result, value: JsonValue) -> None:
        """Handle the returned value of the work at the head; see `Owner`."""
        self.counters["evaluations"] += 1
        if frame.output:
            self._printed(work, frame.output)
        self.circuits.note_answer(work)
        if cell.worker and doubtful(work, value, self.world.fleet):
            group = self._group_of.get(cell)
            if self._again_here(cell, group, [work]):
                self._after_answer(cell)
                return
        self._finish(work, value, None, cell)
        self._after_answer(cell, work)

    def fail_work(self, cell: Cell, work: Work, frame: frames.Failed) -> None:
        """Handle the failure of the work at the head; see `Owner`."""
        self.counters["evaluations"] += 1
        self.counters["failures"] += 1
        if frame.output:
            self._printed(work, frame.output)
        if frame.kind == "memory":
            cell.retired = True  # The evaluation may have left the cell's memory full.
        self.circuits.note_answer(work)
        refusal = outcomes.refusal_of(frame, work.code.ref, self.limits.memory_mib)
        self._finish(work, None, refusal, cell)
        self._after_answer(cell)

    def _after_answer(self, cell: Cell, finished: Work | None = None) -> None:
        group = self._group_of.get(cell)
        if group is None:
            return
        if finished is not None:
            group.overruns = 0
            group.note_answer(finished)
        if cell.evaluations >= self.limits.evaluations_per_cell_max:
            cell.retired = True
        if cell.demoted:  # Each evaluation has its own deadline; this one has ended.
            cell.restore()
        if not cell.sent:
            worn = cell.demoted and not group.backlog
            unwanted = group.single_use and not group.backlog  # The only work was refused.
            back = self.workers is not None and self._supply.returns(cell, group, time.monotonic())
            if cell.retired or worn or unwanted or back:
                self._remove(cell)
                self.counters["recycled"] += 1
        if group.backlog:
            self._mark(group)
        elif not cell.sent and (cell.worker or len(self._group_of) + 1 >= self.limits.cells_max):
            self._wake_starving()


def doubtful(work: Work, value: JsonValue, fleet: Fleet) -> bool:
    """Return whether an answer would be refused in any state of the fleet.

    For such an answer the policy or the worker is at fault. To find out which, the pool repeats the
    evaluation on the daemon's machine.
    """
    guard = work.code.guard
    if guard is not None and work.judged and guard.judge(value) is not None:
        return True
    ask = work.consult.ask if work.consult is not None else None
    if ask is None or work.consult is None or (ask.terms is None and ask.demand is None):
        return False
    try:
        shares = parse_proposal(value, ask.demand)
    except ProposalError:
        return True
    if not shares:
        return False
    named = {share.cluster_id for share in shares}
    known = {name: Cluster(name, ()) for name in named if fleet.part(name) is not None}
    verdict = verify(ask, shares, fleet, known, work.consult.reserved)
    seen = work.fleet_version == fleet.version  # The policy saw the present fleet.
    return isinstance(verdict, Unsound) or (isinstance(verdict, Stale) and seen)

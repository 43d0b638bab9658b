"""Each law of the simulation has a mutant of the core that it kills.

A mutant is a copy of the packages that the core consists of with one text replaced, played in a
fresh interpreter. One that survives means a law that would not notice.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulated.laws import LawBroken
from simulated.world import AGREED, APART, ELASTIC, LABELLED, OVERTAKING, World, run

from moorage.core.turn import Turn

PLAY = Path(__file__).with_name("play.py")
SOURCE = Path(__file__).parents[2] / "server" / "moorage"
PARTS = ("__init__.py", "model.py", "core", "policy")
SEEDS = "0:120"
LABELLED_SEEDS = f"{LABELLED}:{LABELLED + 120}"
AGREED_SEEDS = f"{AGREED}:{AGREED + 60}"
OVERTAKING_SEEDS = f"{OVERTAKING}:{OVERTAKING + 60}"
ENVIRONMENT = dict(os.environ)
"""As it was at first: pytest writes into it at each test, while others are being played."""


@dataclass(frozen=True)
class Mutant:
    """One change of the source, and what must be heard when it is played: a regular expression."""

    name: str
    file: str
    old: str
    new: str
    verdict: str
    seeds: str = SEEDS


MUTANTS = [
    Mutant(
        "frees at Ending",
        "core/state.py",
        'replace(lease, state="ending", reason=reason, notice=None)',
        'replace(lease, state="ending", reason=reason, notice=None)\n'
        "    state._free(state.leases[request], at)",
        "capacity drifted",
    ),
    Mutant(
        "ends provisioned leases at once",
        "core/leases.py",
        'if lease.provision is None or lease.state == "queued":\n'
        "            self._turn.record(Ended",
        "if True:\n            self._turn.record(Ended",
        "devices are freed on the engine's word",
    ),
    Mutant(
        "stops what ended by itself before its end is durable",
        "core/leases.py",
        "        lease = self._finished(lease, news.phase, news)\n",
        "        self._turn.emit(Stop(lease))\n        return\n",
        "what was stopped is not started again",
        "80:90",
    ),
    Mutant(
        "grants what is taken",
        "core/verification.py",
        "return fleet.share(row, need, columns) if free else _stale(fleet, row, need, path)",
        "return fleet.share(row, need, columns)",
        "promised twice",
    ),
    Mutant(
        "takes any labels",
        "policy/matching.py",
        "mask &= self._column(inventory, requirement.key).meets(requirement)",
        "pass",
        "a grant is where its labels say|fits",
        LABELLED_SEEDS,
    ),
    Mutant(
        "believes policies about labels",
        "core/verification.py",
        "where=demand.where,",
        "",
        "a grant is where its labels say",
        LABELLED_SEEDS,
    ),
    Mutant(
        "offers what is cordoned",
        "policy/inventory.py",
        "shut = self.closed > 0",
        "shut = self.closed > 1",
        "nothing is granted where nothing can start|fits",
    ),
    Mutant(
        "offers what operators took out of service",
        "core/state.py",
        "self._fleet.put(self.offered(cluster))",
        "self._fleet.put(cluster)",
        "nothing comes to what is out of service|drifted|fits",
    ),
    Mutant(
        "renews beyond the time of a drain",
        "core/leases.py",
        "min(self._turn.now + ttl, leaves_by(self._turn.state, lease))",
        "self._turn.now + ttl",
        "renewed beyond the time of a drain",
    ),
    Mutant(
        "forgets in a checkpoint what is out of service",
        "core/checkpoint.py",
        "yield from state.cordons.values()",
        "yield from ()",
        "a checkpoint gives the live state|out of service",
    ),
    Mutant(
        "lets leases run into a reservation",
        "core/room.py",
        "of_others(place, tenant) if x.starts_at < until]",
        "of_others(place, tenant) if x.starts_at < until - 10.0]",
        "no reservation is broken",
    ),
    Mutant(
        "lets leases on nodes that are reserved whole",
        "core/withheld.py",
        "if (found := room.before(state, place, tenant, until))",
        "if (found := room.before(state, place, tenant, now))",
        "no reservation is broken",
        "110:120",
    ),
    Mutant(
        "takes one lease for two when it counts what is used of a reservation",
        "core/room.py",
        "                left.subtract(amounts(share))",
        "                left.subtract(amounts(share) + amounts(share))",
        "no reservation is broken|runs into a reservation",
        "0:400",
    ),
    Mutant(
        "believes that a policy saw what was reserved while it thought",
        "core/requests.py",
        "seen == (pending.version, pending.left_alone)",
        "pending.version == self._state.fleet.version",
        "an honest policy is not called a liar",
        "180:190",
    ),
    Mutant(
        "keeps for the head of the queue what another reserved",
        "core/withheld.py",
        "return tuple(place for place, fit in zip(rows, fits, strict=True) if fit)",
        "return ()",
        "no request sleeps that could be served",
        "390:400",
    ),
    Mutant(
        "renews into a reservation",
        "core/room.py",
        "reserved = begins(state, lease, lease.expires_at)",
        "reserved = math.inf",
        "no reservation is broken",
        "290:300",
    ),
    Mutant(
        "gives grace into a reservation after a restart",
        "core/leases.py",
        "until = min(grace, leaves_by(state, lease))",
        "until = grace",
        "no reservation is broken",
        "0:400",
    ),
    Mutant(
        "reserves what others hold then",
        "core/reservations.py",
        "left = room.room(self._state, place, starts_at, None)",
        "left = room.room(self._state, place, ends_at, None)",
        "no reservation is broken",
    ),
    Mutant(
        "reserves a node twice",
        "core/reservations.py",
        "for at in [each for each in begins if starts_at < each < ends_at]:",
        "for at in ():",
        "no reservation is broken|a device has one reservation",
    ),
    Mutant(
        "lets lapse what is used",
        "core/reservations.py",
        "elif self._is_in_use(reservation):",
        "elif False:",
        "what is used does not lapse",
        "0:400",
    ),
    Mutant(
        "forgets reservations in a checkpoint",
        "core/checkpoint.py",
        "yield Reserved(reservation)",
        "yield from ()",
        "a checkpoint gives the live state",
    ),
    Mutant(
        "wakes no request when a reservation is over",
        "core/state.py",
        "state.growth.note(state.reserved.remove(fact.reservation).nodes)\n"
        "        state.gains += 1",
        "state.reserved.remove(fact.reservation)",
        "no request sleeps that could be served",
        "0:400",
    ),
    Mutant(
        "has leases give way in vain",
        "core/preemption.py",
        "        if not self._fits_without(row, leases):\n            return None\n",
        "        if not self._fits_without(row, leases):\n            return tuple(leases)\n",
        "no victim is chosen in vain|leaves for|it is told once",
        "0:400",
    ),
    Mutant(
        "takes the minimum runtime for none",
        "core/preemption.py",
        "young = lease.granted_at + lease.terms.runtime_seconds_min",
        "young = lease.granted_at",
        "it lasts as long as it must",
        "0:400",
    ),
    Mutant(
        "ends a lease for a request that is gone",
        "core/preemption.py",
        "if waiter is None or waiter.pauses",
        "if waiter is not None and waiter.pauses",
        "none leaves for a request that is gone|KeyError",
        "110:120",
    ),
    Mutant(
        "takes back more than was borrowed",
        "core/preemption.py",
        "if 0 < amounts[0] <= over[0]:",
        "if 0 < amounts[0]:",
        "only what is borrowed is taken back",
        "0:400",
    ),
    Mutant(
        "grants beyond a quota",
        "core/requests.py",
        "over = self._quotas.refusal(ask, placement)",
        "over = None",
        "no quota is exceeded",
    ),
    Mutant(
        "lends what is not lent",
        "core/accounts.py",
        'spare = np.minimum(np.maximum(-over, 0), self["lend"][number])',
        "spare = np.maximum(-over, 0)",
        "no quota is exceeded|drifted",
        "0:400",
    ),
    Mutant(
        "lets a project hold what its tenant may",
        "core/accounts.py",
        "return (tenant, None), (tenant, project)",
        "return (tenant, None), (tenant, None)",
        "no quota is exceeded|only a quota is a reason",
    ),
    Mutant(
        "takes the loosest demands of two for the same",
        "core/waiters.py",
        "return self.demand or Demand(), self.candidates, self.alternatives",
        "return self.demand or Demand(), self.candidates, ()",
        "no request sleeps that could be served",
        f"{ELASTIC + 460}:{ELASTIC + 480}",
    ),
    Mutant(
        "thinks that a share is looser than a whole device",
        "core/alternatives.py",
        "gpus=0 if mixed else min(",
        "gpus=min(",
        "no request sleeps that could be served",
        f"{ELASTIC + 170}:{ELASTIC + 200}",
    ),
    Mutant(
        "grants the whole time although less was agreed on",
        "core/leases.py",
        "until = min(lease.expires_at, begins(self._turn.state, lease, now))",
        "until = lease.expires_at",
        "for as long as asked|no reservation is broken",
        AGREED_SEEDS,
    ),
    Mutant(
        "shortens a lease more than agreed",
        "core/withheld.py",
        "return now + shortest",
        "return now",
        "not for less than agreed",
        AGREED_SEEDS,
    ),
    Mutant(
        "shortens a lease where a whole one fits",
        "core/withheld.py",
        " or (demand is not None and feasibility.fits(demand, where, (*found, *kept)))",
        "",
        "no lease is shortened where a whole one fits",
        AGREED_SEEDS,
    ),
    Mutant(
        "shortens no lease",
        "core/withheld.py",
        "return now + shortest",
        "return whole",
        "no request sleeps that could be served|priority goes first",
        "3000080:3000100",
    ),
    Mutant(
        "does not say that a lease is shorter",
        "core/requests.py",
        ", ttl_max_seconds=shortened(lease))",
        ")",
        "who gets a shorter lease is told",
        AGREED_SEEDS,
    ),
    Mutant(
        "does not count who is overtaken by its equals",
        "core/ranking.py",
        '(classes["priority"] >= priority)\n',
        '(classes["priority"] > priority)\n',
        "each time that one is overtaken is counted",
    ),
    Mutant(
        "lets a waiter be overtaken for ever",
        "core/waiters.py",
        "return 2 * self.priority + self.overdue",
        "return 2 * self.priority",
        "who was overtaken too often goes first",
        OVERTAKING_SEEDS,
    ),
    Mutant(
        "does not count who is overtaken within its quota",
        "core/ranking.py",
        "rows = rows[shares | (there & ~over)]",
        "rows = rows[there & ~over]",
        "each time that one is overtaken is counted",
        OVERTAKING_SEEDS,
    ),
    Mutant(
        "keeps no quota for who was overtaken too often",
        "core/quotas.py",
        "self._queue.kept_of_quota(ask, account) or",
        "None or",
        "quota is kept for who was overtaken too often",
        f"{OVERTAKING + 120}:{OVERTAKING + 140}",
    ),
    Mutant(
        "forgets in a checkpoint who was overtaken",
        "core/checkpoint.py",
        "yield Overtaken(request, times)",
        "yield from ()",
        "a checkpoint gives the live state",
    ),
    Mutant(
        "forgets who waits for a quota",
        "core/ranking.py",
        'self._classes["over"][free], self._classes["fresh"][free] = False, True',
        'self._classes["over"][free] = False',
        "no request sleeps that could be served|priority goes first",
        "670:720",
    ),
    Mutant(
        "forgets quotas in a checkpoint",
        "core/checkpoint.py",
        'yield QuotaSet(tenant, project, quota, 0.0, Tenant(""))',
        "yield from ()",
        "a checkpoint gives the live state|shares are what the facts say",
    ),
    Mutant(
        "forgets in a checkpoint what was held",
        "core/checkpoint.py",
        "yield UsageCarried(tenant, project, *past)",
        "yield from ()",
        "a checkpoint gives the live state|shares are what the facts say",
    ),
    Mutant(
        "repeats a fencing number",
        "core/leases.py",
        "self._turn.state.fencing + 1",
        "max(1, self._turn.state.fencing)",
        "fencing number",
    ),
    Mutant(
        "loses the fencing number in a checkpoint",
        "core/checkpoint.py",
        "yield Counted(state.fencing)",
        "yield Counted(max((x.fencing for x in state.leases.values()), default=0))",
        "a checkpoint gives the live state",
    ),
    Mutant(
        "loses waiters in a checkpoint",
        "core/checkpoint.py",
        "yield Queued(waiter.ask, waiter.at, waiter.deadline)",
        "yield from ()",
        "a checkpoint gives the live state",
    ),
    Mutant(
        "forgets the queue at a restart",
        "core/allocator.py",
        "        check(self.state)\n        self.requests.queue.restore()",
        "        check(self.state)",
        "KeyError|stands in line",
    ),
    Mutant(
        "gives engines no orders after a restart",
        "core/leases.py",
        "self._turn.emit(Stop(lease) if over else Start(lease))",
        "pass",
        "engines get their orders again",
    ),
    Mutant(
        "gives no grace after a restart",
        "core/leases.py",
        "lease.expires_at < until",
        "lease.expires_at < self._turn.now",
        "leases get their grace",
    ),
    Mutant(
        "drops a waiter's consultation with its session, and its place",
        "core/open_requests.py",
        "elif request not in self._state.waiting:",
        "else:",
        "a waiter keeps its place",
    ),
    Mutant(
        "talks to those who left",
        "core/open_requests.py",
        "for to in self.listeners.pop(request) if to.session != session]",
        "for to in self.listeners.pop(request)]",
        "no session is told after it left|sessions know their own requests|KeyError: 's",
    ),
    Mutant(
        "never expires",
        "core/allocator.py",
        "is not None and due[0] <= self._turn.now:",
        "is not None and due[0] < 0:",
        "nothing outlives its deadline",
    ),
    Mutant(
        "forgets the new deadline of a renewed lease",
        "core/state.py",
        "lease=lease)\n    state._due(request)",
        "lease=lease)",
        "the next deadline is the true one",
    ),
    Mutant(
        "forgets what is held on a cluster that changed",
        "core/state.py",
        "if rebuilt or share.cluster_id in behind:",
        "if rebuilt:",
        "drifted",
    ),
    Mutant(
        "leaves the rows of a cluster as they were",
        "policy/inventory.py",
        "if ours[start:end] != theirs:",
        "if len(ours[start:end]) != len(theirs):",
        "drifted",
    ),
    Mutant(
        "believes an old no",
        "core/state.py",
        "        self.gains += 1\n        self.growth.note(left_by(lease))",
        "        pass",
        "no request sleeps that could be served|who would not wait does so",
    ),
    Mutant(
        "lets capacity come back unnoticed while a policy thinks",
        "core/queue.py",
        "if gains != self._state.gains or not set(withheld) <= set(self.reserved_for(line)):",
        "if not set(withheld) <= set(self.reserved_for(line)):",
        "no request sleeps that could be served",
        seeds="0:20",
    ),
    Mutant(
        "asks no policy again that declined before capacity grew",
        "core/queue.py",
        "for line in list(its.declined):",
        "for line in ():",
        "no request sleeps that could be served",
    ),
    Mutant(
        "asks no policy again that declined without what is not kept any more",
        "core/queue.py",
        "for line in [each for each in self._declined if each.withheld or each.over_quota_at]:",
        "for line in ():",
        "no request sleeps that could be served",
    ),
    Mutant(
        "believes that what did not fit beside a reservation never fits",
        "core/queue.py",
        "            self._unreserved += 1",
        "            pass",
        "no request sleeps that could be served",
        seeds="215:225",
    ),
    Mutant(
        "forgets those that come back and were never judged",
        "core/queue.py",
        "        self._ranking.judge_again(self._classes[key.waiters].row)",
        "        pass",
        "no request sleeps that could be served",
        seeds="330:360",
    ),
    Mutant(
        "wakes no request when the head gives up",
        "core/requests.py",
        "        if waited:\n            self._turn.wakes = True",
        "        if waited:\n            pass",
        "no request sleeps that could be served",
    ),
    Mutant(
        "wakes no request when a lease ends",
        "core/leases.py",
        "self._turn.now, reason))\n            self._turn.wakes = True",
        "self._turn.now, reason))",
        "no request sleeps that could be served",
    ),
    Mutant(
        "wakes the lowest priority first",
        "core/ranking.py",
        'return -self._classes["precedence"][rows]',
        'return self._classes["precedence"][rows]',
        "priority goes first|the world comes to rest",
    ),
    Mutant(
        "keeps nothing for the head",
        "core/withheld.py",
        "return (*(node for node in kept if node not in own), *self.nodes(ask))",
        "return self.nodes(ask)",
        "the head's nodes are left alone",
    ),
    Mutant(
        "calls a policy a liar when the inventory changed",
        "core/requests.py",
        "isinstance(verdict, Unsound) and pending.layout == self._state.fleet.layout",
        "isinstance(verdict, Unsound)",
        "an honest policy is not called a liar",
    ),
    Mutant(
        "grants outside the candidates",
        "core/verification.py",
        "if ask.candidates is not None and proposed.cluster_id not in ask.candidates:",
        "if False:",
        "no grant outside the candidates",
    ),
    Mutant(
        "grants too few devices",
        "core/verification.py",
        "if ask.demand is not None and len(columns) != ask.demand.gpus:",
        "if False:",
        "a grant satisfies the demand",
    ),
    Mutant(
        "grants too small a share",
        "core/verification.py",
        "(short := _short(proposed, ask.demand))",
        '(short := "")',
        "a grant satisfies the demand",
        seeds="130:160",
    ),
    Mutant(
        "shares exclusive devices",
        "policy/fleet.py",
        "if share:\n                mask &= ~self.gpu_exclusive",
        "if False:\n                pass",
        "an exclusive device is not shared",
    ),
    Mutant(
        "gives any model",
        "policy/fleet.py",
        "if demand.models:\n                mask &=",
        "if False:\n                mask &=",
        "a grant satisfies the demand",
    ),
    Mutant(
        "grants half a gang",
        "core/verification.py",
        "if ask.demand is not None and len(wishes) != ask.demand.nodes:",
        "if False:",
        "a gang is whole",
    ),
    Mutant(
        "grants a node twice",
        "core/verification.py",
        "if (proposed.cluster_id, proposed.node_id) in map(_pair, taken):",
        "if False:",
        "each node once",
    ),
    Mutant(
        "ignores racks",
        "core/verification.py",
        "if len(places) > 1 or -1 in places:",
        "if False:",
        "one rack",
        "105:115",
    ),
    Mutant(
        "puts a group together",
        "core/anti_affinity.py",
        "return tuple(sorted(found))",
        "return ()",
        "leases of a group keep apart",
        f"{APART}:{APART + 40}",
    ),
    Mutant(
        "looks at its own topology alone",
        "core/anti_affinity.py",
        "{wanted.topology, lease.terms.anti_affinity.topology}",
        "{wanted.topology}",
        "leases of a group keep apart",
        f"{APART}:{APART + 40}",
    ),
    Mutant(
        "forgets the rest of a zone",
        "core/lease_groups.py",
        '"" if apart else share.node_id',
        "share.node_id",
        "no request sleeps that could be served",
        f"{APART}:{APART + 200}",
    ),
    Mutant(
        "ignores zones",
        "policy/inventory.py",
        "demand.topology in _TOGETHER",
        'demand.topology == "rack"',
        "one zone",
        f"{APART}:{APART + 40}",
    ),
    Mutant(
        "takes racks of the same name for one",
        "policy/inventory.py",
        "np.where(theirs >= 0, theirs + before, -1)",
        "theirs",
        "one rack",
    ),
    Mutant(
        "holds something for a dry run",
        "core/requests.py",
        "if ask.terms is None or ask.dry_run:\n            self._answer(pending, Advice",
        "if ask.terms is None:\n            self._answer(pending, Advice",
        "only who asks for a lease gets it",
    ),
    Mutant(
        "answers twice",
        "core/requests.py",
        "for to in listeners:",
        "for to in (*listeners, *listeners):",
        "no request is answered twice",
    ),
    Mutant(
        "does not answer those who asked again",
        "core/requests.py",
        "            self._requests.listen(first, to)",
        "            pass",
        "every message is answered",
    ),
    Mutant(
        "forgets the keys of leases",
        "core/state.py",
        "    else:\n        _own_key(state, lease)",
        "    else:\n        pass",
        "a key never yields two leases|a checkpoint gives the live state",
    ),
    Mutant(
        "lets anybody release",
        "core/leases.py",
        "if lease.token_digest != token_digest and lease.tenant != tenant:",
        "if False:",
        "only the owner",
    ),
    Mutant(
        "lists other tenants' leases",
        "core/explain.py",
        "for lease in pool if inquiry.may_see(lease.tenant))",
        "for lease in pool)",
        "nor others",
    ),
    Mutant(
        "shows tokens",
        "core/explain.py",
        '"fencing": lease.fencing,',
        '"fencing": lease.fencing, "token": lease.token_digest,',
        "a listing shows no token",
    ),
    Mutant(
        "queues what must not wait",
        "core/requests.py",
        "if terms is None or ask.dry_run or not patient:",
        "if terms is None or not patient:",
        "only asks for leases wait",
    ),
    Mutant(
        "starts a workload again for ever",
        "model.py",
        "and self.attempt < provision.attempts_max",
        "and self.attempt < 10**9",
        "no more starts than asked for",
    ),
    Mutant(
        "starts again what was not to be",
        "model.py",
        'and provision.on_failure == "requeue"',
        'and provision.on_failure != "never"',
        "only as asked",
    ),
    Mutant(
        "holds on to what a lease in the queue held",
        "core/state.py",
        "state._free(lease, at)  # noqa: SLF001  # Called by apply().\n    avoid",
        "avoid",
        "drifted",
    ),
    Mutant(
        "believes of a grant what was said about the one before",
        "core/leases.py",
        "or lease.fencing != fencing",
        "or lease.fencing < 0",
        "devices are freed on the engine's word",
    ),
    Mutant(
        "starts again at once",
        "core/leases.py",
        "if seconds > 0:",
        "if False:",
        "what failed needs time",
    ),
    Mutant(
        "pauses as long each time",
        "core/leases.py",
        "self._pause_seconds * 2.0 ** (lease.attempt - 1)",
        "self._pause_seconds",
        "twice as long each time",
    ),
    Mutant(
        "puts what pauses into the line",
        "core/leases.py",
        "self._turn.record(Paused(request, self._turn.now, self._turn.now + seconds, faults))",
        "self._turn.record(Paused(request, self._turn.now, self._turn.now + seconds, faults))\n"
        "            self._requests.queue.add(self._turn.state.waiting[request].ask)",
        "stands in line, and no other",
    ),
    Mutant(
        "forgets after a restart who pauses",
        "core/queue.py",
        "if not waiter.pauses:",
        "if True:",
        "stands in line, and no other",
    ),
    Mutant(
        "ends a lease because its policy did not get to answer",
        "core/requests.py",
        "elif not self._comes_back(pending, news.refusal):",
        "else:",
        "a fault that passes ends no lease|a failed node is tried last",
    ),
    Mutant(
        "believes who declined, whatever came back meanwhile",
        "core/requests.py",
        "if self._missed_something(pending, reserved):",
        "if False:",
        "room that came back is seen",
    ),
    Mutant(
        "never ends a pause",
        "core/waiters.py",
        "return min(self.deadline, self.lease.retry_at)",
        "return self.deadline",
        "the next deadline is the true one",
    ),
    Mutant(
        "goes back to where it failed",
        "core/feasibility.py",
        "return ask.avoid if elsewhere else ()",
        "return ()",
        "a failed node is tried last",
    ),
    Mutant(
        "loses leases of the queue in a checkpoint",
        "core/checkpoint.py",
        "yield Carried(waiter.lease)",
        "yield Queued(waiter.ask, waiter.at, waiter.deadline)",
        "a checkpoint gives the live state",
    ),
    Mutant(
        "gives leases in the queue no grace after a restart",
        "core/leases.py",
        "waiter.deadline < grace",
        "waiter.deadline < self._turn.now",
        "leases get their grace",
    ),
    Mutant(
        "gives new time with a new place",
        "core/leases.py",
        "                waiting,\n                placement=placement,",
        "                waiting,\n                expires_at=now + ask.terms.ttl_seconds,\n"
        "                placement=placement,",
        "a new place is no new time",
    ),
    Mutant(
        "leaves a decided ask undecided",
        "core/requests.py",
        "listeners = self._requests.settle(ask)\n",
        "listeners = self._requests.listeners.pop(ask.id, ())\n",
        "no request is decided for ever|lease.id not in state.leases",
    ),
    Mutant(
        "gives away the place of a warm lease before its workload has ended",
        "core/warm_reuse.py",
        "self._leases.end(lease, EVICTED)",
        "self._turn.record(Ended(lease.id, self._turn.now, EVICTED))",
        "devices are freed on the engine's word",
    ),
    Mutant(
        "refuses beside what is warm",
        "core/warm_reuse.py",
        "return self.capacity(ask, kept) if wanting else None",
        "return None",
        "no refusal that an eviction could avoid|no request sleeps beside what could give way",
    ),
    Mutant(
        "lets waiters sleep beside what is warm",
        "core/backfill.py",
        "self._warm.capacity(each.ask, reserved)",
        "pass",
        "no request sleeps beside what could give way",
        seeds="240:270",
    ),
    Mutant(
        "hands the workload of one tenant to another",
        "core/leases.py",
        "        ask.tenant,\n        (ask.policy.uri,",
        "        (ask.policy.uri,",
        "what is taken over stays what it was",
        seeds="150:180",
    ),
    Mutant(
        "takes over whatever place it is",
        "core/warm_reuse.py",
        "return verify(ask, wishes, fleet, self._turn.state.clusters) == lease.placement",
        "return True",
        "no grant outside the candidates|what is granted exists|is promised twice|out of service",
        seeds="60:90",
    ),
    Mutant(
        "takes over what is kept for the head of the queue",
        "core/warm_reuse.py",
        "if any((share.cluster_id, share.node_id) in reserved for share in lease.placement):",
        "if False:",
        "the head's nodes are left alone",
        seeds="250:270",  # It takes a head that waits for more than one warm lease.
    ),
    Mutant(
        "keeps what is being evicted",
        "core/warm_reuse.py",
        'if (lease.state, lease.reason) != ("ending", RELEASED):',
        'if lease.state != "ending":',
        "only the released is kept",
    ),
    Mutant(
        "has no lease give way that is still being reset",
        "core/warm_reuse.py",
        "yield from [self._turn.state.leases[name] for name in self._turn.state.resetting]",
        "pass",
        "no request sleeps beside what could give way",
    ),
    Mutant(
        "renews what no tenant owns",
        "core/leases.py",
        "if not lease.over and lease.expires_at",
        'if lease.state != "ending" and lease.expires_at',
        "what no tenant owns is not renewed",
    ),
    Mutant(
        "does not look at what is warm after a restart",
        "core/leases.py",
        "self._turn.emit(KeepWarm(lease))  # It may have died with the machine.",
        "pass",
        "engines get their orders again",
    ),
]


def play(home: Path, seeds: str = SEEDS) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | {"PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, PLAY, seeds]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def copy(home: Path) -> Path:
    package = home / "moorage"
    package.mkdir(parents=True)
    for part in PARTS:
        whole = SOURCE / part
        if whole.is_dir():
            shutil.copytree(whole, package / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(whole, package / part)
    return package


def breed(home: Path, mutant: Mutant) -> subprocess.CompletedProcess[str]:
    path = copy(home) / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: its text occurs not exactly once"
    path.write_text(source.replace(mutant.old, mutant.new))
    return play(home, mutant.seeds)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory):
    """All mutants, two at a time: most of a mutant's life is its interpreter starting."""
    root = tmp_path_factory.mktemp("mutants")
    with ThreadPoolExecutor(2) as pool:
        bred: dict[str, Future[subprocess.CompletedProcess[str]]] = {
            mutant.name: pool.submit(breed, root / str(number), mutant)
            for number, mutant in enumerate(MUTANTS)
        }
        yield bred
        for future in bred.values():
            future.cancel()


@pytest.mark.heavy
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_dies(played, mutant: Mutant) -> None:
    report = played[mutant.name].result(timeout=600)
    assert report.returncode != 0, f"survived {mutant.seeds}: the laws do not notice"
    assert re.search(mutant.verdict, report.stderr), report.stderr[-2000:]


def test_what_is_played_is_the_copy(tmp_path: Path) -> None:
    """And not the installed package: or every mutant would live."""
    package = copy(tmp_path)
    (package / "core" / "allocator.py").write_text("raise SystemExit('the copy was played')")
    report = play(tmp_path)
    assert "the copy was played" in report.stderr


class Hasty(World):
    """A daemon that lets effects out before their facts are durable."""

    def step(self, event):
        turn = super().step(event)
        if turn in self.turns:
            self.turns.remove(turn)
            self.turns.append(Turn(turn.facts, []))
            self.let_go([turn])
        return turn


class Forgetful(World):
    """A disk that says it has written what it has not."""

    def commit(self) -> None:
        before = len(self.ledger)
        super().commit()
        if len(self.ledger) > before and self.rng.random() < 0.2:
            del self.ledger[before:]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Hasty, "durable"),
        (Forgetful, "survives|durable|ledger gives|left alone|a lease is one|is renewed"),
    ],
)
def test_a_world_that_breaks_its_promise_is_caught(kind: type[World], verdict: str) -> None:
    def play_all() -> None:
        for seed in range(60):
            run(seed, 200, kind)

    with pytest.raises(LawBroken, match=verdict):
        play_all()

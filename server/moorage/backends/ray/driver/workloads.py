"""Runs workloads on Ray as detached actors, with one lock for each workload.

Ray deletes the name of a dead actor, so the remaining actors do not show how many a workload should
have. So the daemon stores the shape of each workload (see `_Shape`) and passes it to calls.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup

from moorage.backends.ray.driver.groups import GroupError, JobGroups
from moorage.backends.ray.node.host import WorkloadHost
from moorage.ray_devices import DeviceError, Holders, RayHandle
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

SCHEDULE_SECONDS_MAX: Final = 60.0
"""Longest wait for an actor's start; its node may have less free than the inventory says."""
ENVIRONMENT_SECONDS_MAX: Final = 900.0
"""Longest wait for an actor's start if Ray has to make a `runtime_env` first."""
ANSWER_SECONDS_MAX: Final = 10.0
"""Longest wait for an answer of a running actor."""
STOP_SPARE_SECONDS: Final = 10.0
"""Extra seconds for an actor to end, beyond the stop time of its workload."""
OUTPUT_SECONDS_MAX: Final = 60.0
"""Longest wait for the output of a running actor before it is killed: its machine may be busy.

If the actor is dead, Ray reports that at once."""
LOOK_SECONDS: Final = 20.0
"""Longest time in seconds of one call that waits for a workload's end; then it is repeated."""
EXACT_TRIES: Final = 8
"""Maximum restarts of an actor that Ray gives other devices than its lease's."""

Report = JsonObject


class NotDoneError(Exception):
    """A workload did not start, or cannot be stopped; the message says why."""


class UnknownActorError(Exception):
    """Ray has no actor with this name."""


@dataclass(frozen=True, slots=True)
class _Member:
    """The actor of a workload on one of its nodes."""

    name: str
    start: tuple[str, str]
    """Fencing number and attempt of the start."""
    index: int
    handle: RayHandle
    runs: RayHandle = None
    """A reference that becomes ready when Ray has started the actor; None for a found actor."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The actors and nodes that a complete workload has."""

    actors: int
    nodes: tuple[str, ...]
    """Nodes of the actors, in order, then other nodes that the job may use; empty: any node."""

    @classmethod
    def of(cls, shape: JsonMapping) -> "_Shape":
        """Decode the shape that `orders.shape` made."""
        return cls(int(shape["actors"]), tuple(shape["nodes"]))

    def node(self, index: int) -> str:
        """Return the node of an actor by its index; empty if unknown."""
        return self.nodes[index] if index < len(self.nodes) else ""


class Workloads:
    """Starts, stops and watches the workloads of one server on Ray.

    Args:
        server: The server's id, the first part of its actors' names.
        namespace: The Ray namespace of these actors.
        tell: Called with the name and report of each workload that ends by itself.
    """

    def __init__(self, server: str, namespace: str, tell: Callable[[str, Report], None]) -> None:
        self._server = server
        self._namespace = namespace
        self._tell = tell
        self._lock = threading.Lock()
        self._names: dict[str, threading.RLock] = {}
        self._given_up: dict[str, list[threading.Event]] = {}
        self._watched: dict[str, dict[RayHandle, _Member]] = {}
        self._ends: dict[str, dict[int, Report]] = {}
        self._shapes: dict[str, _Shape] = {}
        self._dead = frozenset[str]()
        self.holders = Holders(self.actor_ids)
        self._groups = JobGroups(server, self.holders)
        threading.Thread(target=self._watch_forever, daemon=True).start()

    # Looking -----------------------------------------------------------------------------------

    def discover(self, shapes: Mapping[str, JsonMapping]) -> dict[str, Report]:
        """Return all workloads of this server on Ray, and watch them from now on."""
        found: dict[str, Report] = {}
        for workload, members in self._all().items():
            shape = _Shape.of(shapes[workload]) if workload in shapes else None
            found[workload] = self._join(members, "report", shape)
            self._watch(workload, members, shape)
        for workload in self._groups.workloads() - found.keys():
            lock = self._lock_of(workload)
            if lock.acquire(blocking=False):  # Else the workload is starting or stopping.
                try:
                    if workload not in self._all(workload):
                        self._groups.remove(workload)
                finally:
                    lock.release()
        return found

    def status(self, workload: str, shape: JsonMapping | None, *, probe: bool = False) -> Report:
        """Return the report of a workload; with `probe`, run its readiness check first."""
        question = "probe" if probe else "report"
        whole = None if shape is None else _Shape.of(shape)
        return self._join(self._members(workload), question, whole)

    def logs(self, workload: str, offset: int) -> tuple[bytes, int, bool, int | None, int]:
        """Return the result of `WorkloadHost.logs` on a workload's first node, and the attempt."""
        member = self._members(workload)[0]
        piece = self._ask(member, "logs", offset)
        return (*piece, int(member.start[1]))

    def execute(
        self,
        workload: str,
        command: Sequence[str],
        seconds: float | None,
        folder: str | None,
        environment: Mapping[str, str],
    ) -> tuple[int | None, str]:
        """Run a command on the first node of a workload."""
        member = self._members(workload)[0]
        ref = member.handle.execute.remote(command, seconds, folder, environment)
        try:
            return _value(ref, None)  # type: ignore[no-any-return]  # As the host returns it.
        except ray.exceptions.RayError as error:  # Includes errors of the node's operating system.
            raise NotDoneError(_first_line(error)) from error

    def actor_ids(self) -> set[str]:
        """Return Ray's ids of all actors of this server."""
        members = [each for found in self._all().values() for each in found]
        ids = {each.handle._actor_id.hex() for each in members}  # noqa: SLF001  # No public name.
        return ids | self.holders.ids()

    # Starting ----------------------------------------------------------------------------------

    def announced(self, workload: str) -> threading.Event:
        """Register a start; return the event that a later stop sets to cancel the start."""
        given_up = threading.Event()
        with self._lock:
            self._given_up.setdefault(workload, []).append(given_up)
        return given_up

    def start(
        self, plans: Sequence[JsonMapping], given_up: threading.Event, *, new: bool
    ) -> Report | None:
        """Start a workload, unless it runs already, and wait until it is ready.

        Args:
            plans: The plan for each node.
            given_up: The event that `announced` returned.
            new: Whether to start a workload that does not exist; if not, return None for it.

        Raises:
            NotDoneError: The workload did not become ready and was removed.
        """
        workload = str(plans[0]["workload"])
        try:
            with self._lock_of(workload):
                if given_up.is_set():
                    raise NotDoneError("the start of the workload was cancelled")
                return self._start(workload, plans, given_up, new=new)
        finally:
            with self._lock:
                self._given_up[workload].remove(given_up)
                if not self._given_up[workload]:
                    del self._given_up[workload]

    def _start(
        self, workload: str, plans: Sequence[JsonMapping], given_up: threading.Event, *, new: bool
    ) -> Report | None:
        members = self._all(workload).get(workload, [])
        if not members and not new:
            return None
        shape = _Shape.of(plans[0]["shape"])
        try:
            found = bool(members)
            if not new:
                self._check_whole(members, shape)
            if len(members) != len(plans) or len({each.start for each in members}) > 1:
                self._end(members)
                members = [self._make(self._bound(plan, given_up)) for plan in plans]
            report = self._begin(members, plans, given_up, found=found)
        except BaseException as error:
            for each in members:
                if each.runs and not ray.wait([each.runs], timeout=0)[0]:
                    _kill(each.handle)  # `_end` would wait for its answer.
            with contextlib.suppress(UnknownActorError):
                self._end(self._members(workload))
            if plans[0]["bundles"]:
                self._groups.remove(workload)
            # TypeError and ValueError: Ray's client itself refuses a wrong `runtime_env`.
            kinds = ray.exceptions.RayError | DeviceError | GroupError | ValueError | TypeError
            if isinstance(error, kinds):
                raise NotDoneError(_first_line(error)) from error
            raise
        self._watch(workload, members, shape)
        return report

    def _bound(self, plan: JsonMapping, given_up: threading.Event) -> JsonMapping:
        """Make a job's placement group; return the job's plan with the group's id."""
        if not plan["bundles"]:
            return plan
        return {**plan, "group": self._groups.make(plan, given_up).id.hex()}

    def _make(self, plan: JsonMapping) -> _Member:
        options = dict(plan["options"])
        strategies = ray.util.scheduling_strategies
        if plan["bundles"]:
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(plan["group"])))
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(group, 0)
        elif plan["node"]:
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(
                plan["node"], soft=False
            )
        made = ray.remote(WorkloadHost).options(
            name=plan["name"],
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            get_if_exists=True,
            max_concurrency=1000,
            **options,
        )
        *_, fencing, attempt, index = str(plan["name"]).split("/")
        actor: RayHandle = made.remote(plan)
        runs = actor.about.remote()
        return _Member(plan["name"], (fencing, attempt), int(index), actor, runs)

    def _begin(
        self,
        members: list[_Member],
        plans: Sequence[JsonMapping],
        given_up: threading.Event,
        *,
        found: bool,
    ) -> Report:
        """Start the work of all actors, new or found; return when all are ready."""
        refs = [each.handle.begin.remote() for each in members]
        for number, plan in enumerate(plans):
            answer = self._begin_answer(members[number], refs[number], plan, given_up)
            tries = 0
            while "given" in answer:
                tries += 1
                if tries > EXACT_TRIES:
                    raise NotDoneError(
                        f"Ray gave GPU {', '.join(answer['given'])} of node {plan['node']}"
                        f" rather than {', '.join(plan['gpus'])}, {tries} times"
                    )
                members[number], answer = self._exact(members[number], plan, given_up)
            if answer["phase"] == "succeeded" and plan["readiness"]:
                raise NotDoneError("the workload ended before it was ready")
            # Without a readiness check, an ended command was ready first; its watcher reports the
            # end.
            began = answer.get("exit_code") is not None and not plan["readiness"]
            if answer["phase"] == "failed" and not began:
                raise NotDoneError(_why(answer))
        report = self._join(members, "report", None)
        if report["phase"] in {"failed", "succeeded"} and not found:
            report = {"phase": "ready", "detail": plans[0]["title"]}
        return report

    def _exact(
        self, member: _Member, plan: JsonMapping, given_up: threading.Event
    ) -> tuple[_Member, Report]:
        """Start an actor again so that Ray gives it the devices of its lease."""
        self._end([member])
        answers: list[tuple[_Member, Report]] = []

        def take() -> bool:
            made = self._make(plan)
            ref = made.handle.begin.remote()
            answers.append((made, self._begin_answer(made, ref, plan, given_up)))
            return "given" not in answers[-1][1]

        share = min(1.0, float(plan["options"]["num_gpus"]))
        self.holders.exact(plan["node"], plan["gpus"], share, take, given_up)
        return answers[-1]

    def _begin_answer(
        self, member: _Member, ref: Any, plan: JsonMapping, given_up: threading.Event
    ) -> Report:
        """Wait until an actor reports its workload's start; a time limit holds until it runs."""
        made = "runtime_env" in plan["options"]
        seconds = ENVIRONMENT_SECONDS_MAX if made else SCHEDULE_SECONDS_MAX
        deadline = time.monotonic() + seconds
        runs = member.runs or member.handle.about.remote()
        running = False
        while True:
            done, _ = ray.wait([ref], timeout=0.2 if running else 0.1)
            if done:
                report: Report = ray.get(ref)
                return report
            if given_up.is_set():
                raise NotDoneError("the start of the workload was cancelled")
            if not running:
                running = bool(ray.wait([runs], timeout=0)[0])
            if not running and time.monotonic() > deadline:
                where = plan["node"] or "any node"
                raise NotDoneError(
                    f"Ray has not started the workload's actor on {where} within {seconds:g} s: the"
                    f" actor wants {_wants(plan['options'])}; others may hold these resources"
                )

    # Stopping ----------------------------------------------------------------------------------

    def stop(self, workload: str, stop_seconds_max: float | None = None) -> Report | None:
        """Stop a workload; SIGKILL it some seconds after SIGTERM. Cancel a start under way.

        Returns:
            The last output of the workload's first node, with None as `data` if it is lost; None if
            no workload has this name.
        """
        with self._lock:
            for given_up in self._given_up.get(workload, ()):
                given_up.set()
        with self._lock_of(workload):
            self._forget(workload)
            try:
                members = self._members(workload)
            except UnknownActorError:
                self._groups.remove(workload)
                return None
            outputs = self._end(members, stop_seconds_max)
            self._groups.remove(workload)
            data, start, code = outputs.get(0, (None, 0, None))
            attempt = int(members[0].start[1])
            return {"data": data, "start": start, "exit_code": code, "attempt": attempt}

    def _end(
        self, members: Sequence[_Member], stop_seconds_max: float | None = None
    ) -> dict[int, tuple[bytes, int, int | None]]:
        """End actors with all their processes; return their last output when all are gone."""
        outputs: dict[int, tuple[bytes, int, int | None]] = {}
        alive = [(each, each.handle.about.remote()) for each in members]
        refs = [ref for _, ref in alive]
        ready = set[RayHandle]()
        if refs:
            ready.update(ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS_MAX)[0])
        stopping: list[tuple[_Member, RayHandle, float]] = []
        for member, ref in alive:
            about = None
            if ref in ready:
                with contextlib.suppress(ray.exceptions.RayError):
                    about = ray.get(ref)
            if about is None:
                _kill(member.handle)
            else:
                seconds = float(about["stop_seconds"])
                bounded = (
                    ()
                    if stop_seconds_max is None or seconds <= stop_seconds_max
                    else (stop_seconds_max,)
                )
                limit = (*bounded, seconds)[0] + OUTPUT_SECONDS_MAX
                stopping.append((member, member.handle.stop.remote(*bounded), limit))
        for member, ref, seconds in stopping:
            done, _ = ray.wait([ref], timeout=seconds)
            with contextlib.suppress(ray.exceptions.RayError):
                if done:
                    outputs[member.index] = ray.get(ref)
            _kill(member.handle)
        for member in members:
            if not _wait_gone(member.name, self._namespace):
                raise NotDoneError(f"Ray has not ended the actor {member.name}")
        return outputs

    # Watching ----------------------------------------------------------------------------------

    def _watch(self, workload: str, members: Sequence[_Member], shape: _Shape | None) -> None:
        with self._lock:
            if shape is not None:
                self._shapes[workload] = shape
            names = {each.name for each in members}
            # `discover` may have begun to watch some of the workload's actors during the start.
            watched = {
                ref: each
                for ref, each in self._watched.get(workload, {}).items()
                if each.name in names
            }
            known = {each.name for each in watched.values()}
            ended = self._ends.setdefault(workload, {}) if known else {}
            self._ends[workload] = ended
            self._watched[workload] = watched | {
                each.handle.wait_for_end.remote(LOOK_SECONDS): each
                for each in members
                if each.name not in known and each.index not in ended
            }

    def _forget(self, workload: str) -> None:
        with self._lock:
            self._watched.pop(workload, None)
            self._ends.pop(workload, None)
            self._shapes.pop(workload, None)

    def note_dead_nodes(self, dead: Collection[str]) -> None:
        """Report workloads on dead nodes as failed; Ray never revives a dead node.

        A job has an actor only on its first node, so nothing else reports the loss of its other
        nodes.
        """
        self._dead = frozenset(dead)
        lost: dict[str, str] = {}
        with self._lock:
            for workload in self._watched.keys() & self._shapes.keys():
                if why := self._dead_node(self._shapes[workload]):
                    lost[workload] = why
                    self._watched.pop(workload)
                    self._ends.pop(workload)
        for workload, why in lost.items():
            self._tell(workload, {"phase": "failed", "detail": why})

    def _dead_node(self, shape: _Shape) -> str:
        dead = next((each for each in shape.nodes if each in self._dead), "")
        return f"node {dead}, where it runs, is dead" if dead else ""

    def _check_whole(self, members: Sequence[_Member], shape: _Shape) -> None:
        if lost := self._why_lost(members, shape):
            raise NotDoneError(lost)

    def _why_lost(self, members: Sequence[_Member], shape: _Shape) -> str:
        """Return a message about the nodes or actors that a workload has lost; empty if none."""
        if why := self._dead_node(shape):
            return why
        missing = set(range(shape.actors)) - {each.index for each in members}
        if not missing or not members:  # If no actor remains, the caller reports it.
            return ""
        where = ", ".join(shape.node(index) or f"rank {index}" for index in sorted(missing))
        return f"the actor on node {where} is gone; {len(members)} of {shape.actors} actors remain"

    def _watch_forever(self) -> None:
        while True:
            with self._lock:
                refs = {ref: name for name, found in self._watched.items() for ref in found}
            if not refs:
                time.sleep(0.2)  # Nothing is watched yet.
                continue
            done, _ = ray.wait(list(refs), timeout=0.5)
            for ref in done:
                self._note_answer(refs[ref], ref)

    def _note_answer(self, workload: str, ref: Any) -> None:
        """Read an actor's answer to `wait_for_end`: report the workload's end, or wait again."""
        try:
            end: Report | None = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:
            end = None
            time.sleep(0.2)  # A new call would fail again at once.
        except ray.exceptions.RayError as error:
            end = _lost_report(error)
        with self._lock:
            member = self._watched.get(workload, {}).pop(ref, None)
            if member is None:
                return  # The workload is being stopped.
            if end is None:
                again = member.handle.wait_for_end.remote(LOOK_SECONDS)
                self._watched[workload][again] = member
                return
            end = _place_report(end, self._shapes.get(workload), member.index)
            ends = self._ends[workload]
            ends[member.index] = end
            bad = [each for each in ends.values() if each["phase"] != "succeeded"]
            if self._watched[workload] and not bad:
                return  # Other members still run.
            self._watched.pop(workload)
            self._ends.pop(workload)
        self._tell(workload, (bad or [end])[0])

    # Members -----------------------------------------------------------------------------------

    def _lock_of(self, workload: str) -> threading.RLock:
        with self._lock:
            return self._names.setdefault(workload, threading.RLock())

    def _all(self, only: str | None = None) -> dict[str, list[_Member]]:
        """Return the actors of all workloads or of one, in their order."""
        found: dict[str, list[_Member]] = {}
        for each in ray.util.list_named_actors(all_namespaces=True):
            server, _, rest = each["name"].partition("/")
            if each["namespace"] != self._namespace or server != self._server:
                continue
            workload, fencing, attempt, index = rest.rsplit("/", 3)
            if only not in {None, workload}:
                continue
            with contextlib.suppress(ValueError):  # The actor may have ended.
                handle = ray.get_actor(each["name"], namespace=self._namespace)
                member = _Member(each["name"], (fencing, attempt), int(index), handle)
                found.setdefault(workload, []).append(member)
        return {name: sorted(each, key=lambda one: one.index) for name, each in found.items()}

    def _members(self, workload: str) -> list[_Member]:
        found = self._all(workload).get(workload)
        if not found:
            raise UnknownActorError(workload)
        return found

    def _join(self, members: Sequence[_Member], question: str, shape: _Shape | None) -> Report:
        """Combine the reports of a workload's actors into one; a lost actor makes it a failure."""
        if not members:
            raise UnknownActorError("")
        if shape is not None and (lost := self._why_lost(members, shape)):
            return {"phase": "failed", "detail": lost}
        reports = [_place_report(self._ask(each, question), shape, each.index) for each in members]
        for phase in ("failed", "stopped", "pending", "starting", "ready"):
            for report in reports:
                if report["phase"] == phase:
                    return {**report, "endpoint": reports[0].get("endpoint", "")}
        return reports[0]  # All have succeeded.

    def _ask(self, member: _Member, question: str, *args: JsonValue) -> JsonValue:
        """Return the answer of an actor; if the actor is lost, a report with the reason."""
        try:
            return _value(getattr(member.handle, question).remote(*args), ANSWER_SECONDS_MAX)
        except ray.exceptions.GetTimeoutError as error:
            if question == "logs":
                raise NotDoneError("the actor of the workload does not answer") from error
            return {"phase": "starting", "detail": "the actor of the workload does not answer"}
        except ray.exceptions.RayError as error:
            if question == "logs":
                raise UnknownActorError(member.name) from error
            return _lost_report(error)


def _value(ref: RayHandle, seconds: float | None) -> JsonValue:
    return ray.get(ref, timeout=seconds)


def _wait_gone(name: str, namespace: str) -> bool:
    """Wait until no actor has this name; return whether that happened in time."""
    deadline = time.monotonic() + STOP_SPARE_SECONDS
    while True:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)  # Ray sends no event for this.


def _kill(handle: RayHandle) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(handle, no_restart=True)


def _lost_report(error: Exception) -> Report:
    return {"phase": "failed", "detail": f"the actor is gone: {_first_line(error)}", "lost": True}


def _place_report(report: Report, shape: _Shape | None, index: int) -> Report:
    """Return an actor's report; if the actor is lost, add its node to the message."""
    node = shape.node(index) if shape is not None and report.get("lost") else ""
    return {**report, "detail": f"on node {node}, {report['detail']}"} if node else report


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _why(report: Report) -> str:
    lines = "; ".join(report.get("log_tail", [])[-3:])
    return f"{report.get('detail', '')}{': ' if lines else ''}{lines}"


def _wants(options: JsonMapping) -> str:
    return ", ".join(
        f"{name} {options[name]:g}" for name in ("num_gpus", "num_cpus") if name in options
    )

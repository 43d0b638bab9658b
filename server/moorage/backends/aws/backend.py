"""`AwsBackend`: one instance of Amazon EC2 for each workload.

All state that must outlive the daemon is in tags at AWS, except the server's id and its regions
(`Identity`). boto3 blocks, so each call runs in one of a few threads. One more thread checks all
instances periodically, and reports those that ended by themselves.
"""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from moorage.backends.aws import catalogue, commands, containers, orders
from moorage.backends.aws.calls import AwsCalls, AwsError, Meaning
from moorage.backends.aws.identity import Identity
from moorage.backends.aws.instances import Ec2Instance, Instances
from moorage.backends.aws.launches import LaunchPlan, launch
from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.aws.watch import InstanceWatch
from moorage.backends.base import (
    LOG_BYTES_MAX,
    BackendError,
    CommandExecution,
    CommonBackend,
    Log,
    Order,
    Phase,
    Support,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.local.readiness import accepts
from moorage.backends.specs import BaseResourceSpec, ContainerResourceSpec
from moorage.model import Node, Share
from moorage.records.json_values import JsonValue
from moorage.storage.base import SharedNames

THREADS_MAX: Final = 16
"""Maximum calls to AWS at the same time; further calls wait for a thread."""
POLL_SECONDS: Final = 5.0
STOP_SECONDS_MAX: Final = 900.0
"""Longest wait in seconds until AWS has ended an instance; large ones with GPUs take minutes."""
PROBE_SECONDS_MAX: Final = 2.0
"""Longest time in seconds of one connection attempt to the readiness port."""

T = TypeVar("T")


def _check_allowed(field: str, wanted: Collection[str], allowed: Collection[str] | None) -> None:
    """Refuse profiles and groups of the operator's account that tenants may not use."""
    for each in wanted:
        if allowed is not None and each not in allowed:
            setting = f"aws_{field}" if field.endswith("s") else f"aws_{field}s"
            reason = f"expected one that the server's setting {setting} lists, and not {each}"
            raise UnsupportedSpecError(f"{field}: {reason}")


class AwsBackend(CommonBackend):
    """Runs workloads as instances of EC2.

    Args:
        root: Folder for data that must outlive the daemon; a restarted daemon opens it again.
        node: Returns the inventory's node for a share of a lease; its labels name place and type.
        poll_seconds: Seconds between two checks of one instance, or of all instances.
        names: Shares the server's id and regions with later leaders; None: this server is alone.
        profiles: Allowed values of `instance_profile`; None: all.
        groups: Allowed values in `security_groups`; None: all.
    """

    name: Final = "aws"
    support: Final = Support(
        categories=frozenset({"instance", "container"}), default="instance", execute=True, logs=True
    )

    def __init__(
        self,
        root: Path,
        node: Callable[[Share], Node | None] = lambda _: None,
        poll_seconds: float = POLL_SECONDS,
        *,
        names: SharedNames | None = None,
        profiles: Collection[str] | None = None,
        groups: Collection[str] | None = None,
    ) -> None:
        self._profiles, self._groups = profiles, groups
        self._home = Identity(root, names)
        self._node = node
        self._poll_seconds = poll_seconds
        self._calls = AwsCalls()
        self._lock = threading.Lock()
        # A lock exists as long as a task holds it or waits for it.
        self._names: weakref.WeakValueDictionary[str, threading.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._found: set[str] = set()
        """Workloads whose instance was found at AWS, perhaps in another region than a start would
        use."""
        self._pool: ThreadPoolExecutor | None = None
        self._made: Instances | None = None
        self._watching: InstanceWatch | None = None

    # Looking -----------------------------------------------------------------------------------

    def refuse(self, spec: BaseResourceSpec) -> None:
        wanted = _instance_spec(spec)
        orders.check(wanted)
        profile = [wanted.instance_profile] if wanted.instance_profile else []
        _check_allowed("instance_profile", profile, self._profiles)
        _check_allowed("security_groups", wanted.security_groups, self._groups)

    async def discover(self) -> Collection[WorkloadReport]:
        found = await self._look_in_thread(self._all)
        named: dict[str, Ec2Instance] = {}
        for each in found:
            if not each.stopped or not each.over:
                earlier = named.get(each.workload)
                if earlier is None or earlier.over:
                    named[each.workload] = each
        for each in named.values():
            self._watch().follow(each)
        return [each.as_workload() for each in named.values()]

    async def probe(self, workload: str) -> WorkloadReport:
        """Check an instance, and connect to its port if one is known; see `Backend.probe`."""
        instance = await self._look_in_thread(lambda: self._current(workload))
        port = self._watch().port(workload)
        seen = instance.as_workload(port)
        if seen.phase is not Phase.READY or port is None:
            return seen
        answers = await accepts(instance.address, port, PROBE_SECONDS_MAX)
        return seen if answers else replace(seen, phase=Phase.STARTING, endpoint="")

    async def status(self, workload: str) -> WorkloadReport:
        instance = await self._look_in_thread(lambda: self._current(workload))
        return instance.as_workload(self._watch().port(workload))

    def _all(self, workload: str | None = None) -> list[Ec2Instance]:
        """Return the instances of all regions in which this server ever launched one.

        With `workload`, only the regions that answer count, so that the caller can end instances
        there. Without `workload`, a silent region is an error: missing instances would count as
        ended.
        """
        found: list[Ec2Instance] = []
        silent: AwsError | None = None
        for region in self._home.regions():
            try:
                found += self._instances().all(region, workload)
                self._found.update(each.workload for each in found if not each.over)
            except AwsError as error:
                silent = error
        if silent is not None and (workload is None or not found):
            raise silent
        return found

    def _current(self, workload: str) -> Ec2Instance:
        found = self._find(workload)
        if found is None:
            raise UnknownWorkloadError(workload)
        return found

    def _find(self, workload: str, regions: Collection[str] | None = None) -> Ec2Instance | None:
        """Return the instance of a workload in the given regions; None: in all regions."""
        if regions is None:
            regions = sorted({each.region for each in self._all(workload)})
        seen = (self._instances().current(region, workload) for region in regions)
        return next((each for each in seen if each is not None), None)

    # Starting ----------------------------------------------------------------------------------

    async def start(self, order: Order) -> WorkloadReport:
        spec = _instance_spec(order.spec)
        self.refuse(spec)
        if len(order.placement) > 1:
            raise UnsupportedSpecError("the backend aws starts single instances, not gangs")
        if len(order.id) > orders.TAG_VALUE_CHARS_MAX:
            raise BackendError(f"a name has at most {orders.TAG_VALUE_CHARS_MAX} characters at AWS")
        share = order.placement[0] if order.placement else None
        node = self._node(share) if share else None
        seen: list[Ec2Instance] = []
        trouble: list[str] = []
        self._watch().wanted(order.id)
        try:
            async with asyncio.timeout(order.timeout_seconds):
                return await self._launch_and_wait(order, spec, node, seen, trouble)
        except BaseException as error:
            lines = await finish(self._undone(order.id, seen))
            output = "; ".join(lines[-3:] or trouble[-1:])
            if isinstance(error, TimeoutError):
                where = f" ({seen[-1].title})" if seen else ""
                output = f": {output}" if output else ""
                raise TimeoutError(
                    f"it was not ready within {order.timeout_seconds:g} s{where}{output}"
                ) from None
            raise

    async def _launch_and_wait(
        self,
        order: Order,
        spec: InstanceResourceSpec,
        node: Node | None,
        seen: list[Ec2Instance],
        trouble: list[str],
    ) -> WorkloadReport:
        """Launch or find the instance, and wait until it is ready."""

        def begin(given_up: threading.Event) -> Ec2Instance | None:
            region = orders.region_of(spec, node, self._calls.region)
            # The region of the node, or of the server, may have changed since the launch.
            regions = None if order.resumed or order.id in self._found else [region]
            with self._name(order.id):
                found = self._patiently(lambda: self._find(order.id, regions), given_up, trouble)
                if found is not None or order.resumed:
                    return found
                self._home.enter(region)  # Only now: AWS has answered, so the region exists.
                self._tell(
                    WorkloadReport(
                        order.id, Phase.PULLING, detail=f"requested from AWS in {region}"
                    )
                )
                types = catalogue.load(self._home.folder, region)
                share = order.placement[0] if order.placement else None
                offers = orders.offers(spec, share, node, types, region)
                plan = LaunchPlan(order, spec, region, orders.zones_of(spec, node), offers)
                return launch(plan, self._calls, self._instances(), given_up)

        instance = await self._in_thread(begin)
        if instance is None:
            return WorkloadReport(order.id, Phase.FAILED, detail="AWS no longer knows the instance")
        self._tell(WorkloadReport(order.id, Phase.STARTING, detail=instance.title))
        while True:
            seen.append(instance)
            if instance.over:
                if instance.ready:  # The instance was ready once, and has ended since.
                    return instance.as_workload()
                raise BackendError(instance.as_workload().detail)
            if instance.state == "running" and await self._is_ready(instance, spec):
                break
            await asyncio.sleep(self._poll_seconds)
            instance = await self._look_in_thread(lambda: self._look(seen[-1]))
        if not instance.ready:
            instance = await self._in_thread(lambda _: self._mark(seen[-1]))
        ready = instance.as_workload(spec.readiness_port)
        self._watch().follow(instance, spec.readiness_port)
        self._tell(ready)
        return ready

    async def _is_ready(self, instance: Ec2Instance, spec: InstanceResourceSpec) -> bool:
        if instance.ready:
            return True
        if spec.readiness_port is not None:
            return await accepts(instance.address, spec.readiness_port, PROBE_SECONDS_MAX)
        try:
            return await self._look_in_thread(lambda: self._instances().passed(instance))
        except AwsError as error:
            if error.meaning is Meaning.AGAIN or error.code == "InvalidInstanceID.NotFound":
                return False
            raise

    def _look(self, instance: Ec2Instance) -> Ec2Instance:
        """Return the instance's present state; the given state if AWS does not answer in time."""
        try:
            seen = self._instances().look(instance)
        except AwsError as error:
            if error.meaning is not Meaning.AGAIN:
                raise
            return instance
        if seen is None or seen.stopped:
            raise BackendError(f"{instance.title} was stopped while it started")
        return seen

    def _mark(self, instance: Ec2Instance) -> Ec2Instance:
        with contextlib.suppress(AwsError):  # Without the tag, a restarted daemon probes again.
            self._instances().mark_ready(instance)
        return replace(instance, ready=True)

    async def _undone(self, workload: str, seen: list[Ec2Instance]) -> tuple[str, ...]:
        """Terminate the instances of a failed start; return the last lines of their console.

        Once AWS has accepted the termination, the end of the instance is certain. This function
        does not wait for that end, since large machines take minutes.
        """
        lines: tuple[str, ...] = ()
        try:
            if seen:
                lines = await self._in_thread(lambda _: self._instances().console(seen[-1]))
            await self._in_thread(lambda _: self._end(workload))
        except BackendError:
            self._watch().terminate_soon(workload)
        return lines

    def _patiently(self, look: Callable[[], T], given_up: threading.Event, trouble: list[str]) -> T:
        """Repeat `look` while AWS does not answer, until the start is cancelled.

        A restarted daemon must not conclude that an instance is gone only because AWS is
        unreachable.
        """
        while True:
            try:
                return look()
            except AwsError as error:
                trouble.append(str(error))
                if error.meaning is not Meaning.AGAIN or given_up.wait(self._poll_seconds):
                    raise

    # Stopping ----------------------------------------------------------------------------------

    async def stop(
        self,
        workload: str,
        stop_seconds_max: float | None = None,  # noqa: ARG002  # AWS alone sets the time.
    ) -> None:
        self._watch().forget(workload)
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                ended = await self._in_thread(lambda _: self._end(workload))
                while ended:
                    await asyncio.sleep(self._poll_seconds)
                    left = await self._look_in_thread(lambda: self._is_left(workload))
                    if not left:
                        break
        except TimeoutError:
            reason = f"AWS has not ended {workload} within {STOP_SECONDS_MAX:g} s"
            raise BackendError(reason) from None
        self._found.discard(workload)
        if ended:
            self._tell(WorkloadReport(workload, Phase.STOPPED))

    def _end(self, workload: str) -> bool:
        """Terminate all instances of a name; return whether any was alive."""
        with self._name(workload):
            found = [each for each in self._all(workload) if not each.gone or not each.stopped]
            for region in {each.region for each in found}:
                self._instances().end([each for each in found if each.region == region])
            return bool(found)

    def _is_left(self, workload: str) -> bool:
        return any(not each.gone for each in self._all(workload))

    async def close(self) -> None:
        """Close the connections. Instances continue to run."""
        self._listener = None
        with self._lock:
            watch, self._watching = self._watching, None
            pool, self._pool = self._pool, None
        if watch is not None:
            await asyncio.to_thread(watch.close)
        if pool is not None:
            pool.shutdown(wait=False)

    # Not supported, or by SSM ------------------------------------------------------------------

    async def reset(self, workload: str) -> JsonValue:
        """Refuse: only a new machine undoes the changes of a user."""
        await self.status(workload)
        raise UnsupportedSpecError("an instance cannot be reset; end it and start another")

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandExecution:
        """Run a command on an instance, or in its container, by SSM; see `Backend.execute`.

        AWS stores only the first 24,000 characters of the output.
        """

        def run(given_up: threading.Event) -> CommandExecution:
            instance = self._current(workload)
            script = commands.script_of(
                command, workdir, user, environment or {}, container=instance.container
            )
            return commands.run(self._calls, instance, script, timeout_seconds, given_up)

        return await self._in_thread(run)

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:  # noqa: ARG002  # Each name has one instance.
        """Read the console of an instance (some minutes old), or its container's output by SSM."""
        return await self._in_thread(lambda given_up: self._read(workload, offset, given_up))

    def _read(self, workload: str, offset: int, given_up: threading.Event) -> Log:
        instance = self._current(workload)
        if instance.container and not instance.over:
            script = f"docker logs {containers.NAME} 2>&1"
            data = commands.run(self._calls, instance, script, None, given_up).output.encode()
        else:
            data = self._instances().output(instance).encode()
        start = max(len(data) + offset, 0) if offset < 0 else min(offset, len(data))
        part = data[start:][:LOG_BYTES_MAX]
        return Log.of(part, start, over=instance.over and start + len(part) >= len(data))

    # Threads -----------------------------------------------------------------------------------

    async def _look_in_thread(self, look: Callable[[], T]) -> T:
        """Call `look` in a thread; a cancelled caller does not wait, since AWS may be silent."""
        return await asyncio.wrap_future(self._submit(look))

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="aws")
            return self._pool.submit(work)

    async def _in_thread(self, work: Callable[[threading.Event], T]) -> T:
        """Run `work` in a thread to its end; a cancellation sets the event passed to `work`."""
        given_up = threading.Event()
        future = asyncio.wrap_future(self._submit(partial(work, given_up)))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            given_up.set()
            with contextlib.suppress(BackendError):  # No caller is left for the error.
                await finish(future)
            raise

    def _name(self, workload: str) -> threading.Lock:
        """Return the lock of a workload, to hold while its instance is found, launched or ended."""
        with self._lock:
            return self._names.setdefault(workload, threading.Lock())

    def _instances(self) -> Instances:
        server = self._home.server
        with self._lock:
            if self._made is None:
                self._made = Instances(self._calls, server)
            return self._made

    def _watch(self) -> InstanceWatch:
        with self._lock:
            if self._watching is None:
                self._watching = InstanceWatch(self._all, self._end, self._tell, self._poll_seconds)
            return self._watching


def _instance_spec(spec: BaseResourceSpec) -> InstanceResourceSpec:
    if isinstance(spec, ContainerResourceSpec):
        return containers.instance_of(spec)
    if not isinstance(spec, InstanceResourceSpec):
        reason = f"the backend aws starts container, instance, not {spec.category}"
        raise UnsupportedSpecError(reason)
    return spec

"""Instances as AWS reports them, found by the tags of this backend.

AWS shows a change some seconds after the call that made it ("eventual consistency"), so this
process remembers its own launches for that time.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from moorage.backends.aws.calls import AwsCalls, AwsError
from moorage.backends.base import LOG_TAIL_LINES, Phase, WorkloadReport
from moorage.records.json_values import JsonObject

SERVER: Final = "moorage:server"
"""Tag: the server that manages the instance."""
WORKLOAD: Final = "moorage:workload"
"""Tag: the name of the workload; for a lease, its id."""
READY: Final = "moorage:ready"
"""Tag: the instance was ready once; a restarted daemon does not probe it again."""
CONTAINER: Final = "moorage:container"
"""Tag: the order is for a container on the instance."""
STOPPED: Final = "moorage:stopped"
"""Tag: this server stopped the instance, and does not report its end."""
CONSISTENCY_SECONDS: Final = 60.0
"""Longest seconds until AWS shows a launched instance; usually one or two pass."""
_WILD: Final = re.compile(r"([*?\\])")
_OVER: Final = frozenset({"shutting-down", "terminated", "stopping", "stopped"})


@dataclass(frozen=True, slots=True)
class Ec2Instance:
    """One instance, as AWS last reported it.

    Args:
        id: The instance's id at AWS.
        type: E.g. `g5.xlarge`.
        state: AWS's state: pending, running, shutting-down, terminated, stopping or stopped.
        spot: Whether it was rented on the spot market.
        launched: Launch time, by AWS's clock.
        reason: AWS's code for the reason of its end.
        message: AWS's text for this reason.
        address: The public address; the private one if there is no public one.
        ready: Whether it was ready once.
        stopped: Whether this server stopped it.
        container: Whether the order is for a container on the instance.
    """

    id: str
    workload: str
    region: str
    zone: str
    type: str
    state: str
    spot: bool
    launched: datetime
    reason: str = ""
    message: str = ""
    address: str = ""
    ready: bool = False
    stopped: bool = False
    container: bool = False

    @property
    def over(self) -> bool:
        """Whether the instance has ended, or is ending."""
        return self.state in _OVER

    @property
    def gone(self) -> bool:
        """Whether the instance no longer exists."""
        return self.state == "terminated"

    @property
    def title(self) -> str:
        """The instance in messages: type, id, zone and market."""
        market = "spot" if self.spot else "on demand"
        return f"{self.type} {self.id} in {self.zone}, {market}"

    def as_workload(self, port: int | None = None) -> WorkloadReport:
        """Return the instance's state as a workload report."""
        if not self.over:
            ready = self.ready and self.state == "running"
            phase = Phase.READY if ready else Phase.STARTING
            where = f"tcp://{self.address}:{port}" if port else self.address
            return WorkloadReport(self.workload, phase, where if ready else "", self.title)
        by_itself = self.reason == "Client.InstanceInitiatedShutdown"
        phase = Phase.SUCCEEDED if by_itself else Phase.FAILED
        return WorkloadReport(self.workload, phase, detail=f"{self.title}: {self._end()}")

    def _end(self) -> str:
        match self.reason:
            case "Client.InstanceInitiatedShutdown":
                return "it shut itself down"
            case "Server.SpotInstanceTermination" | "Server.SpotInstanceShutdown":
                return "AWS took the spot instance back"
            case "Client.UserInitiatedShutdown":
                return "a user ended it at AWS (Client.UserInitiatedShutdown)"
            case _:  # AWS has many reasons, and adds new ones.
                why = f": {self.message}" if self.message else ""
                return f"the state of the instance is {self.state}{why}"


class Instances:
    """Finds, marks and ends the instances of one server.

    Args:
        calls: Makes the calls to AWS.
        server: Value of the tag `moorage:server`.
    """

    def __init__(self, calls: AwsCalls, server: str) -> None:
        self._calls = calls
        self.server = server
        self._lock = threading.Lock()
        self._launched: dict[str, tuple[Ec2Instance, float]] = {}

    def remember(self, instance: Ec2Instance) -> None:
        """Remember an instance that was launched just now."""
        with self._lock:
            self._launched[instance.id] = (instance, time.monotonic())

    def all(self, region: str, workload: str | None = None) -> list[Ec2Instance]:
        """Return the instances of this server, or of one workload; the earliest first.

        Raises:
            AwsError: AWS refused, or did not answer.
        """
        filters = [{"Name": f"tag:{SERVER}", "Values": [_plain(self.server)]}]
        if workload is not None:
            filters.append({"Name": f"tag:{WORKLOAD}", "Values": [_plain(workload)]})
        found = {
            each.id: each
            for page in self._calls.pages("describe_instances", region, Filters=filters)
            for each in parse(page, region)
        }
        for each in self._fresh():
            if each.region == region and workload in {None, each.workload}:
                found.setdefault(each.id, each)
        return sorted(found.values(), key=lambda each: (each.launched, each.id))

    def current(self, region: str, workload: str) -> Ec2Instance | None:
        """Return a workload's instance: the running one, else the last one that ended, else None.

        Two instances may run if AWS showed the first instance too late. The instance that was ready
        stays, else the earliest one, and the others are ended.
        """
        found = [each for each in self.all(region, workload) if not each.stopped]
        alive = [each for each in found if not each.over]
        alive.sort(key=lambda each: not each.ready)
        if len(alive) > 1:
            self.end(alive[1:])
        return alive[0] if alive else (found[-1] if found else None)

    def look(self, instance: Ec2Instance) -> Ec2Instance | None:
        """Return an instance's present state; None if AWS no longer knows the instance."""
        filters = [{"Name": "instance-id", "Values": [instance.id]}]
        answer = self._calls.call("describe_instances", instance.region, Filters=filters)
        found = parse(answer, instance.region)
        if found:
            return found[0]
        return next((each for each in self._fresh() if each.id == instance.id), None)

    def passed(self, instance: Ec2Instance) -> bool:
        """Return whether the instance has passed both status checks of AWS."""
        answer = self._calls.call(
            "describe_instance_status", instance.region, InstanceIds=[instance.id]
        )
        statuses = answer["InstanceStatuses"]
        return bool(statuses) and all(
            each[kind]["Status"] == "ok"
            for each in statuses
            for kind in ("InstanceStatus", "SystemStatus")
        )

    def mark_ready(self, instance: Ec2Instance) -> None:
        """Tag the instance at AWS as ready."""
        self._tag(instance.region, [instance.id], READY)

    def end(self, instances: Iterable[Ec2Instance]) -> None:
        """Tag instances of one region as stopped by this server, and terminate them."""
        named = list(instances)
        if not named:
            return
        region, ids = named[0].region, [each.id for each in named]
        with contextlib.suppress(AwsError):  # AWS may have deleted an ended instance.
            self._tag(region, ids, STOPPED)
        alive = [each for each in named if not each.gone]
        try:
            if alive:
                ids = [each.id for each in alive]
                self._calls.call("terminate_instances", region, InstanceIds=ids)
        except AwsError as error:
            if error.code != "InvalidInstanceID.NotFound":
                raise
            if len(alive) > 1:  # One unknown id: AWS ended none.
                for each in alive:
                    self.end([each])
            elif alive[0].id in {each.id for each in self._fresh()}:  # AWS does not show it yet.
                raise
        with self._lock:
            for each in named:
                self._launched.pop(each.id, None)

    def console(self, instance: Ec2Instance) -> tuple[str, ...]:
        """Return the last lines of an instance's console; () if AWS has none."""
        with contextlib.suppress(AwsError):
            lines = [line.strip() for line in self.output(instance).splitlines()]
            return tuple([line for line in lines if line][-LOG_TAIL_LINES:])
        return ()

    def output(self, instance: Ec2Instance) -> str:
        """Return the end of an instance's console, as AWS has it: up to 64 KiB, minutes old."""
        answer = self._calls.call("get_console_output", instance.region, InstanceId=instance.id)
        text: str = answer.get("Output", "")
        return text

    def _tag(self, region: str, ids: list[str], key: str) -> None:
        tags = [{"Key": key, "Value": "true"}]
        self._calls.call("create_tags", region, Resources=ids, Tags=tags)

    def _fresh(self) -> list[Ec2Instance]:
        """Return instances launched so recently that AWS may not show them yet."""
        now = time.monotonic()
        with self._lock:
            old = [
                name for name, (_, at) in self._launched.items() if now - at > CONSISTENCY_SECONDS
            ]
            for name in old:
                del self._launched[name]
            return [each for each, _ in self._launched.values()]


def parse(page: JsonObject, region: str) -> list[Ec2Instance]:
    """Return the instances of an answer of DescribeInstances or RunInstances."""
    reservations = page.get("Reservations", [page])
    return [
        _parse(each, region) for reservation in reservations for each in reservation["Instances"]
    ]


def _parse(document: JsonObject, region: str) -> Ec2Instance:
    tags = {each["Key"]: each["Value"] for each in document.get("Tags", [])}
    reason = document.get("StateReason", {})
    return Ec2Instance(
        id=document["InstanceId"],
        workload=tags.get(WORKLOAD, ""),
        region=region,
        zone=document["Placement"]["AvailabilityZone"],
        type=document["InstanceType"],
        state=document["State"]["Name"],
        spot=document.get("InstanceLifecycle") == "spot",
        launched=document["LaunchTime"],
        reason=reason.get("Code", ""),
        message=reason.get("Message", ""),
        address=document.get("PublicIpAddress") or document.get("PrivateIpAddress", ""),
        ready=READY in tags,
        stopped=STOPPED in tags,
        container=CONTAINER in tags,
    )


def _plain(value: str) -> str:
    """Return a value for a filter, with the wildcards `*` and `?` escaped."""
    return _WILD.sub(r"\\\1", value)

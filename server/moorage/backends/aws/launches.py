"""Launches one instance for an order: tries each offer in each zone until AWS has capacity.

`AwsBackend` is the only caller, in a thread of its own and under the lock of the workload's name.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moorage.backends.aws import orders
from moorage.backends.aws.calls import AwsCalls, AwsError, Meaning
from moorage.backends.aws.instances import Ec2Instance, Instances, parse
from moorage.backends.aws.orders import Offer
from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.base import BackendError, Order
from moorage.records.json_values import JsonObject

PAUSES_SECONDS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses in seconds before retries of a launch that AWS throttled or left unanswered."""
ROUNDS_MAX: Final = 20
"""Maximum launches in one zone by one start: AWS may answer each with an ended instance."""
SHOWN_MAX: Final = 8
"""Maximum refusals that the reason of a failed start lists."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The order, and the offers and zones to try for it.

    Args:
        zones: The zones to try, in order; empty: all that AWS lists.
        offers: The offers to try, in order.
    """

    order: Order
    spec: InstanceResourceSpec
    region: str
    zones: Sequence[str]
    offers: Sequence[Offer]


@dataclass(slots=True)
class _Refusals:
    """Collects the reasons why no instance was launched yet."""

    refusals: list[str] = field(default_factory=list[str])
    meanings: set[Meaning] = field(default_factory=set[Meaning])

    def add(self, offer: Offer, zone: str, error: AwsError) -> None:
        self.refusals.append(f"{offer.title} in {zone}: {error}")
        self.meanings.add(error.meaning)

    def error(self) -> BackendError:
        more = len(self.refusals) - SHOWN_MAX
        listed = "; ".join(self.refusals[:SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
        if self.meanings == {Meaning.QUOTA}:
            advice = "raise the quota in the console of Service Quotas, or stop instances"
            return BackendError(f"the account's quota at AWS is used up ({listed}): {advice}")
        advice = "try other zones, types or regions, or later"
        return BackendError(f"AWS has no capacity now ({listed}): {advice}")


def launch(
    plan: LaunchPlan, calls: AwsCalls, instances: Instances, given_up: threading.Event
) -> Ec2Instance:
    """Launch an instance at AWS, and remember it in `instances`.

    Args:
        plan: The offers and zones to try.
        calls: Makes the calls to AWS.
        instances: Finds earlier instances of the workload, and remembers the new one.
        given_up: Set when the caller has given up; then nothing more is tried.

    Raises:
        BackendError: No instance was launched; the message lists the tries and the remedy.
    """
    zones = plan.zones or _zones(calls, plan.region)
    turn = len([each for each in instances.all(plan.region, plan.order.id) if each.over])
    refusals = _Refusals()
    for offer in plan.offers:
        for zone in zones:
            if given_up.is_set():
                raise BackendError("the start was cancelled")
            try:
                return _one(plan, offer, zone, turn, calls, instances, given_up)
            except AwsError as error:
                match error.meaning:
                    case Meaning.NO_CAPACITY:
                        refusals.add(offer, zone, error)
                    case Meaning.QUOTA:  # All zones of a region share it.
                        refusals.add(offer, zone, error)
                        break
                    case Meaning.AGAIN | Meaning.NEVER:
                        raise
    raise refusals.error()


def _one(
    plan: LaunchPlan,
    offer: Offer,
    zone: str,
    turn: int,
    calls: AwsCalls,
    instances: Instances,
    given_up: threading.Event,
) -> Ec2Instance:
    """Launch an instance in one zone.

    AWS remembers client tokens longer than it lists ended instances. So the answer may be an
    instance that has already ended. In this case, `turn` grows by 1, which gives a new token.
    """
    for each in range(turn, turn + ROUNDS_MAX):
        parameters = orders.request(plan.order, plan.spec, offer, zone, instances.server, each)
        _add_root_device(parameters, plan, calls)
        made = _launch(parameters, plan, calls, given_up)
        seen = instances.look(made) or made
        if not seen.over:
            instances.remember(seen)
            return seen
    raise BackendError(f"{ROUNDS_MAX} instances of the name {plan.order.id} have ended already")


def _launch(
    parameters: JsonObject, plan: LaunchPlan, calls: AwsCalls, given_up: threading.Event
) -> Ec2Instance:
    """Call RunInstances; repeat it if the outcome is unknown or AWS throttles."""
    for pause in (*PAUSES_SECONDS, None):
        try:
            answer = calls.launch(plan.region, **parameters)
        except AwsError as error:
            if error.code == "IdempotentParameterMismatch":
                return _by_token(parameters, plan, calls, error)
            if error.meaning is not Meaning.AGAIN or pause is None or given_up.wait(pause):
                raise
        else:
            (made,) = parse(answer, plan.region)
            return made
    raise AssertionError("this line is never reached: the last try returns or raises")


def _by_token(
    parameters: JsonObject, plan: LaunchPlan, calls: AwsCalls, error: AwsError
) -> Ec2Instance:
    """Return the instance of an earlier launch with the same token but other arguments.

    Such an instance exists if the server is updated between a launch and the first check of the
    instance.
    """
    filters = [{"Name": "client-token", "Values": [parameters["ClientToken"]]}]
    answer = calls.call("describe_instances", plan.region, Filters=filters)
    found = [each for each in parse(answer, plan.region) if each.workload == plan.order.id]
    if not found:
        raise error
    return found[0]


def _add_root_device(parameters: JsonObject, plan: LaunchPlan, calls: AwsCalls) -> None:
    """Look up the name of the root device of the user's image, if its size is given."""
    for each in parameters.get("BlockDeviceMappings", []):
        if not each["DeviceName"]:
            answer = calls.call("describe_images", plan.region, ImageIds=[parameters["ImageId"]])
            if not answer["Images"]:
                raise BackendError(
                    f"image_id: AWS knows no {parameters['ImageId']} in {plan.region}"
                )
            each["DeviceName"] = answer["Images"][0]["RootDeviceName"]


def _zones(calls: AwsCalls, region: str) -> list[str]:
    filters = [
        {"Name": "state", "Values": ["available"]},
        {"Name": "zone-type", "Values": ["availability-zone"]},
    ]
    answer = calls.call("describe_availability_zones", region, Filters=filters)
    zones = sorted(each["ZoneName"] for each in answer["AvailabilityZones"])
    if not zones:
        raise BackendError(f"AWS lists no zone of {region}")
    return zones

"""Tests of the reports of the backend `aws` about instances."""

from datetime import UTC, datetime

import pytest

from moorage.backends.aws.instances import parse
from moorage.backends.base import Phase

pytestmark = pytest.mark.heavy  # The extra `aws`.

BASE = {
    "InstanceId": "i-1",
    "InstanceType": "g5.xlarge",
    "Placement": {"AvailabilityZone": "us-east-1a"},
    "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC),
    "Tags": [{"Key": "moorage:workload", "Value": "a"}],
    "PrivateIpAddress": "10.0.0.7",
}
READY = [*BASE["Tags"], {"Key": "moorage:ready", "Value": "true"}]


@pytest.mark.parametrize(
    ("state", "reason", "phase", "said"),
    [
        ("pending", "", Phase.STARTING, "g5.xlarge i-1 in us-east-1a"),
        ("running", "", Phase.STARTING, "g5.xlarge i-1 in us-east-1a"),
        ("terminated", "Client.InstanceInitiatedShutdown", Phase.SUCCEEDED, "shut itself down"),
        ("terminated", "Server.SpotInstanceTermination", Phase.FAILED, "took the spot instance"),
        ("shutting-down", "Client.UserInitiatedShutdown", Phase.FAILED, "a user ended it"),
        ("stopped", "Client.UserInitiatedShutdown", Phase.FAILED, "a user ended it"),
        ("terminated", "Client.VolumeLimitExceeded", Phase.FAILED, "terminated: too many"),
    ],
)
def test_states_and_end_reasons_of_instances_become_phases(state, reason, phase, said):
    document = {**BASE, "State": {"Name": state}}
    if reason:
        document["StateReason"] = {"Code": reason, "Message": "too many volumes"}
    (instance,) = parse({"Reservations": [{"Instances": [document]}]}, "us-east-1")
    workload = instance.as_workload()
    assert workload.phase is phase
    assert said in workload.detail
    assert workload.endpoint == ""


def test_the_endpoint_of_a_ready_instance_is_public_if_possible():
    document = {**BASE, "State": {"Name": "running"}, "Tags": READY}
    (private,) = parse({"Instances": [document]}, "us-east-1")
    assert private.as_workload().endpoint == "10.0.0.7"
    (public,) = parse({"Instances": [{**document, "PublicIpAddress": "203.0.113.9"}]}, "us-east-1")
    assert public.as_workload(22).endpoint == "tcp://203.0.113.9:22"

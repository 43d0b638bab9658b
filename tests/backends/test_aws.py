"""Tests of the order of attempts and of the reports of the backend `aws`, at moto's server."""

import asyncio
import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aws_world import POLL_SECONDS, AwsWorld

from moorage.backends.aws.backend import AwsBackend
from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.base import BackendError, Order, Phase, UnsupportedSpecError, WorkloadReport
from moorage.backends.specs import ContainerResourceSpec, Readiness
from moorage.model import ClusterId, Gpu, Node, NodeId, Share
from moorage.resources import ResourceEngine, ResourceStatus
from moorage.resources.resources import BackendRunner

pytestmark = pytest.mark.heavy

SEEN_SECONDS_MAX = 60
SMALL = InstanceResourceSpec(instance_type="t3.micro")
ZONE, MARKET = "Placement.AvailabilityZone", "InstanceMarketOptions.MarketType"
SHARE = Share(ClusterId("cloud"), NodeId("n1"), ("0",), cpu_milli=2000, memory_mib=4096)
NODE = Node(NodeId("n1"), 8000, 32768, (Gpu("0", "L4"), Gpu("1", "L4")))


@pytest.fixture
async def backend(aws: AwsWorld, tmp_path: Path) -> AsyncIterator[AwsBackend]:
    made = AwsBackend(tmp_path, poll_seconds=POLL_SECONDS)
    yield made
    aws.memory.faults.clear()
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()


def spot(parameters: dict[str, str]) -> bool:
    return MARKET in parameters


def tags(instance: dict[str, Any]) -> dict[str, str]:
    return {each["Key"]: each["Value"] for each in instance["Tags"]}


def only(aws: AwsWorld, workload: str) -> dict[str, Any]:
    (found,) = [each for each in aws.instances() if tags(each).get("moorage:workload") == workload]
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  # AWS sends no event.
            await asyncio.sleep(0.02)  # No event of AWS reports the end.


# Order of attempts ------------------------------------------------------------------------------


async def test_after_a_refusal_for_capacity_the_search_leaves_the_zone_at_once(aws, backend):
    """AWS answers with HTTP 500; boto3 would repeat the call four times, with pauses."""
    code = "InsufficientInstanceCapacity"
    aws.refuse("RunInstances", code, status=500, when=lambda each: each[ZONE] == "us-east-1a")
    ready = await backend.start(Order("a", SMALL))
    assert [each[ZONE] for each in aws.requests("RunInstances")] == ["us-east-1a", "us-east-1b"]
    assert "us-east-1b, on demand" in ready.detail


async def test_zones_are_tried_in_the_order_of_the_spec(aws, backend):
    aws.refuse("RunInstances", "Unsupported", when=lambda each: each[ZONE] == "us-east-1d")
    spec = InstanceResourceSpec(instance_type="t3.micro", zones=["us-east-1d", "us-east-1b"])
    await backend.start(Order("a", spec))
    assert [each[ZONE] for each in aws.requests("RunInstances")] == ["us-east-1d", "us-east-1b"]


async def test_without_spot_capacity_an_on_demand_instance_is_started(aws, backend):
    aws.refuse("RunInstances", "SpotMaxPriceTooLow", when=spot)
    spec = InstanceResourceSpec(
        instance_type="t3.micro", spot=True, max_price_per_hour=0.02, zones=["us-east-1a"]
    )
    ready = await backend.start(Order("a", spec))
    first, second = aws.requests("RunInstances")
    assert first["InstanceMarketOptions.SpotOptions.MaxPrice"] == "0.02"
    assert MARKET not in second
    assert first["ClientToken"] != second["ClientToken"]
    assert ready.detail.endswith("on demand")


async def test_a_node_with_the_spot_label_is_rented_as_spot(aws, tmp_path):
    labels = {"karpenter.sh/capacity-type": "spot"}
    node = Node(NODE.id, NODE.cpu_milli, NODE.memory_mib, NODE.gpus, labels=labels)
    backend = AwsBackend(tmp_path, lambda _: node, POLL_SECONDS)
    ready = await backend.start(Order("a", InstanceResourceSpec(), (SHARE,)))
    assert ready.detail.endswith("spot")
    await backend.stop("a")
    await backend.close()


async def test_a_spot_instance_is_started_if_the_market_has_capacity(aws, backend):
    spec = InstanceResourceSpec(instance_type="t3.micro", spot=True)
    assert (await backend.start(Order("a", spec))).detail.endswith("spot")


async def test_an_exhausted_spot_quota_skips_other_zones(aws, backend):
    aws.refuse("RunInstances", "MaxSpotInstanceCountExceeded", when=spot)
    spec = InstanceResourceSpec(instance_type="t3.micro", spot=True)
    await backend.start(Order("a", spec))
    assert [spot(each) for each in aws.requests("RunInstances")] == [True, False]


async def test_without_fallback_only_the_spot_market_is_tried(aws, backend):
    aws.refuse("RunInstances", "InsufficientInstanceCapacity", "none left", when=spot, status=500)
    spec = InstanceResourceSpec(
        instance_type="t3.micro", spot=True, on_demand_fallback=False, zones=["us-east-1a"]
    )
    with pytest.raises(
        BackendError, match=r"no capacity now .*t3.micro spot in us-east-1a.*none le"
    ):
        await backend.start(Order("a", spec))
    assert len(aws.requests("RunInstances")) == 1


async def test_after_a_refusal_the_next_cheapest_type_is_tried_if_the_spec_names_no_type(
    aws, backend
):
    aws.refuse(
        "RunInstances",
        "InsufficientInstanceCapacity",
        when=lambda each: each["InstanceType"] == "g6.xlarge",
    )
    spec = InstanceResourceSpec(gpus=1, gpu_model="l4", zones=["us-east-1a"])
    await backend.start(Order("a", spec))
    assert [each["InstanceType"] for each in aws.requests("RunInstances")] == [
        "g6.xlarge",
        "g6.2xlarge",
    ]


@pytest.mark.parametrize(
    ("spec", "labels", "kind"),
    [
        ({}, {}, "g6.xlarge"),
        ({}, {"node.kubernetes.io/instance-type": "g5.xlarge"}, "g5.xlarge"),
        ({"gpu_model": "T4"}, {"node.kubernetes.io/instance-type": "g5.xlarge"}, "g4dn.xlarge"),
        ({"instance_type": "t3.micro"}, {}, "t3.micro"),
    ],
)
async def test_labels_of_the_node_give_the_fields_that_the_spec_omits(
    aws, tmp_path, spec, labels, kind
):
    labels = {**labels, "topology.kubernetes.io/zone": "us-west-2b"}
    labels["topology.kubernetes.io/region"] = "us-west-2"
    node = Node(NODE.id, NODE.cpu_milli, NODE.memory_mib, NODE.gpus, labels=labels)
    backend = AwsBackend(tmp_path, lambda _: node, POLL_SECONDS)
    ready = await backend.start(Order("a", InstanceResourceSpec(**spec), (SHARE,)))
    assert ready.detail.startswith(f"{kind} ")
    assert "in us-west-2b" in ready.detail
    await backend.stop("a")
    assert aws.instances(region="us-west-2") == []
    await backend.close()


async def test_a_price_above_the_limit_is_not_paid(aws, backend):
    spec = InstanceResourceSpec(instance_type="t3.micro", max_price_per_hour=0.01)
    with pytest.raises(BackendError, match=r"max_price_per_hour.*t3.micro at 0.0104 USD"):
        await backend.start(Order("a", spec))
    elsewhere = InstanceResourceSpec(
        instance_type="t3.micro", max_price_per_hour=5, region="eu-west-1"
    )
    with pytest.raises(BackendError, match=r"eu-west-1 are not known here: moored prices"):
        await backend.start(Order("a", elsewhere))
    assert aws.requests("RunInstances") == []


# Errors of AWS ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "VcpuLimitExceeded",
            "quota at AWS is used up .*raise the quota in the console of Service Quotas",
        ),
        ("UnauthorizedOperation", "does not allow RunInstances in us-east-1.*check the credent"),
        ("InvalidAMIID.NotFound", "refused RunInstances in us-east-1 .InvalidAMIID.NotFound: "),
    ],
)
async def test_errors_name_the_place_and_a_remedy(aws, backend, code, said):
    aws.refuse("RunInstances", code)
    with pytest.raises(BackendError, match=said):
        await backend.start(Order("a", SMALL))
    assert len(aws.requests("RunInstances")) == 1


async def test_throttled_launches_are_repeated_with_the_same_token(aws, backend):
    aws.refuse("RunInstances", "RequestLimitExceeded", status=503, times=2)
    await backend.start(Order("a", SMALL))
    assert len({each["ClientToken"] for each in aws.requests("RunInstances")}) == 1
    assert len(aws.requests("RunInstances")) == 3
    only(aws, "a")


async def test_an_html_page_of_a_proxy_is_an_error(aws, backend):
    page = "<html><body>502 Bad Gateway</body></html>"
    aws.refuse("RunInstances", "", page, status=502, times=1)
    await backend.start(Order("a", SMALL))
    only(aws, "a")


async def test_missing_credentials_are_reported(aws, backend, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    bare = AwsBackend(tmp_path / "bare", poll_seconds=POLL_SECONDS)
    with pytest.raises(BackendError, match=r"no credentials for AWS .*AWS_PROFILE"):
        await bare.start(Order("a", SMALL))
    await bare.close()
    stored = (tmp_path / "bare" / "server.json").read_text()
    assert "testing" not in stored


async def test_a_missing_region_is_reported_with_the_places_to_set_it(
    aws, backend, monkeypatch, tmp_path
):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    bare = AwsBackend(tmp_path / "bare", poll_seconds=POLL_SECONDS)
    with pytest.raises(BackendError, match=r"spec\.region, .*AWS_DEFAULT_REGION"):
        await bare.start(Order("a", SMALL))
    await bare.close()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"tags": {"aws:x": "1"}}, "tags"),
        ({"tags": {"moorage:server": "mine"}}, "tags"),
        ({"user_data": "x" * 20_000}, "user_data"),
    ],
)
def test_an_impossible_spec_is_refused_before_a_lease(engine_less, spec, field):
    with pytest.raises(UnsupportedSpecError, match=f"^{field}: expected"):
        engine_less.refuse(InstanceResourceSpec(**spec))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"instance_profile": "admin"}, "instance_profile: .* aws_instance_profiles lists"),
        ({"security_groups": ["sg-1", "sg-2"]}, "security_groups: .* aws_security_groups lists"),
    ],
)
def test_instances_get_only_roles_and_groups_that_the_operator_lists(aws, tmp_path, spec, field):
    wanted = InstanceResourceSpec(instance_type="g5.xlarge", **spec)
    listing = AwsBackend(tmp_path, profiles=["worker"], groups=["sg-1"])
    for backend in (listing, AwsBackend(tmp_path, profiles=(), groups=())):
        with pytest.raises(UnsupportedSpecError, match=field):
            backend.refuse(wanted)
    allowed = {"instance_profile": "worker", "security_groups": ["sg-1"]}
    listing.refuse(InstanceResourceSpec(instance_type="g5.xlarge", **allowed))
    AwsBackend(tmp_path).refuse(wanted)


@pytest.fixture
def engine_less(aws, tmp_path):
    return AwsBackend(tmp_path)


async def test_a_gang_is_refused(backend):
    with pytest.raises(UnsupportedSpecError, match="not gangs"):
        await backend.start(Order("a", SMALL, (SHARE, SHARE)))


# One name, one instance -------------------------------------------------------------------------


async def test_a_launch_whose_answer_is_lost_makes_a_single_instance(aws, backend):
    aws.refuse("RunInstances", "", times=1, lost=True)
    await backend.start(Order("a", SMALL))
    assert len(aws.requests("RunInstances")) == 2
    only(aws, "a")


@pytest.mark.parametrize("user_data", [None, "#cloud-config\n"], ids=["same spec", "other spec"])
async def test_a_crash_between_launch_and_first_look_makes_a_single_instance(
    aws, backend, tmp_path, user_data
):
    """AWS does not list the new instance yet, so only the client token can find it."""
    await backend.start(Order("a", SMALL))
    await backend.close()
    aws.hide(2)
    after = AwsBackend(tmp_path, poll_seconds=POLL_SECONDS)
    await after.start(
        Order("a", InstanceResourceSpec(instance_type="t3.micro", user_data=user_data))
    )
    assert len(aws.requests("RunInstances")) == 2
    only(aws, "a")
    await after.close()


async def test_a_restarted_daemon_finds_an_instance_in_another_region(aws, backend, tmp_path):
    far = InstanceResourceSpec(instance_type="t3.micro", region="eu-west-1")
    await backend.start(Order("a", far))
    await backend.close()
    after = AwsBackend(tmp_path, poll_seconds=POLL_SECONDS)
    await after.discover()
    assert "eu-west-1" in (await after.start(Order("a", SMALL))).detail
    assert len(aws.requests("RunInstances")) == 1
    await after.stop("a")
    await after.close()


async def test_a_cancelled_search_does_not_wait_for_a_silent_aws(aws, tmp_path, monkeypatch):
    (tmp_path / "server.json").write_text('{"server": "s1", "regions": ["us-east-1"]}')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        backend = AwsBackend(tmp_path)
        search = asyncio.create_task(backend.discover())
        connection, _ = await asyncio.to_thread(silent.accept)
        search.cancel()
        await asyncio.wait([search])
        # The call still waits for its answer: all that it sent is read, and its end does not come.
        with connection, pytest.raises(BlockingIOError):
            list(iter(lambda: connection.recv(65_536, socket.MSG_DONTWAIT), b""))
        await backend.close()


async def test_a_resumed_workload_that_aws_forgot_is_not_started_again(aws, backend):
    ended = await backend.start(Order("a", SMALL, resumed=True))
    assert (ended.phase, ended.detail) == (Phase.FAILED, "AWS no longer knows the instance")
    assert aws.requests("RunInstances") == []


async def test_a_name_that_was_used_before_gets_a_new_instance(aws, backend):
    """The client token still names the old instance, which AWS no longer lists."""
    first = await backend.start(Order("a", SMALL))
    await backend.stop("a")
    aws.hide(2)
    second = await backend.start(Order("a", SMALL))
    assert first.detail != second.detail
    only(aws, "a")


async def test_of_two_instances_with_one_name_the_ready_instance_stays(aws, backend):
    ready = await backend.start(Order("a", SMALL))
    stored = only(aws, "a")
    same = [each for each in stored["Tags"] if each["Key"] != "moorage:ready"]
    spec = [{"ResourceType": "instance", "Tags": same}]
    aws.ec2().run_instances(ImageId="ami-1", MinCount=1, MaxCount=1, TagSpecifications=spec)
    assert await backend.status("a") == ready
    assert only(aws, "a")["InstanceId"] == stored["InstanceId"]


async def test_a_start_cancelled_during_the_launch_leaves_nothing_behind(aws, backend):
    launching = threading.Event()

    def slowly(_: dict[str, str]) -> bool:
        launching.set()
        time.sleep(0.5)  # A slow answer of AWS.
        return False

    aws.refuse("RunInstances", "", when=slowly)
    start = asyncio.create_task(backend.start(Order("a", SMALL)))
    await until(launching.is_set)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert len(aws.requests("RunInstances")) == 1
    assert [each for each in aws.instances() if tags(each).get("moorage:workload") == "a"] == []


async def test_an_instance_left_by_a_failed_start_is_ended_later(aws, backend):
    aws.refuse("TerminateInstances", "UnauthorizedOperation", times=1)
    spec = InstanceResourceSpec(instance_type="t3.micro", tags={"bench": "slow"})
    start = asyncio.create_task(backend.start(Order("a", spec)))
    await until(lambda: aws.requests("DescribeInstanceStatus"))
    start.cancel()
    await asyncio.wait([start])
    await until(lambda: len(aws.requests("TerminateInstances")) == 2)
    await until(lambda: not aws.instances(next(iter(servers(aws)))))


def servers(aws: AwsWorld) -> set[str]:
    request = aws.requests("RunInstances")[-1]
    names = {value: key for key, value in request.items() if key.endswith(".Key")}
    return {request[names["moorage:server"].replace(".Key", ".Value")]}


# Contents and readiness of the machine -------------------------------------------------------


async def test_an_instances_tags_and_script_have_its_lease_id(aws, backend):
    spec = InstanceResourceSpec(
        instance_type="t3.micro",
        user_data="#!/bin/sh\necho $MOORAGE_LEASE_ID\n",
        tags={"team": "x"},
    )
    environment = {"MOORAGE_LEASE_ID": "l'1", "MOORAGE_FENCING": "7"}
    await backend.start(Order("a", spec, environment=environment))
    made = only(aws, "a")
    assert tags(made)["moorage:lease"] == "l'1"
    assert tags(made)["team"] == "x"
    request = aws.requests("RunInstances")[0]
    assert request["MetadataOptions.HttpTokens"] == "required"
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    script = base64.b64decode(request["UserData"]).decode()
    assert script == (
        "#!/bin/sh\nexport MOORAGE_LEASE_ID='l'\\''1'\nexport MOORAGE_FENCING='7'\n"
        "echo $MOORAGE_LEASE_ID\n"
    )


async def test_an_instance_is_ready_when_its_port_answers(aws, backend):
    """The instance's subnet has this machine's loopback addresses, so its port is a real port."""
    ec2 = aws.ec2()
    vpc = ec2.create_vpc(CidrBlock="127.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="127.77.1.0/24", AvailabilityZone="us-east-1a")[
        "Subnet"
    ]["SubnetId"]
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("0.0.0.0", 0))  # noqa: S104  # Whichever address the instance gets.
        port = listener.getsockname()[1]
        spec = InstanceResourceSpec(
            instance_type="t3.micro", subnets={"us-east-1a": subnet}, readiness_port=port
        )
        start = asyncio.create_task(backend.start(Order("a", spec)))
        await until(lambda: aws.requests("RunInstances"))
        await asyncio.sleep(0.5)  # Without a probe of the port, it would be ready by now.
        assert not start.done()
        listener.listen()
        ready = await start
    address = only(aws, "a")["PrivateIpAddress"]
    assert ready.endpoint == f"tcp://{address}:{port}"
    assert (await backend.status("a")).endpoint == ready.endpoint


async def test_the_volume_has_the_size_of_the_spec_and_the_device_name_of_the_image(aws, backend):
    image = aws.ec2().describe_images(Owners=["amazon"], MaxResults=5)["Images"][0]
    spec = InstanceResourceSpec(instance_type="t3.micro", image_id=image["ImageId"], volume_gib=33)
    await backend.start(Order("a", spec))
    request = aws.requests("RunInstances")[0]
    assert request["BlockDeviceMapping.1.Ebs.VolumeSize"] == "33"
    assert request["BlockDeviceMapping.1.DeviceName"] == image["RootDeviceName"]


async def test_instances_of_other_servers_are_ignored(aws, backend, tmp_path):
    await backend.start(Order("a", SMALL))
    other = AwsBackend(tmp_path / "other", poll_seconds=POLL_SECONDS)
    ready = await other.start(Order("a", SMALL))
    assert [each.id for each in await other.discover()] == ["a"]
    await backend.stop("a")
    assert await other.status("a") == ready
    await other.stop("a")
    await other.close()


async def test_the_report_says_why_an_instance_ended_at_aws(aws, backend):
    reports: list[WorkloadReport] = []
    backend.listen(reports.append)
    await backend.start(Order("a", SMALL))
    aws.terminate(only(aws, "a")["InstanceId"])
    await until(lambda: any(each.phase.over for each in reports))
    assert reports[-1].phase is Phase.FAILED
    assert "a user ended it at AWS" in reports[-1].detail


async def test_the_error_of_a_start_that_takes_too_long_names_the_instance(aws, backend):
    await backend.start(Order("b", SMALL))  # The first call of a process is slow.
    spec = InstanceResourceSpec(instance_type="t3.micro", tags={"bench": "slow"})
    with pytest.raises(TimeoutError, match=r"not ready within 4 s \(t3.micro i-.* in us-east-1a"):
        await backend.start(Order("a", spec, timeout_seconds=4))


async def test_a_start_that_cannot_reach_aws_is_an_error(aws, tmp_path):
    page = "<html>no gateway</html>"
    aws.refuse("DescribeInstances", "", page, status=502)
    backend = AwsBackend(tmp_path, poll_seconds=POLL_SECONDS)
    with pytest.raises(TimeoutError, match=r"within 3 s: AWS did not answer DescribeInstances in"):
        await backend.start(Order("a", SMALL, timeout_seconds=3))
    aws.memory.faults.clear()
    assert list(await backend.discover()) == []
    assert '"regions": []' in (tmp_path / "server.json").read_text()
    await backend.close()


async def test_a_name_can_be_started_again_during_a_search_for_leftovers(aws, backend):
    aws.refuse("TerminateInstances", "UnauthorizedOperation", times=1)
    slow = InstanceResourceSpec(instance_type="t3.micro", tags={"bench": "slow"})
    start = asyncio.create_task(backend.start(Order("a", slow)))
    await until(lambda: aws.requests("DescribeInstanceStatus"))
    start.cancel()
    await asyncio.wait([start])
    await until(lambda: len(aws.requests("TerminateInstances")) == 2)
    ready = await backend.start(Order("a", SMALL))
    rounds = len(aws.requests("DescribeInstances"))
    await until(lambda: len(aws.requests("DescribeInstances")) > rounds + 3)
    assert await backend.status("a") == ready


async def test_a_reset_by_the_resource_engine_replaces_the_instance(aws, backend):
    engine = ResourceEngine({"aws": BackendRunner(backend)})
    await engine.acquire("a", SMALL, backend="aws")
    (before,) = aws.instances()
    await engine.reset("a")
    (after,) = aws.instances()
    assert after["InstanceId"] != before["InstanceId"]
    assert await engine.get_status("a") is ResourceStatus.RUNNING
    await engine.close()
    assert aws.instances() == []


async def test_a_silent_region_does_not_affect_instances_elsewhere(aws, backend):
    await backend.start(Order("a", SMALL))
    far = InstanceResourceSpec(instance_type="t3.micro", region="eu-west-1")
    await backend.start(Order("b", far))
    aws.refuse(
        "DescribeInstances",
        "UnauthorizedOperation",
        when=lambda each: each["region"] == "eu-west-1",
    )
    await backend.stop("a")
    with pytest.raises(BackendError, match="DescribeInstances in eu-west-1"):
        await backend.discover()
    aws.memory.faults.clear()
    await backend.stop("b")
    assert aws.instances(region="eu-west-1") == []


async def test_a_container_at_aws_is_an_instance_that_runs_the_container(aws, backend):
    spec = ContainerResourceSpec(
        image="python:3.13",
        command=["serve", "it's"],
        environment={"WHO": "me & you"},
        cpu_count=2,
        mem_limit="1g",
        container_port=8000,
        ports={9000: 9001},
        extra={"zones": ["us-east-1b"], "instance_type": "t3.micro"},
    )
    await backend.start(Order("a", spec))
    (request,) = aws.requests("RunInstances")
    script = base64.b64decode(request["UserData"]).decode()
    assert script.startswith("#!/bin/sh\n")
    command = script.splitlines()[-1]
    assert command.startswith("docker run --detach --name moorage --env 'WHO=me & you'")
    assert "--publish 0.0.0.0:8000:8000 --publish 0.0.0.0:9001:9000 --cpus 2" in command
    assert command.endswith("""--memory 1073741824 -- python:3.13 serve 'it'"'"'s'""")
    assert request[ZONE] == "us-east-1b"


async def test_a_command_goes_to_the_container_of_an_instance(aws, backend, tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\n[ $1 = inspect ] && echo true || echo "$@"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    extra = {"instance_type": "t3.micro"}
    await backend.start(Order("a", ContainerResourceSpec(image="x", extra=extra)))
    done = await backend.execute(
        "a", ("sh", "-c", "echo"), workdir="/w", user="u", environment={"A": "1"}
    )
    assert done.output == "exec --workdir /w --user u --env A=1 moorage sh -c echo\n"
    assert (await backend.logs("a", 5)).text == "moorage\n"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mount": {"/a": "/b"}}, "mount: expected nothing"),
        ({"gpus": "all"}, "gpus: expected a number"),
        ({"readiness": Readiness(path="/")}, "readiness: expected a port"),
        ({"extra": {"shoes": 2}}, "extra.shoes: expected one of"),
        ({"extra": {"instance_type": 2}}, "extra.instance_type: expected"),
        ({"extra": {"user_data": "x"}}, "extra.user_data: expected one of"),
    ],
)
def test_container_options_that_instances_lack_are_refused(backend, fields, reason):
    with pytest.raises(UnsupportedSpecError, match=reason):
        backend.refuse(ContainerResourceSpec(image="x", **fields))


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        ("InvalidInstanceId", UnsupportedSpecError, "AmazonSSMManagedInstanceCore"),
        ("AccessDeniedException", BackendError, "AWS does not allow SendCommand"),
    ],
    ids=["without SSM the error names the missing policy", "an undelivered command is an error"],
)
async def test_a_command_that_aws_refuses_is_an_error(aws, backend, code, error, reason):
    await backend.start(Order("a", SMALL))
    aws.refuse("SendCommand", code, "refused")
    with pytest.raises(error, match=reason):
        await backend.execute("a", ("true",))

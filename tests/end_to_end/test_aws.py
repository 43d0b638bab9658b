"""Workloads at AWS run on the instance type in the node's labels, and leave no instance behind."""

import json
import sys

import pytest
from aws_world import aws_server
from served import Server, cluster, invoke, kill, ran, serve_and_kill, serving, until
from test_takeover import leads, one

from moorage.extras import install_command

__all__ = ["aws_server"]

pytestmark = pytest.mark.heavy

ENVIRONMENT = {"MOORAGE_BACKENDS": "aws,memory"}
LABELS = {
    "node.kubernetes.io/instance-type": "g5.xlarge",
    "topology.kubernetes.io/zone": "us-east-1c",
}


def ask(server: Server, **spec) -> dict:
    provision = {"backend": "aws", "spec": spec}
    lease = {"ttl_seconds": 3_600}
    return server.ask(resources={"gpus": 1}, lease=lease, provision=provision)


def fill(server: Server) -> None:
    document = cluster("cloud", nodes=2, gpus=1, model="A10G")
    for node in document["nodes"]["nodeData"]:
        node["labels"] = LABELS
    server.fill(document)


@pytest.fixture
def environment(aws_server) -> dict[str, str]:
    aws_server.forget()
    return {**ENVIRONMENT, **aws_server.environment}


def tag(instance: dict, name: str) -> str:
    return {each["Key"]: each["Value"] for each in instance["Tags"]}[f"moorage:{name}"]


def rent(aws_server, tags: dict[str, str]) -> None:
    """Start an instance at AWS that belongs to no lease."""
    rows = [{"Key": f"moorage:{key}", "Value": value} for key, value in tags.items()]
    spec = [{"ResourceType": "instance", "Tags": rows}]
    aws_server.ec2().run_instances(ImageId="x", MinCount=1, MaxCount=1, TagSpecifications=spec)


def test_the_server_rents_the_node_type_of_a_lease_and_finds_the_instance_after_kill_9(
    aws_server, environment, tmp_path
):
    with serve_and_kill(tmp_path, environment=environment) as server:
        fill(server)
        lease = ask(server)["lease"]
        server.in_state(lease, "active")
        home = json.loads((tmp_path / "aws" / "server.json").read_text())["server"]
        (made,) = aws_server.instances(home)
        assert made["InstanceType"] == "g5.xlarge"
        assert made["Placement"]["AvailabilityZone"] == "us-east-1c"
        tags = {each["Key"]: each["Value"] for each in made["Tags"]}
        assert tags["moorage:lease"] == tags["moorage:workload"] == lease["id"]
        kill(server)
    rent(aws_server, {"server": home, "workload": "ghost"})
    with serving(tmp_path, environment=environment) as server:
        server.in_state(lease, "active")

        def instances() -> list[str]:
            return [each["InstanceId"] for each in aws_server.instances(home)]

        until(lambda: instances() == [made["InstanceId"]])
        server.release(lease)
        server.in_state(lease, "ended")
        assert instances() == []


@pytest.mark.postgres
def test_a_server_that_takes_over_finds_the_instances_of_the_former_leader(
    aws_server, environment, postgres, tmp_path
):
    storage = postgres.database()
    with (
        one(tmp_path / "a", storage, **environment) as first,
        one(tmp_path / "b", storage, **environment) as second,
    ):
        fill(first.server)
        leases = [ask(first.server)["lease"] for _ in range(2)]
        for lease in leases:
            first.server.in_state(lease, "active")
        home = json.loads((tmp_path / "a" / "aws" / "server.json").read_text())["server"]

        def instances() -> dict[str, str]:
            found = aws_server.instances(home)
            return {tag(each, "workload"): each["InstanceId"] for each in found}

        made = instances()
        (tmp_path / "b" / "aws").mkdir()
        (tmp_path / "b" / "aws" / "server.json").write_text('{"server": ')
        kill(first.server)
        rent(aws_server, {"server": home, "workload": "ghost"})
        aws_server.terminate(made.pop(leases[1]["id"]))
        until(lambda: leads(second.server))
        second.server.in_state(leases[1], "ended")
        second.server.in_state(leases[0], "active")
        until(lambda: instances() == made)
        second.server.release(leases[0])
        second.server.in_state(leases[0], "ended")
        assert instances() == {}


def test_a_daemon_starts_while_aws_is_unreachable_and_cleans_up_later(
    aws_server, environment, tmp_path
):
    (tmp_path / "aws").mkdir()
    home = {"server": "s1", "regions": ["us-east-1"]}
    (tmp_path / "aws" / "server.json").write_text(json.dumps(home))
    rent(aws_server, {"server": "s1", "workload": "ghost"})
    aws_server.refuse("DescribeInstances", "UnauthorizedOperation", times=1)
    with serving(tmp_path, environment=environment) as server:
        until(lambda: aws_server.instances("s1") == [])
        assert "does not allow DescribeInstances in us-east-1" in server.log()


def test_the_reason_of_a_refusal_by_aws_reaches_the_client(aws_server, environment, tmp_path):
    aws_server.refuse("RunInstances", "VcpuLimitExceeded", "8 vCPUs are your limit")
    with serving(tmp_path, environment=environment) as server:
        fill(server)
        ended = server.in_state(ask(server)["lease"], "ended")
        assert "8 vCPUs are your limit" in ended["reason"]
        assert "Service Quotas" in ended["reason"]
        assert ask(server, tags={"aws:x": "1"})["error"]["field"] == "provision.spec"


def test_without_boto3_the_daemon_names_the_extra(tmp_path):
    program = "import sys; sys.modules['boto3'] = None\nfrom moorage.__main__ import main\nmain()"
    serve = ("serve", "--port", "0", "--http-port", "0")
    done = ran(sys.executable, "-c", program, *serve, **ENVIRONMENT, MOORAGE_DATA_DIR=str(tmp_path))
    assert done.returncode == 3
    assert f"the backend aws needs boto3: {install_command('aws')}" in done.stderr


def test_prices_that_are_fetched_from_aws_are_stored_and_used(aws_server, environment, tmp_path):
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": "1.5"}}
    product = {
        "product": {"attributes": {"instanceType": "g5.xlarge"}},
        "terms": {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}},
    }
    aws_server.memory.prices = [json.dumps(product)]
    words = ("prices", "--region", "eu-west-1", "--data", tmp_path)
    done = invoke(*words, **aws_server.environment)
    assert "instance types of eu-west-1, 1 with prices of 20" in done.stdout, done.stderr
    assert (tmp_path / "aws" / "catalogue-eu-west-1.json").exists()
    aws_server.refuse("DescribeInstanceTypes", "UnauthorizedOperation")
    aws_server.refuse("GetProducts", "AccessDeniedException")
    done = invoke(*words, **aws_server.environment)
    assert done.returncode == 1
    assert "check the credentials and their permissions" in done.stderr

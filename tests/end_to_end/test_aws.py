"""What a lease starts at AWS: on capacity that its node's labels describe, and never leaked."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from aws_world import AwsWorld, aws_server
from served import Server, cluster, until

from moorage.extras import install_command
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

__all__ = ["aws_server"]

pytestmark = pytest.mark.heavy

ENVIRONMENT = {"MOORAGE_BACKENDS": "aws,memory"}
LABELS = {
    "node.kubernetes.io/instance-type": "g5.xlarge",
    "topology.kubernetes.io/zone": "us-east-1c",
}


def state(server: Server, lease: dict) -> dict:
    return server.say({"op": "status", "lease": lease["id"]})[0]["lease"]


def in_state(server: Server, lease: dict, wanted: str) -> dict:
    until(lambda: state(server, lease)["state"] == wanted)
    return state(server, lease)


def ask(server: Server, **spec) -> dict:
    reply = server.ask(
        resources={"gpus": 1},
        lease={"ttl_seconds": 3_600},
        provision={"backend": "aws", "spec": spec},
    )
    assert reply["success"], reply
    return reply["lease"]


def fill(server: Server) -> None:
    document = cluster("cloud", nodes=2, gpus=1, model="A10G")
    for node in document["nodes"]["nodeData"]:
        node["labels"] = LABELS
    server.register(document)
    server.publish(catalog.document("first_fit"))


def own(aws: AwsWorld, server_id: str) -> list[dict]:
    return aws.instances(server_id)


def test_a_lease_rents_what_its_node_says_and_finds_it_again_after_kill_9(aws_server, tmp_path):
    environment = {**ENVIRONMENT, **aws_server.environment}
    with contextlib.suppress(CommandError), daemon(tmp_path, environment=environment) as running:
        server = Server(running)
        fill(server)
        lease = ask(server)
        in_state(server, lease, "active")
        home = json.loads((tmp_path / "aws" / "server.json").read_text())
        (made,) = own(aws_server, home["server"])
        assert made["InstanceType"] == "g5.xlarge"
        assert made["Placement"]["AvailabilityZone"] == "us-east-1c"
        tags = {each["Key"]: each["Value"] for each in made["Tags"]}
        assert tags["moorage:lease"] == tags["moorage:workload"] == lease["id"]
        os.kill(running.pid, signal.SIGKILL)
        server.close()
    orphan = [{**each, "Value": "ghost"} for each in made["Tags"] if each["Key"][-8:] == "workload"]
    orphan += [each for each in made["Tags"] if each["Key"] == "moorage:server"]
    spec = [{"ResourceType": "instance", "Tags": orphan}]
    aws_server.ec2().run_instances(ImageId="x", MinCount=1, MaxCount=1, TagSpecifications=spec)
    with daemon(tmp_path, environment=environment) as running:
        server = Server(running)
        in_state(server, lease, "active")
        until(
            lambda: (
                [each["InstanceId"] for each in own(aws_server, home["server"])]
                == [made["InstanceId"]]
            )
        )
        server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})
        in_state(server, lease, "ended")
        assert own(aws_server, home["server"]) == []
        server.close()


def test_a_daemon_starts_while_aws_is_not_reached_and_sweeps_later(aws_server, tmp_path):
    (tmp_path / "aws").mkdir()
    home = {"server": "s1", "regions": ["us-east-1"]}
    (tmp_path / "aws" / "server.json").write_text(json.dumps(home))
    tags = [
        {"Key": f"moorage:{key}", "Value": value}
        for key, value in (("server", "s1"), ("workload", "ghost"))
    ]
    spec = [{"ResourceType": "instance", "Tags": tags}]
    aws_server.forget()
    aws_server.ec2().run_instances(ImageId="x", MinCount=1, MaxCount=1, TagSpecifications=spec)
    aws_server.refuse("DescribeInstances", "UnauthorizedOperation", times=1)
    environment = {**ENVIRONMENT, **aws_server.environment}
    with daemon(tmp_path, environment=environment) as running:
        until(lambda: own(aws_server, "s1") == [])
        assert "does not allow DescribeInstances in us-east-1" in running.log.read_text()


def test_the_reason_of_aws_reaches_the_client(aws_server, tmp_path):
    aws_server.forget()
    aws_server.refuse("RunInstances", "VcpuLimitExceeded", "8 vCPUs are your limit")
    with daemon(tmp_path, environment={**ENVIRONMENT, **aws_server.environment}) as running:
        server = Server(running)
        fill(server)
        ended = in_state(server, ask(server), "ended")
        assert "8 vCPUs are your limit" in ended["reason"]
        assert "Service Quotas" in ended["reason"]
        reply = server.ask(
            resources={"gpus": 1},
            lease={"ttl_seconds": 60},
            provision={"backend": "aws", "spec": {"tags": {"aws:x": "1"}}},
        )
        assert reply["error"]["field"] == "provision.spec"
        server.close()


def test_without_boto3_the_daemon_says_what_to_install(tmp_path):
    program = "import sys; sys.modules['boto3'] = None\nfrom moorage.__main__ import main\nmain()"
    ran = subprocess.run(
        [sys.executable, "-c", program, "serve", "--port", "0", "--http-port", "0"],
        env={**os.environ, **ENVIRONMENT, "MOORAGE_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 3
    assert f"the backend aws needs boto3: {install_command('aws')}" in ran.stderr


def test_prices_are_asked_of_aws_once_and_used(aws_server, tmp_path):
    aws_server.forget()
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": "1.5"}}
    product = {
        "product": {"attributes": {"instanceType": "g5.xlarge"}},
        "terms": {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}},
    }
    aws_server.memory.prices = [json.dumps(product)]
    command = [sys.executable, "-m", "moorage", "prices", "--region", "eu-west-1"]
    environment = {**os.environ, **aws_server.environment}
    ran = subprocess.run(
        [*command, "--data", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "instance types of eu-west-1, 1 with prices of 20" in ran.stdout, ran.stderr
    assert (tmp_path / "aws" / "catalogue-eu-west-1.json").exists()
    aws_server.refuse("DescribeInstanceTypes", "UnauthorizedOperation")
    aws_server.refuse("GetProducts", "AccessDeniedException")
    ran = subprocess.run(
        [*command, "--data", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "check the credentials and what they may do" in ran.stderr

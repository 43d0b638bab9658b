"""AWS on loopback: moto's server in a separate process, behind a proxy that simulates faults.

The proxy passes calls on, and adds what moto lacks: client tokens that return the same instance
twice, errors as AWS documents them, slow status checks, instances that end by themselves, and
commands, which run on this machine. The tag `bench` of an instance says what the instance does.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.base import Backend
from moorage.backends.specs import BaseResourceSpec

__all__ = ["AwsBench", "AwsWorld", "aws", "aws_server"]

REGION = "us-east-1"
ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>{code}</Code>'
    "<Message>{message}</Message></Error></Errors><RequestID>r-1</RequestID></Response>"
)
NOTHING = (
    b'<DescribeInstancesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
    b"<requestId>r-1</requestId><reservationSet/></DescribeInstancesResponse>"
)
# Parameters that differ each time a request is sent.
VOLATILE = ("Version",)
DIES_SECONDS = 0.2
POLL_SECONDS = 0.05


@dataclass(slots=True)
class Fault:
    """A prepared answer that the proxy sends in place of AWS's answer."""

    action: str
    code: str
    message: str
    status: int
    when: Callable[[dict[str, str]], bool]
    times: int
    lost: bool


@dataclass(slots=True)
class Memory:
    """The state of the proxy, which the fixture `aws` clears before each test."""

    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    tokens: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)
    bench: dict[str, str] = field(default_factory=dict)
    hidden: int = 0
    prices: list[str] = field(default_factory=list)
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)


class AwsWorld:
    def __init__(self) -> None:
        self.memory = Memory()
        self.launching = threading.Lock()
        self.clients: dict[str, Any] = {}

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._moto = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self._moto.stderr is not None
        self.moto_port = 0
        for line in self._moto.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.moto_port = int(found[1])
                break
        assert self.moto_port, "moto did not start"
        self._drain = threading.Thread(target=self._moto.stderr.read, daemon=True)
        self._drain.start()
        world = self

        class Handler(Proxy):
            aws = world

        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        self._thread = threading.Thread(target=self._proxy.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.shutdown()
        self._thread.join()
        self._proxy.server_close()
        self._moto.kill()
        self._moto.wait()
        self._drain.join()
        assert self._moto.stderr is not None
        self._moto.stderr.close()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def ec2(self, region: str = REGION) -> Any:
        """Return a client of EC2 that connects to moto directly, not through the proxy."""
        import boto3  # noqa: PLC0415  # An extra; the tests are skipped without it.

        with self.launching:
            if region not in self.clients:
                make: Any = boto3.session.Session().client
                self.clients[region] = make(
                    "ec2",
                    region_name=region,
                    endpoint_url=f"http://127.0.0.1:{self.moto_port}",
                    aws_access_key_id="testing",
                    aws_secret_access_key="testing",  # noqa: S106  # moto accepts any value.
                )
            return self.clients[region]

    def forget(self) -> None:
        self.memory = Memory()

    def refuse(
        self,
        action: str,
        code: str,
        message: str = "",
        *,
        status: int = 400,
        when: Callable[[dict[str, str]], bool] = lambda _: True,
        times: int = 1_000_000,
        lost: bool = False,
    ) -> None:
        """Answer calls of an action with an error; with `lost`, carry out the calls nevertheless.

        A message that starts with `<` is the whole answer.
        """
        fault = Fault(action, code, message or f"{code} it is", status, when, times, lost)
        self.memory.faults.append(fault)

    def hide(self, times: int) -> None:
        """Let the next `times` searches by tag find nothing, since AWS lists new instances late."""
        self.memory.hidden = times

    def requests(self, action: str) -> list[dict[str, str]]:
        """Return the parameters of all calls of an action."""
        return [parameters for name, parameters in self.memory.calls if name == action]

    def instances(self, server: str | None = None, region: str = REGION) -> list[dict[str, Any]]:
        """Return the instances that moto lists and that are not terminated."""
        filters = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopped"]}]
        if server is not None:
            filters.append({"Name": "tag:moorage:server", "Values": [server]})
        pages = self.ec2(region).get_paginator("describe_instances").paginate(Filters=filters)
        return [
            each
            for page in pages
            for reservation in page["Reservations"]
            for each in reservation["Instances"]
        ]

    def terminate(self, instance: str) -> None:
        self.ec2().terminate_instances(InstanceIds=[instance])


class Proxy(BaseHTTPRequestHandler):
    aws: AwsWorld
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # The name http.server calls.
        body = self.rfile.read(int(self.headers["Content-Length"]))
        memory = self.aws.memory
        target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        if "AmazonSSM" in self.headers.get("X-Amz-Target", ""):
            memory.calls.append((target, json.loads(body)))
            self._fault_or(target, {}, lambda: self._run_command(target, body))
            return
        if "GetProducts" in self.headers.get("X-Amz-Target", ""):
            memory.calls.append(("GetProducts", {"body": body.decode()}))
            self._fault_or("GetProducts", {}, self._price_list)
            return
        parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        action = parameters.pop("Action", "")
        for name in VOLATILE:
            parameters.pop(name, None)
        # The signature has `Credential=KEY/DAY/REGION/SERVICE/aws4_request`.
        parameters["region"] = self.headers["Authorization"].split("/")[2]
        memory.calls.append((action, parameters))

        def real() -> tuple[int, bytes]:
            return self._real(action, parameters, body)

        self._fault_or(action, parameters, real)

    def _fault_or(
        self, action: str, parameters: dict[str, str], real: Callable[[], tuple[int, bytes]]
    ) -> None:
        for fault in self.aws.memory.faults:
            if fault.action == action and fault.times > 0 and fault.when(parameters):
                fault.times -= 1
                if fault.lost:
                    real()
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(2)
                    return
                said = fault.message
                if action == "GetProducts" or "X-Amz-Target" in self.headers:
                    page = json.dumps({"__type": fault.code, "message": said}).encode()
                else:
                    page = said.encode() if said.startswith("<") else error(fault.code, said)
                self._answer(fault.status, page)
                return
        self._answer(*real())

    def _real(self, action: str, parameters: dict[str, str], body: bytes) -> tuple[int, bytes]:
        memory = self.aws.memory
        if action == "RunInstances":
            with self.aws.launching:
                return self._launch(parameters, body)
        by_tag = any(value.startswith("tag:") for value in parameters.values())
        if action == "DescribeInstances" and by_tag and memory.hidden:
            memory.hidden -= 1
            return 200, NOTHING
        if parameters.get("Filter.1.Name") == "client-token":  # A filter that moto does not know.
            token = parameters["Filter.1.Value.1"]
            instance = instance_of(memory.tokens[token][1])
            body = body.replace(b"client-token", b"instance-id")
            body = body.replace(token.encode(), instance.encode())
        status, answer = self._pass_on(body)
        named = parameters.get("InstanceId.1", parameters.get("ResourceId.1", ""))
        match action, memory.bench.get(named):
            case ["DescribeInstanceStatus", "slow" | "fails" as kind]:
                answer = answer.replace(b"<status>ok</status>", b"<status>initializing</status>")
                if kind == "fails":
                    self.aws.terminate(named)
            case ["CreateTags", "dies"] if "moorage:ready" in parameters.values():
                threading.Timer(DIES_SECONDS, self.aws.terminate, (named,)).start()
        return status, answer

    def _launch(self, parameters: dict[str, str], body: bytes) -> tuple[int, bytes]:
        memory, token = self.aws.memory, parameters["ClientToken"]
        if token in memory.tokens:
            before, answer = memory.tokens[token]
            if before != parameters:
                return 400, error("IdempotentParameterMismatch", "The arguments differ")
            return 200, answer
        status, answer = self._pass_on(body)
        if status == 200:  # HTTP.
            memory.tokens[token] = parameters, answer
            keys = {value: name for name, value in parameters.items() if name.endswith(".Key")}
            if name := keys.get("bench"):
                memory.bench[instance_of(answer)] = parameters[f"{name.removesuffix('.Key')}.Value"]
        return status, answer

    def _run_command(self, action: str, body: bytes) -> tuple[int, bytes]:
        """Let moto answer, then run the command on this machine, since moto runs none."""
        running, request = self.aws.memory.running, json.loads(body)
        status, answer = self._pass_on(body)
        if action == "SendCommand" and status == 200:  # HTTP.
            name = json.loads(answer)["Command"]["CommandId"]
            (script,) = request["Parameters"]["commands"]
            running[name] = subprocess.Popen(
                ["/bin/sh", "-c", script],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        if action == "CancelCommand":  # moto lacks this action.
            with running[request["CommandId"]] as process:
                os.killpg(process.pid, signal.SIGKILL)
            return 200, b"{}"
        if action == "GetCommandInvocation" and status == 200:  # HTTP.
            process, seen = running[request["CommandId"]], json.loads(answer)
            code = process.poll()
            seen["Status"] = "InProgress" if code is None else "Failed" if code else "Success"
            if code is not None and process.stdout is not None:
                with process.stdout as output:
                    seen |= {"ResponseCode": code, "StandardOutputContent": output.read()}
            return 200, json.dumps(seen).encode()
        return status, answer

    def _price_list(self) -> tuple[int, bytes]:
        answer = {"FormatVersion": "aws_v1", "PriceList": self.aws.memory.prices}
        return 200, json.dumps(answer).encode()

    def _pass_on(self, body: bytes) -> tuple[int, bytes]:
        moto = http.client.HTTPConnection("127.0.0.1", self.aws.moto_port, timeout=30)
        try:
            own = ("host", "content-length")  # http.client sets these.
            headers = {k: v for k, v in self.headers.items() if k.lower() not in own}
            moto.request("POST", self.path, body, headers)
            reply = moto.getresponse()
            return reply.status, reply.read()
        finally:
            moto.close()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # The base class's name.
        """Write no log."""


def instance_of(answer: bytes) -> str:
    found = re.search(rb"<instanceId>(i-[0-9a-f]+)</instanceId>", answer)
    assert found is not None
    return found[1].decode()


def error(code: str, message: str) -> bytes:
    return ERROR.format(code=code, message=message).encode()


@pytest.fixture(scope="session")
def aws_server() -> Iterator[AwsWorld]:
    pytest.importorskip("boto3", reason="the extra `aws` is not installed")
    pytest.importorskip("moto", reason="moto stands for AWS, and is not installed")
    with AwsWorld() as world:
        yield world


@pytest.fixture
def aws(aws_server: AwsWorld, monkeypatch: pytest.MonkeyPatch) -> AwsWorld:
    """The simulated AWS, cleared for each test; environment variables lead boto3 to it."""
    aws_server.forget()
    for name, value in aws_server.environment.items():
        monkeypatch.setenv(name, value)
    return aws_server


class AwsBench:
    """The backend `aws` for the conformance tests; a tag tells each instance what to do."""

    def __init__(self, world: AwsWorld, root: Path) -> None:
        self.world = world
        self.root = root

    def backend(self) -> Backend:
        from moorage.backends.aws.backend import AwsBackend  # noqa: PLC0415  # It needs the extra.

        return AwsBackend(self.root, poll_seconds=POLL_SECONDS)

    def spec(self, does: str = "runs") -> BaseResourceSpec:
        return InstanceResourceSpec(instance_type="t3.micro", tags={"bench": does})

    def slow(self) -> BaseResourceSpec:
        return self.spec("slow")

    def failing(self) -> tuple[BaseResourceSpec, str]:
        return self.spec("fails"), "Client.UserInitiatedShutdown"

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return self.spec("dies"), 1

    def gang(self) -> None:
        return None

    def writing(self) -> None:
        return None

    def limits(self) -> dict[str, Any]:
        return {}

    async def left(self) -> int:
        return await asyncio.to_thread(self._left)

    def _left(self) -> int:
        home = self.root / "server.json"
        if not home.exists():  # Without a server name, it has started no instance.
            return 0
        return len(self.world.instances(json.loads(home.read_text())["server"]))

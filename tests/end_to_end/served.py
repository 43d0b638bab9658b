"""What the end-to-end tests do with a running daemon, and documents to feed it."""

import base64
import contextlib
import io
import json
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from interface import CHECKED_BYTES_MAX, Interface
from websockets.sync.client import connect

from moorage.testing.daemon_process import Running
from moorage_client.cli.program import run

FIRST_FIT = "first_fit:1.0-stable"


def cluster(name: str, nodes: int = 2, gpus: int = 4, model: str = "A100", **more) -> dict:
    node = {
        "gpus": {"count": gpus, "gpus": [{"modelName": model, "memory": 81_920}] * gpus},
        "vcpus": {"count": 64},
        "memory": 262_144,
    }
    rows = [{"id": f"{name}-{number}", **node} for number in range(nodes)]
    return {"id": name, "nodes": {"count": nodes, "nodeData": rows}, **more}


def policy(body: str, name: str, **more) -> dict:
    """Return a PolicyRule document whose `eval` is `body`."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    code = (
        "class AIOSv1PolicyRule:\n"
        "    def __init__(self, rule_id, settings, parameters):\n"
        "        self.rule_id, self.settings, self.parameters = rule_id, settings, parameters\n"
        "    def eval(self, parameters, input_data, context):\n" + lines + "\n"
    )
    return {"policy_rule_uri": name, "type": "python_class_v1", "code": code, **more}


def archive(**files: str) -> str:
    """Return a zip of `code/NAME.py` files, as `code` of a PolicyRule document takes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, text in files.items():
            packed.writestr(f"code/{name}.py", text)
    return base64.b64encode(stream.getvalue()).decode()


class Server:
    """A running daemon, and the few things that tests do with it.

    Args:
        running: The daemon.
        token: What every request shows, unless it brings its own.

    """

    def __init__(self, running: Running, token: str = "") -> None:
        self.running = running
        self.token = token
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=running.http, headers=self.headers, timeout=30)
        self.http.event_hooks = {"response": [self._check]}
        self._interface: Interface | None = None

    def _check(self, response: httpx.Response) -> None:
        """Hold every exchange against what the server says of its interface, if it is small."""
        request = response.request
        length = int(response.headers.get("content-length", CHECKED_BYTES_MAX + 1))
        if request.url.path == "/openapi.json" or length > CHECKED_BYTES_MAX:
            return
        if self._interface is None:
            headers = {k: v for k, v in request.headers.items() if k == "authorization"}
            described = self.http.get("/openapi.json", headers=headers)
            if not described.is_success:  # A client that asks like this is not told.
                return
            self._interface = Interface(described.json())
        response.read()
        self._interface.check(request, response)

    def register(self, *documents: dict) -> None:
        for document in documents:
            self.http.post("/clusters", json=document).raise_for_status()

    def publish(self, *documents: dict) -> None:
        for document in documents:
            answer = self.http.post("/policy", json=document)
            assert answer.status_code == 200, answer.text

    def socket(self, headers: dict[str, str] | None = None):
        options = {
            "compression": None,
            "max_size": None,
            "additional_headers": headers or self.headers,
        }
        return connect(self.running.ws, **options)

    def say(self, *messages: dict | str) -> list[dict]:
        """Send messages over one new socket, all at once, and return the replies."""
        with self.socket() as socket:
            for message in messages:
                socket.send(message if isinstance(message, str) else json.dumps(message))
            return [json.loads(socket.recv(30)) for _ in messages]

    def ask(self, policy: str = FIRST_FIT, **more) -> dict:
        return self.say(ask_message(policy, **more))[0]

    def release(self, lease: dict) -> dict:
        """Release a lease, and return the reply."""
        return self.say({"op": "release", "lease": lease["id"], "token": lease["token"]})[0]

    def moorage(
        self, *words: str | Path, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the client in this process: quick, where its text is what counts."""
        urls = {"MOORAGE_URL": self.running.ws, "MOORAGE_HTTP_URL": self.running.http}
        given = urls | {"MOORAGE_TOKEN": self.token, "COLUMNS": "200", "NO_COLOR": "1"} | variables
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.chdir(folder or Path.cwd()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name, value in given.items():
                patch.setenv(name, value)
            code = run([str(word) for word in words])
        wrote = out.buffer.getvalue().decode()
        return subprocess.CompletedProcess(words, code, wrote, err.getvalue())

    def close(self) -> None:
        self.http.close()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that another process does and does not report."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)  # There is no event to wait for.


def ask_message(policy: str = FIRST_FIT, **more) -> dict:
    return {"adhoc": True, "policy_rule_uri": policy, "inputs": {}, **more}

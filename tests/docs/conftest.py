"""Runs the blocks of a page in order, as a reader types them, with a real `moored serve`.

- `python` is run; if its first line is a comment with a file name, it is written to this file;
- `javascript` is run by Node;
- `console` lines after `$` are run by a shell, and their output is compared; `…` stands for any
  text; commands of `moorage` that need no shell run within this process, which is quick; if
  an error of `moorage` follows a command, the command must fail with this error;
- `sh` is run as a whole;
- `json` with `adhoc`, `input` or `op` is sent over the WebSocket, and must succeed; `json` with
  `success` shows the form of the last reply; other `json` is not run;
- `toml` must be a configuration that loads;
- `text` is not run.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from websockets.sync.client import connect

from moorage.config.settings import Config
from moorage.testing.daemon_process import daemon
from moorage_client.services import Services
from moorage_policies import catalog
from tests.commands import run_moorage

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # Lets tests import `reference`.

START_SECONDS_MAX = 30
RUN_SECONDS_MAX = 120
SERVE = "moored serve"
READY = {"event", "ws", "http", "console"}
# Commands of pages that no test runs: targets of the Makefile that run tests themselves.
OUTSIDE = (
    *("make ", ". .venv/", "pip ", "docker ", "systemctl ", "journalctl "),
    *(SERVE, "MOORAGE_BACKENDS="),
)
# Commands without a shell; `run`, `exec` and `logs` write bytes to a real file.
PLAIN = re.compile(r"moorage (?!run|exec|logs)[^|&;<>*~$()`\\\n]+$")


@dataclass
class Story:
    """A server, and the commands of a page that a reader runs with the server."""

    folder: Path
    start: Callable[[], dict[str, str]]
    last_reply: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def ready(self) -> dict[str, str]:
        """The addresses of the server; the first block that needs them starts it."""
        return self.start()

    def localise(self, text: str) -> str:
        """Replace the default addresses in a text by those of the test's server."""
        for port, name in (("8765", "ws"), ("8080", "http")):
            if (address := f"127.0.0.1:{port}") in text:
                text = text.replace(address, self.ready[name].partition("://")[2])
        return text

    @property
    def environment(self) -> dict[str, str]:
        binaries = Path(sys.executable).parent
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        urls = {"MOORAGE_URL": self.ready["ws"], "MOORAGE_HTTP_URL": self.ready["http"]}
        inherited = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("MOORAGE_", "PYTEST_"))
        }
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "COLUMNS": "200", "NO_COLOR": "1"}
        return {**inherited, **urls, **state, "PATH": path, "NODE_NO_WARNINGS": "1"}

    def play(self, language: str, text: str) -> None:
        run = getattr(self, f"play_{language}")
        run(text if language in {"toml", "yaml"} else self.localise(text))

    def play_python(self, text: str) -> None:
        if name := re.match(r"# ([\w./-]+\.py)\b", text):
            (self.folder / name[1]).write_text(text)
            return
        self.run([sys.executable, "-W", "error", "-c", text])

    def play_console(self, text: str) -> None:
        for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = example.partition("\n")
            if command.startswith(SERVE):
                assert set(json.loads(expected)) == READY
            if command.startswith(OUTSIDE):
                continue
            if expected.startswith("moorage: "):
                shown = self.refused(command)
            elif PLAIN.match(command):
                shown = self.run_within(command)
            else:
                shown = self.run(["bash", "-c", command])
            same = is_shown(expected, shown) or not expected.strip()
            assert same, f"$ {command}\n{shown}\nexpected:\n{expected}"

    def play_javascript(self, text: str) -> None:
        self.run(["node", "--experimental-websocket", "--input-type=module", "-e", text])

    def moorage(self, text: str) -> "subprocess.CompletedProcess[str]":
        given = self.environment
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - given.keys():
                patch.delenv(name)
            return run_moorage(shlex.split(text)[1:], self.folder, **given)

    def run_within(self, text: str) -> str:
        done = self.moorage(text)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def refused(self, text: str) -> str:
        """Run a command of `moorage` that must fail; return its error."""
        done = self.moorage(text)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def play_sh(self, text: str) -> None:
        self.run(["bash", "-euc", text])

    def play_text(self, text: str) -> None:
        assert text.strip()

    def play_json(self, text: str) -> None:
        document = json.loads(text)
        if "success" in document:
            assert looks_like(self.last_reply, document) == []
            return
        if not {"adhoc", "input", "op"} & set(document):
            return
        with connect(self.ready["ws"], open_timeout=START_SECONDS_MAX) as socket:
            socket.send(text)
            self.last_reply = json.loads(socket.recv(timeout=RUN_SECONDS_MAX))
        assert self.last_reply["success"], self.last_reply

    def play_yaml(self, text: str) -> None:
        assert yaml.safe_load(text)

    def play_toml(self, text: str) -> None:
        file = self.folder / "example.toml"
        file.write_text(text)
        Config.load({}, {"HOME": str(self.folder)}, file)

    def run(self, command: list[str]) -> str:
        ran = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS_MAX,
        )
        assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout


def is_shown(expected: str, shown: str) -> bool:
    """Return whether an output matches the output on a page, where `…` stands for any text."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.replace("…", "..."), shown, flags)


def looks_like(actual: Any, example: Any, path: str = "") -> list[str]:
    """Return the paths in `example` that are missing in `actual`, or have another type in it."""
    if isinstance(example, dict) and isinstance(actual, dict):
        lacks = [f"{path}.{key}" for key in example if key not in actual]
        both = [key for key in example if key in actual]
        return lacks + [
            wrong
            for key in both
            for wrong in looks_like(actual[key], example[key], f"{path}.{key}")
        ]
    if isinstance(example, list) and isinstance(actual, list):
        pairs = zip(actual, example, strict=False)
        return [wrong for a, e in pairs for wrong in looks_like(a, e, f"{path}[]")]
    numbers = isinstance(example, int | float) and isinstance(actual, int | float)
    return [] if numbers or isinstance(actual, type(example)) else [path]


@pytest.fixture(scope="session")
def reader() -> Callable[..., AbstractContextManager[Story]]:
    """Start a server and a reader; a page without a fleet gets the tutorials' cluster `lab`."""

    @contextmanager
    def start(folder: Path, *options: str, lab: bool = False) -> Iterator[Story]:
        # The lab's machines do not exist; for the backend `local`, the first one is this machine.
        here = {"MOORAGE_LOCAL_NODES": LAB[0]["id"]} if lab else {}
        with ExitStack() as stack:

            def serve() -> dict[str, str]:
                started = daemon(folder / "data", options=options, environment=here)
                running = stack.enter_context(started)
                if lab:
                    with Services(running.http) as services:
                        services.put_cluster({"id": "lab", "nodes": {"nodeData": LAB}})
                        services.publish_policy(catalog.document("first_fit"))
                return {"ws": running.ws, "http": running.http}

            yield Story(folder, serve)

    return start


@pytest.fixture(scope="session")
def alike() -> Callable[..., list[str]]:
    return looks_like


GPU = {"modelName": "A100", "memory": 40_960}
LAB = [
    {"id": name, "vcpus": {"count": 32}, "memory": 131_072, "gpus": {"count": 4, "gpus": [GPU] * 4}}
    for name in ("node-1", "node-2")
]

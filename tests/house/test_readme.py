"""The READMEs are true: every example runs, in order, and every name that users meet is in them.

The examples of README.md are played against one real `moored serve` on free ports of loopback:

- `python` is run; where its first line is a comment with a file name, it is written there instead;
- `console` lines after `$` are run by a shell, and what follows is compared, `…` standing for
  anything;
- `json` with `adhoc` or `op` is sent over the WebSocket, and must succeed; with `success` it is
  what the last such reply must look like;
- `toml` must be a configuration that loads.
"""

import doctest
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from websockets.sync.client import connect

from moorage.config.settings import (
    CONFIG_FILE,
    EXECUTION_NAMES,
    EXTERNAL_SERVICES,
    OTHER_NAMES,
    Config,
    settings,
)
from moorage.model import Code
from moorage.protocol.messages import OPERATIONS, AllocationRequest, LeaseRequest, Resources

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START_SECONDS_MAX = 30
RUN_SECONDS_MAX = 120
SERVE = "moored serve"
# Not run again from within a test: the Makefile's own targets are what runs the tests.
OUTSIDE = ("make ", SERVE, "docker ", "systemctl ", "journalctl ")


@dataclass
class Story:
    """A server, and what the README's reader does with it."""

    folder: Path
    ready: dict[str, str]
    last_reply: dict[str, Any] = field(default_factory=dict)

    def localise(self, text: str) -> str:
        """Put this server's addresses where the text has the default ones."""
        ports = {"8765": self.ready["ws"], "8080": self.ready["http"]}
        for port, url in ports.items():
            text = text.replace(f"127.0.0.1:{port}", url.partition("://")[2])
        return text

    @property
    def environment(self) -> dict[str, str]:
        binaries = Path(sys.executable).parent
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        urls = {"MOORAGE_URL": self.ready["ws"], "MOORAGE_HTTP_URL": self.ready["http"]}
        return {**os.environ, **urls, "PATH": path, "COLUMNS": "200", "NO_COLOR": "1"}

    def play(self, language: str, text: str) -> None:
        getattr(self, f"play_{language}")(self.localise(text))

    def play_python(self, text: str) -> None:
        if name := re.match(r"# ([\w./-]+\.py)\b", text):
            (self.folder / name[1]).write_text(text)
            return
        self.run([sys.executable, "-W", "error", "-c", text])

    def play_console(self, text: str) -> None:
        for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = example.partition("\n")
            if command.startswith(SERVE):
                assert set(json.loads(expected)) == set(self.ready)
            if command.startswith(OUTSIDE):
                continue
            shown = self.run(["bash", "-c", command])
            wanted = expected.replace("…", "...")
            same = doctest.OutputChecker().check_output(
                wanted, shown, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
            assert same or not wanted.strip(), f"$ {command}\n{shown}\nexpected:\n{expected}"

    def play_json(self, text: str) -> None:
        document = json.loads(text)
        if "success" in document:
            assert looks_like(self.last_reply, document) == []
            return
        with connect(self.ready["ws"], open_timeout=START_SECONDS_MAX) as socket:
            socket.send(text)
            self.last_reply = json.loads(socket.recv(timeout=RUN_SECONDS_MAX))
        assert self.last_reply["success"], self.last_reply

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


def looks_like(actual: Any, example: Any, path: str = "") -> list[str]:
    """Return the paths of `example` that `actual` lacks, or has as another type."""
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


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("reader")
    moored = Path(sys.executable).with_name("moored")
    command = [moored, "serve", "--port", "0", "--http-port", "0", "--data", folder / "data"]
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert daemon.stdout is not None
    try:
        readable, _, _ = select.select([daemon.stdout], [], [], START_SECONDS_MAX)
        line = daemon.stdout.readline() if readable else ""
        assert line, f"no ready line; the log says: {(folder / 'log').read_text()}"
        yield Story(folder, json.loads(line))
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(START_SECONDS_MAX) == 0, (folder / "log").read_text()
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


def test_every_example_of_the_readme_runs(story: Story, readme: str) -> None:
    blocks = BLOCK.findall(readme)
    assert {"python", "console", "json", "toml"} <= {language for language, _ in blocks}
    for language, text in blocks:
        story.play(language, text)


def test_the_ten_line_example_has_ten_lines(readme: str) -> None:
    (example,) = [text for _, text in BLOCK.findall(readme) if "BlockingClient(" in text]
    assert len(example.splitlines()) <= 10


def test_make_targets_that_the_readme_names_exist(root: Path, readme: str) -> None:
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)`?$", readme, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_the_readmes_link_to_exist(root: Path) -> None:
    for name in READMES:
        page = root / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{name} links to {target}"


READMES = ("README.md", "server/README.md", "SECURITY.md")


def commands(app: typer.Typer, prefix: str) -> Iterator[str]:
    """Yield every command that an app offers, with its groups: `moorage policy push`."""

    def walk(command: Any, name: str) -> Iterator[str]:
        children = getattr(command, "commands", {})
        for each, child in children.items():
            yield from walk(child, f"{name} {each}")
        if not children:
            yield name

    return walk(typer.main.get_command(app), prefix)


def named(app_module: str, prefix: str) -> list[str]:
    module = __import__(app_module, fromlist=["app"])
    return list(commands(module.app, prefix))


@pytest.mark.parametrize(
    ("module", "program"),
    [("moorage.__main__", "moored"), ("moorage_client.cli.program", "moorage")],
)
def test_every_command_is_named(readme: str, module: str, program: str) -> None:
    found = named(module, program)
    assert found
    assert [each for each in found if each not in readme] == []


def test_no_command_is_named_that_does_not_exist(readme: str) -> None:
    """What a README promises can be typed."""
    known = named("moorage.__main__", "moored") + named("moorage_client.cli.program", "moorage")
    words = {" ".join(each.split()[:2]) for each in known}
    typed = set(re.findall(r"(?:`|^\$ )((?:moored|moorage) [a-z]+)", readme, re.MULTILINE))
    assert typed
    assert typed <= words


def test_every_operation_is_named_or_said_to_be_missing(root: Path, readme: str) -> None:
    text = readme + (root / "server" / "README.md").read_text()
    assert [name for name in OPERATIONS if f"`{name}`" not in text] == []


def test_every_field_of_a_request_is_named(root: Path, readme: str) -> None:
    text = readme + (root / "server" / "README.md").read_text()
    parts = (AllocationRequest, Resources, LeaseRequest)
    fields = {name for part in parts for name in part.__struct_fields__}
    assert [name for name in fields if f"`{name}`" not in text] == []


def test_every_code_and_setting_is_named(readme: str) -> None:
    assert [code for code in Code if f"`{code}`" not in readme] == []
    assert [name for name in settings() if f"| `{name}`" not in readme] == []


@pytest.mark.parametrize(
    "name", sorted({*EXTERNAL_SERVICES, *EXECUTION_NAMES, *OTHER_NAMES, CONFIG_FILE})
)
def test_every_other_name_in_the_environment_is_named(readme: str, name: str) -> None:
    assert f"`{name}`" in readme


def test_what_looks_like_what() -> None:
    reply = {"success": True, "lease": {"id": "a", "placement": [{"gpus": ["0"]}]}, "more": 1}
    assert looks_like(reply, {"lease": {"placement": [{"gpus": ["7"]}]}}) == []
    assert looks_like(reply, {"lease": {"token": ""}}) == [".lease.token"]
    assert looks_like(reply, {"lease": {"placement": [{"gpus": 1}]}}) == [".lease.placement[].gpus"]

"""Each command that the console offers to copy works when it is pasted into a shell."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from consoles import POLICY, Seeded, enter, seed_server

from tests.commands import run_moorage

pytestmark = pytest.mark.heavy  # A browser.

ALIAS = "first_fit:stable"
SECOND = "first_fit:1.1-stable"
POLICIES = ("activate", "aliases", "canary", "list", "push", "rollback", "shadow", "show", "test")
COMMANDS = (
    "curl",
    *(f"moorage fleet {word}" for word in ("cordon", "drain", "east", "uncordon")),
    *(f"moorage policy {word}" for word in POLICIES),
    *(f"moorage {word}" for word in ("cancel", "flush", "leases", "logs", "queue", "release")),
    *(f"moorage {word}" for word in ("status", "whatif", "why")),
)


@pytest.fixture
def seeded() -> Iterator[Seeded]:
    """A daemon with tokens and separate ports, which has an object for each kind of command.

    Pasted commands change the daemon, so each test and each repetition has a new one.
    """
    local = {"MOORAGE_BACKENDS": "local", "MOORAGE_ALLOWED_HOSTS": "moored.example"}
    with seed_server(MOORAGE_TOKENS="ann:of-ann", MOORAGE_OPERATORS="ann", **local) as each:
        each.fleet("east", 2)
        node = {"id": "localhost", "vcpus": {"count": 8}, "memory": 64_000}
        each.http.post("/clusters", json={"id": "here", "nodes": {"nodeData": [node]}})
        each.second_version()
        for chosen in (SECOND, POLICY):
            path = f"/policy-alias/{ALIAS}/activate"
            each.http.post(path, json={"policy_rule_uri": chosen}).raise_for_status()
        each.ask(1)
        spec = {"backend": "local", "spec": {"command": ["echo", "it ran"]}}
        works = each.ask(0, resources={"cpu_milli": 100}, provision=spec)
        assert works["success"], works
        each.refused = each.ask(9)["request"]
        yield each


class Shell:
    """A shell on the user's machine, which has the token but no files of the server."""

    def __init__(self) -> None:
        self._beside = ThreadPoolExecutor(1)  # The browser uses this thread's event loop.
        self.ran: list[str] = []

    def paste(self, page: Any) -> None:
        """Run each command of the page that this shell has not run before."""
        for button in page.get_by_role("button", name="Copy as command").all():
            text = button.get_attribute("title")
            if text in self.ran:
                continue
            self.ran.append(text)
            code, said = self._beside.submit(self._run, text).result()
            assert code == 0, f"{text}\n{said}"

    def _run(self, text: str) -> tuple[int, str]:
        """Run a command; `moorage` runs within this process, to save a start of Python."""
        program, *words = shlex.split(text)
        if program == "moorage" and "logs" not in words:  # `logs` writes bytes to a real file.
            done = run_moorage(words)
        else:
            done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    tools = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join((tools, os.environ["PATH"])))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOORAGE_TOKEN", "of-ann")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return Shell()


def plain(shell: Shell) -> list[str]:
    """Return the commands without their server addresses."""
    lines = [text.splitlines()[-1] for text in shell.ran]
    return [re.sub(r" --url \S+ --http-url \S+", "", line) for line in lines]


def dialogs(page: Any, shell: Shell, *labels: str) -> None:
    """Paste the commands that the dialogs of these actions show, without confirming a dialog."""
    for label in labels:
        page.get_by_role("button", name=label, exact=True).click()
        page.get_by_role("button", name=f"{label} now").wait_for()
        shell.paste(page.get_by_role("dialog"))
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="hidden")


def test_each_shown_command_works_when_it_is_pasted_into_a_terminal(
    page: Any, seeded: Seeded, shell: Shell
) -> None:
    sign_in(page, seeded.console, "operations")
    held, works = seeded.leases

    def see(path: str, *labels: str) -> None:
        page.goto(f"{seeded.console}/{path}")
        awaited = labels[0] if labels else "Copy as command"  # A page shows its actions last.
        page.get_by_role("button", name=awaited, exact=True).first.wait_for()
        shell.paste(page)
        dialogs(page, shell, *labels)

    shell.paste(page)
    with seeded.waiter(8, nodes=2) as request:
        see("queue")
        see(f"queue/{request}", "Cancel")
    for label in ("Cordon", "Uncordon", "Drain"):
        see("fleet/east/east-n0000", label)
    see("fleet/east", "Flush warm leases")
    see("leases?state=granted", "Flush warm leases")
    see(f"leases/{works}")
    page.get_by_role("heading", name="Output").wait_for()
    shell.paste(page)
    see(f"why/{seeded.refused}")
    see("policies")
    for begin, end in (
        ("Shadow", "Stop the shadow"),
        ("Canary", "Stop the canary"),
        ("Activate", "Roll back"),
    ):
        see(f"policies/{SECOND}", begin)
        see(f"policies/{ALIAS}", end)
    see("playground")
    page.get_by_role("button", name="Save as a version…").click()
    page.get_by_label("Version").fill("mine:1-x")
    dialogs(page, shell, "Save")
    see("leases")
    page.goto(f"{seeded.console}/whatif")
    page.get_by_role("button", name="Leave out change 1").wait_for()
    shell.paste(page)
    page.get_by_role("button", name="Clear the form").click()
    page.get_by_label("Policy", exact=True).fill(POLICY)
    shell.paste(page)
    page.get_by_label("Nodes", exact=True).fill("2")
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_label("Cluster").fill("east")
    shell.paste(page)
    see(f"leases/{held}", "Release")
    for words in COMMANDS:
        assert any(line.startswith(words) for line in plain(shell)), words


def sign_in(page: Any, console: str, view: str) -> Any:
    """Show a view to the tenant ann; return the view's first button that copies a command."""
    enter(page, f"{console}/{view}", "of-ann")
    button = page.get_by_role("button", name="Copy as command").first
    button.wait_for()
    return button


def test_each_click_copies_the_shown_command(page: Any, seeded: Seeded) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = sign_in(page, seeded.console, f"leases/{seeded.leases[0]}")
    for lease in (seeded.leases[0], *seeded.leases):
        page.goto(f"{seeded.console}/leases/{lease}")
        page.get_by_role("heading", name=lease[:8]).first.wait_for()
        panel = page.get_by_role("complementary")
        button = panel.get_by_role("button", name="Copy as command").first
        for _ in range(2):
            button.click()
            panel.get_by_text("Copied", exact=True).first.wait_for()
            copied = page.evaluate("navigator.clipboard.readText()")
            assert copied == button.get_attribute("title")
            assert lease in copied


def test_without_a_clipboard_the_page_selects_the_text(page: Any, seeded: Seeded) -> None:
    """Over plain HTTP from another machine, browsers let no page write to the clipboard."""
    console = seeded.console.replace("127.0.0.1", "moored.example")
    sign_in(page, console, "playground")
    assert page.evaluate("navigator.clipboard === undefined")
    button = page.get_by_role("button", name="Copy as command").first
    for _ in range(2):
        button.click()
        selected = page.evaluate(
            "new Promise(done => requestAnimationFrame("
            "() => requestAnimationFrame(() => done(getSelection().toString()))))"
        )
        assert selected.strip() == button.get_attribute("title").strip()
        page.evaluate("getSelection().empty()")

"""The panel of a lease shows the workload's output as it grows, and runs commands in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from consoles import Seeded, enter, seed_server
from websockets.sync.client import connect

pytestmark = pytest.mark.heavy  # A browser.

PATIENCE_MS = 60_000
"""Longest wait for the effect of a process."""


def working(seeded: Seeded, sign: Path) -> str:
    """Start a workload that writes more once a file exists; return the workload's lease."""
    saying = '[ -e "$0" ] && echo it goes on && exec sleep 60'  # The process outlives its daemon.
    script = f"echo it starts; for n in $(seq 600); do {saying}; sleep 0.1; done"
    command = {"command": ["sh", "-c", script, str(sign)]}
    answer = seeded.ask(1, provision={"backend": "local", "spec": command})
    assert answer["success"], answer
    lease: str = answer["lease"]["id"]
    return lease


@pytest.fixture(scope="module")
def seeded() -> Iterator[Seeded]:
    """A daemon that starts processes, for two tenants; the operator owns no lease."""
    tokens = "ann:of-ann,bob:of-bob"
    with seed_server(
        MOORAGE_TOKENS=tokens, MOORAGE_OPERATORS="bob", MOORAGE_BACKENDS="local"
    ) as each:
        # The backend `local` only starts workloads on a node with this name.
        gpus = {"count": 4, "gpus": [{"modelName": "A100", "memory": 80_000}] * 4}
        node = {"id": "localhost", "gpus": gpus, "vcpus": {"count": 8}, "memory": 64_000}
        document = {"id": "here", "nodes": {"count": 1, "nodeData": [node]}}
        assert each.http.post("/clusters", json=document).status_code == 201
        yield each


def test_the_panel_of_a_workload_follows_the_output_and_runs_a_command(
    page: Any, seeded: Seeded, tmp_path: Path
) -> None:
    sign = tmp_path / "go"
    lease = working(seeded, sign)
    enter(page, f"{seeded.console}/leases/{lease}", "of-ann")
    panel = page.get_by_role("complementary", name=f"Lease {lease}")
    output = panel.get_by_label("Output of the workload")
    output.get_by_text("it starts").wait_for(timeout=PATIENCE_MS)
    assert "it goes on" not in output.inner_text()
    sign.touch()
    output.get_by_text("it goes on").wait_for(timeout=PATIENCE_MS)
    panel.get_by_label("Run inside").fill("echo $((6 * 7)) gpus; exit 3")
    panel.get_by_role("button", name="Run", exact=True).click()
    panel.get_by_text("It ended with exit code 3.").wait_for(timeout=PATIENCE_MS)
    assert "42 gpus" in panel.get_by_label("Output of the command").inner_text()


def test_the_console_shows_output_of_workloads_only_to_their_own_tenant(
    seeded: Seeded, tmp_path: Path
) -> None:
    lease = working(seeded, tmp_path / "go")
    logs = {"op": "logs", "lease": lease, "wait_seconds": 20}
    command = {"op": "exec", "lease": lease, "command": ["echo", "42"]}

    def say(name: str, *messages: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        sent = {"Authorization": f"Bearer of-{name}", **headers}
        with connect(seeded.running.ws, additional_headers=sent) as socket:
            answers = []
            for message in messages:
                socket.send(json.dumps(message))
                answers.append(json.loads(socket.recv(timeout=60)))
        return answers

    def codes(answers: list[dict[str, Any]]) -> list[str]:
        return [each["error"]["code"] for each in answers]

    read, ran = say("ann", logs, command, Origin=seeded.running.http)
    assert "it starts" in read["data"]["text"]
    assert ran["data"]["output"] == "42\n"
    assert all(each["success"] for each in say("ann", logs, command)), "programs can do the same"
    others = say("bob", logs, command, Origin=seeded.running.http)
    assert codes(others) == ["unknown_lease"] * 2
    wrong = [{**each, "token": "no-token"} for each in (logs, command)]
    assert codes(say("ann", *wrong, Origin=seeded.running.http)) == ["wrong_token"] * 2

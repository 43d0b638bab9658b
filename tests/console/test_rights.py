"""What is of others: seen by operators, and no button on it; for other tenants it is not there."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from consoles import POLICY, Seeded, seeded
from websockets.sync.client import connect

pytestmark = pytest.mark.heavy  # A browser.


@pytest.fixture(scope="module")
def it() -> Iterator[Seeded]:
    """A daemon of ann, who holds a lease, of bob, and of the operator."""
    tokens = "ann:of-ann,bob:of-bob,olga:of-olga"
    with seeded(MOORAGE_TOKENS=tokens, MOORAGE_OPERATORS="olga") as each:
        each.fleet("east", 2)
        each.ask(2)
        yield each


@contextmanager
def waiting(it: Seeded) -> Iterator[str]:
    """A request of ann, which waits."""
    terms = {"ttl_seconds": 3600, "wait_seconds": 3600}
    request = {"adhoc": True, "id": "w", "policy_rule_uri": POLICY, "inputs": {}, "lease": terms}
    headers = {"Authorization": "Bearer of-ann"}
    with connect(it.running.ws, additional_headers=headers) as socket:
        socket.send(json.dumps(request | {"resources": {"gpus": 8, "nodes": 2}}))
        rows: list[dict[str, Any]] = []
        while not rows:
            socket.send(json.dumps({"op": "queue", "id": "q"}))
            rows = json.loads(socket.recv(timeout=60))["data"]["waiting"]
        yield rows[0]["request"]


def enter(page: Any, it: Seeded, path: str, tenant: str) -> None:
    page.goto(f"{it.console}/{path}")
    page.get_by_label("Token").fill(f"of-{tenant}")
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1).wait_for()


@pytest.mark.parametrize(("tenant", "buttons"), [("ann", 1), ("olga", 0)])
def test_who_may_release_sees_the_button(page: Any, it: Seeded, tenant: str, buttons: int) -> None:
    enter(page, it, f"leases/{it.leases[0]}", tenant)
    panel = page.get_by_role("complementary", name=f"Lease {it.leases[0]}")
    panel.get_by_text("fencing").wait_for()
    assert panel.get_by_role("button", name="Release", exact=True).count() == buttons


@pytest.mark.parametrize(("tenant", "buttons"), [("ann", 1), ("olga", 0)])
def test_who_may_cancel_sees_the_button(page: Any, it: Seeded, tenant: str, buttons: int) -> None:
    with waiting(it) as request:
        enter(page, it, f"queue/{request}", tenant)
        panel = page.get_by_role("complementary", name=f"Request {request}")
        panel.get_by_text("waits until").wait_for()
        assert panel.get_by_role("button", name="Cancel", exact=True).count() == buttons


def test_what_is_of_another_tenant_is_not_there(page: Any, it: Seeded) -> None:
    with waiting(it) as request:
        enter(page, it, f"leases/{it.leases[0]}", "bob")
        panel = page.get_by_role("complementary", name=f"Lease {it.leases[0]}")
        panel.get_by_role("alert").wait_for()
        page.get_by_text("There is no such lease.").wait_for()
        assert panel.get_by_role("button").count() == 0
        page.goto(f"{it.console}/queue/{request}")
        page.get_by_text("The queue is empty.").wait_for()
        panel = page.get_by_role("complementary", name=f"Request {request}")
        panel.get_by_text("It waits no longer.").wait_for()
        assert panel.get_by_role("button", name="Cancel").count() == 0


def test_a_viewer_sees_what_its_role_may_not_do(page: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moorage", "token", "create", "eye", "--role", "viewer"]
    command += ["--tenant", "ann", "--data", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    with seeded(tmp_path, MOORAGE_TOKENS="ann:of-ann") as it:
        it.fleet("east", 1)
        lease = it.ask(1)["lease"]["id"]
        page.goto(f"{it.console}/leases/{lease}")
        page.get_by_label("Token").fill(made.stdout.split()[-1])
        page.keyboard.press("Enter")
        panel = page.get_by_role("complementary", name=f"Lease {lease}")
        release = panel.get_by_role("button", name="Release", exact=True)
        release.wait_for()
        assert release.is_disabled()
        why = "Your role, viewer, may not release or cancel."
        assert release.get_attribute("title") == why
        box = page.get_by_role("checkbox", name=f"Select {lease}")
        assert box.is_disabled()
        assert box.get_attribute("title") == why
        page.goto(f"{it.console}/fleet/east/east-n0000")
        cordon = page.get_by_role("button", name="Cordon", exact=True)
        cordon.wait_for()
        assert cordon.is_disabled()
        page.goto(f"{it.console}/playground")
        run = page.get_by_role("button", name="Run", exact=True)
        run.wait_for()
        assert run.is_disabled()
        page.get_by_text("viewer").first.wait_for()

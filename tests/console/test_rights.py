"""What is of others: seen by operators, and no button on it; for other tenants it is not there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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

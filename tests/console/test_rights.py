"""Operators see other tenants' objects, but no buttons for changes; tenants see only their own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from consoles import Seeded, enter, seed_server

pytestmark = pytest.mark.heavy  # A browser.


@pytest.fixture(scope="module")
def seeded() -> Iterator[Seeded]:
    """A daemon with three users: ann, who holds a lease, bob, and the operator."""
    tokens = "ann:of-ann,bob:of-bob,olga:of-olga"
    with seed_server(MOORAGE_TOKENS=tokens, MOORAGE_OPERATORS="olga") as each:
        each.fleet("east", 2)
        each.ask(2)
        yield each


@pytest.mark.parametrize(("tenant", "buttons"), [("ann", 1), ("olga", 0)])
def test_only_callers_with_the_right_see_release_and_cancel(
    page: Any, seeded: Seeded, tenant: str, buttons: int
) -> None:
    enter(page, f"{seeded.console}/leases/{seeded.leases[0]}", f"of-{tenant}")
    panel = page.get_by_role("complementary", name=f"Lease {seeded.leases[0]}")
    panel.get_by_text("fencing").wait_for()
    assert panel.get_by_role("button", name="Release", exact=True).count() == buttons
    with seeded.waiter(8, nodes=2) as request:
        page.goto(f"{seeded.console}/queue/{request}")
        panel = page.get_by_role("complementary", name=f"Request {request}")
        panel.get_by_text("gives up at").wait_for()
        assert panel.get_by_role("button", name="Cancel", exact=True).count() == buttons


def test_objects_of_other_tenants_are_hidden(page: Any, seeded: Seeded) -> None:
    with seeded.waiter(8, nodes=2) as request:
        enter(page, f"{seeded.console}/leases/{seeded.leases[0]}", "of-bob")
        panel = page.get_by_role("complementary", name=f"Lease {seeded.leases[0]}")
        panel.get_by_role("alert").wait_for()
        page.get_by_text("There is no such lease.").wait_for()
        assert panel.get_by_role("button").count() == 0
        page.goto(f"{seeded.console}/queue/{request}")
        page.get_by_text("The queue is empty.").wait_for()
        panel = page.get_by_role("complementary", name=f"Request {request}")
        panel.get_by_text("It waits no longer.").wait_for()
        assert panel.get_by_role("button", name="Cancel").count() == 0


def test_a_viewer_sees_the_limits_of_its_role(page: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moorage", "token", "create", "eye", "--role", "viewer"]
    command += ["--tenant", "ann", "--data", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    with seed_server(tmp_path, MOORAGE_TOKENS="ann:of-ann") as seeded:
        seeded.fleet("east", 1)
        lease = seeded.ask(1)["lease"]["id"]
        enter(page, f"{seeded.console}/leases/{lease}", made.stdout.split()[-1])
        panel = page.get_by_role("complementary", name=f"Lease {lease}")
        release = panel.get_by_role("button", name="Release", exact=True)
        release.wait_for()
        assert release.is_disabled()
        why = "Your role, viewer, may not release or cancel."
        assert release.get_attribute("title") == why
        box = page.get_by_role("checkbox", name=f"Select {lease}")
        assert box.is_disabled()
        assert box.get_attribute("title") == why
        every = page.get_by_role("checkbox", name="Select all that are shown")
        assert every.get_attribute("title") == why
        page.get_by_text(why).wait_for()
        for view, name in (("fleet/east/east-n0000", "Cordon"), ("playground", "Run")):
            page.goto(f"{seeded.console}/{view}")
            button = page.get_by_role("button", name=name, exact=True)
            button.wait_for()
            assert button.is_disabled()
        page.get_by_text("viewer").first.wait_for()

"""Operators see other tenants' objects, but no buttons for changes; tenants see only their own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from consoles import POLICY, Seeded, enter, seed_server
from typer.testing import CliRunner

from moorage.commands.program import app
from moorage.model import Tenant
from moorage.records.rights import Caller, Right, Role

pytestmark = pytest.mark.heavy  # A browser.

BUTTONS = [
    ("leases", Right.LEASE, "Flush warm leases"),
    ("leases/LEASE", Right.LEASE, "Release"),
    ("leases/LEASE", Right.EXEC, "Run"),
    ("queue/REQUEST", Right.LEASE, "Cancel"),
    ("fleet/here", Right.CORDON, "Cordon", "Drain"),
    ("fleet/here", Right.LEASE, "Flush warm leases"),
    ("fleet/here/localhost", Right.CORDON, "Cordon", "Drain"),
    ("policies/first_fit:1.1-stable", Right.POLICY, "Activate", "Shadow", "Canary"),
    ("policies/first_fit:stable", Right.POLICY, "Roll back"),
    ("playground", Right.POLICY, "Run"),
    ("why/LEASE", Right.POLICY, "Score the nodes as they were"),
]
"""Views and their buttons, with the right that these need."""
ALIAS = "/policy-alias/first_fit:stable"
OLD, NEW = ({"policy_rule_uri": f"first_fit:{version}-stable"} for version in ("1.0", "1.1"))
ACTIVATE = ("POST", f"{ALIAS}/activate", NEW)
EFFECTS = [
    (Right.LEASE, "leases", "Flush warm leases", "socket.js", "ask", {"op": "flush"}),
    (Right.CORDON, "fleet/here", "Cordon", "socket.js", "ask", {"op": "cordon", "cluster": "here"}),
    (Right.POLICY, "policies/first_fit:1.1-stable", "Activate", "session.js", "http", *ACTIVATE),
]
"""A button for each right, and the function of the page that it calls, with the arguments."""
CALL = """([file, name, ...given]) => import(`/console/static/${file}`)
    .then((module) => module[name](...given)).then(() => "", (error) => error.code)"""


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


@pytest.fixture(scope="module")
def roles(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Seeded, str, dict[Role, str]]]:
    """A daemon with a lease that has a workload, a waiting request, and a token of each role."""
    data, work = (tmp_path_factory.mktemp(name) for name in ("data", "work"))
    create = ["token", "create", "--tenant", "ann", "--data", str(data), "--role"]
    tokens = {role: CliRunner().invoke(app, [*create, role, role]).stdout.strip() for role in Role}
    with seed_server(data, MOORAGE_TOKENS="ann:of-ann", MOORAGE_BACKENDS="local") as seeded:
        seeded.second_version()
        for version in (NEW, OLD):
            seeded.http.post(f"{ALIAS}/activate", json=version).raise_for_status()
        gpus = {"count": 4, "gpus": [{"modelName": "A100", "memory": 80_000}] * 4}
        node = {"id": "localhost", "gpus": gpus, "vcpus": {"count": 8}, "memory": 64_000}
        document = {"id": "here", "nodes": {"count": 1, "nodeData": [node]}}
        seeded.http.post("/clusters", json=document).raise_for_status()
        sign = work / "sign"  # Without it, the workload ends, which outlives its daemon.
        sign.touch()
        script = 'for n in $(seq 900); do [ -e "$0" ] || exit; sleep 1; done'
        command = ["sh", "-c", script, str(sign)]
        seeded.ask(1, provision={"backend": "local", "spec": {"command": command}})
        with seeded.waiter(4) as request:
            yield seeded, request, tokens
        sign.unlink()


READERS = [role for role in Role if Caller(Tenant("ann"), role).may(Right.READ)]
"""The roles that may log in to the console."""


@pytest.mark.parametrize("role", READERS)
def test_the_console_offers_exactly_the_actions_that_the_role_may_take(
    page: Any, roles: tuple[Seeded, str, dict[Role, str]], role: Role
) -> None:
    seeded, request, tokens = roles
    caller = Caller(Tenant("ann"), role)
    enter(page, f"{seeded.console}/operations", tokens[role])
    page.get_by_role("link", name="All metrics").wait_for()
    metrics = page.request.get(f"{seeded.running.http}/metrics")
    assert metrics.ok is caller.may(Right.METRICS)

    def button(name: str, *, offered: bool) -> Any:
        return page.get_by_role("button", name=name, exact=True, disabled=not offered)

    for view, right, *names in BUTTONS:
        place = view.replace("LEASE", seeded.leases[0]).replace("REQUEST", request)
        page.goto(f"{seeded.console}/{place}")
        page.get_by_role("heading", level=1).wait_for()
        for name in names:
            if caller.may(right):
                button(name, offered=True).wait_for()
            elif right is Right.EXEC and caller.may(Right.READ):
                page.get_by_text(f"Your role, {role}, may not run").wait_for()
            elif caller.may(Right.READ):
                why = button(name, offered=False).get_attribute("title")
                assert why.startswith(f"Your role, {role}, may not ")
            assert button(name, offered=True).count() == caller.may(right), (view, name)
    for right, view, name, *call in EFFECTS:
        page.goto(f"{seeded.console}/{view}")
        page.get_by_role("heading", level=1).wait_for()
        if caller.may(right):
            button(name, offered=True).click()
            button(f"{name} now", offered=True).click()
            page.get_by_role("dialog").wait_for(state="hidden")
            continue
        if caller.may(Right.READ):
            page.get_by_text("live", exact=True).first.wait_for()
        if caller.may(Right.READ) or call[0] != "socket.js":  # Others open no socket.
            assert page.evaluate(CALL, call) == "unauthorized", name
    means = seeded.http.get(ALIAS).json()["data"]["policy_rule_uri"]
    assert (means == NEW["policy_rule_uri"]) is caller.may(Right.POLICY)
    ask = {"policy_rule_uri": POLICY, "inputs": {}, "resources": {"gpus": 1}}
    placed = seeded.http.post("/allocate", json=ask).json()["success"]
    assert placed is not caller.may(Right.CORDON)
    seeded.http.post(f"{ALIAS}/activate", json=OLD).raise_for_status()
    if caller.may(Right.CORDON):
        page.evaluate(CALL, ["socket.js", "ask", {"op": "uncordon", "cluster": "here"}])

"""The what-if form collects changes and shows their predicted effects."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from consoles import POLICY, Seeded, seed_server

pytestmark = pytest.mark.heavy  # A browser.


@pytest.fixture(scope="module")
def seeded() -> Iterator[Seeded]:
    """A server with one node of eight GPUs, of which a lease holds two."""
    with seed_server() as each:
        each.fleet("east", 1)
        each.ask(2)
        yield each


def change(page: Any, kind: str, *fields: tuple[str, str]) -> Any:
    """Add a change to the what-if form; return the change's group of fields."""
    page.get_by_role("button", name=kind, exact=True).click()
    group = page.get_by_role("group", name=re.compile(rf"\d+\. {kind}")).last
    for label, text in fields:
        group.get_by_label(label, exact=True).fill(text)
    return group


def ask(page: Any) -> Any:
    page.get_by_role("button", name="What if?").click()
    page.get_by_role("button", name="What if?", disabled=False).wait_for()
    return page.get_by_role("region", name="What would happen")


def begin(page: Any, seeded: Seeded) -> None:
    """Show the what-if view, and remove the example with which it starts."""
    page.goto(f"{seeded.console}/whatif")
    page.get_by_role("button", name="Leave out change 1").wait_for()
    page.get_by_role("button", name="Clear the form").click()


def request(page: Any, gpus: int) -> None:
    page.get_by_label("Policy").fill(POLICY)
    page.get_by_label("GPUs on each node").fill(str(gpus))


def test_added_nodes_can_be_removed_from_the_form_of_a_what_if(page: Any, seeded: Seeded) -> None:
    begin(page, seeded)
    request(page, 8)
    ask(page).get_by_text("no_capacity").wait_for()
    fields = ("Cluster", "east"), ("Copy of node", "east-n0000"), ("How many", "2")
    change(page, "Add nodes", *fields)
    ask(page).get_by_text("east/east-n0000+1 GPU").wait_for()
    assert Axe().run(page).violations_count == 0, Axe().run(page).generate_report()
    page.get_by_role("button", name="Leave out change 1").click()
    ask(page).get_by_text("no_capacity").wait_for()
    assert "east-n0000+1" not in seeded.http.get("/clusters/east").text


def test_the_form_of_a_what_if_combines_drains_cordons_quotas_and_policies(
    page: Any, seeded: Seeded
) -> None:
    begin(page, seeded)
    drain = change(page, "Drain", ("Cluster", "east"))
    row = ask(page).get_by_role("table", name="What would differ").get_by_role("row").last
    row.get_by_text("stays").wait_for()
    assert seeded.leases[0] in row.inner_text()
    drain.get_by_role("button").click()
    request(page, 1)
    cordon = change(page, "Cordon", ("Cluster", "east"), ("Node (empty: all nodes)", "east-n0000"))
    ask(page).get_by_text("no_capacity").wait_for()
    change(page, "Uncordon", ("Cluster", "east"), ("Node (empty: all nodes)", "east-n0000"))
    cordon.get_by_role("button").click()
    ask(page).get_by_text("granted").wait_for()
    change(page, "Set a quota", ("Tenant", "local"), ("GPUs (empty: no limit)", "2"))
    ask(page).get_by_text("quota").first.wait_for()
    change(page, "Swap a policy", ("Instead of", POLICY), ("use", "none:1-stable"))
    page.get_by_role("button", name="What if?").click()
    page.get_by_role("alert").get_by_text("none:1-stable").wait_for()


def test_the_form_of_a_what_if_opens_for_a_waiting_request(page: Any, seeded: Seeded) -> None:
    with seeded.waiter(8) as waits:
        page.goto(f"{seeded.console}/queue/{waits}")
        page.get_by_role("link", name="What if…").click()
        change(page, "Drain", ("Cluster", "nowhere"))
        page.get_by_role("button", name="What if?").click()
        page.get_by_role("alert").get_by_text("nowhere").wait_for()
        page.get_by_role("button", name="Leave out change 1").click()
        fields = ("Cluster", "east"), ("Copy of node", "east-n0000")
        change(page, "Add nodes", *fields)
        ask(page).get_by_text(f"{waits} would start on east/east-n0000+1").wait_for()


def test_the_form_of_a_what_if_works_by_keys_alone(page: Any, seeded: Seeded) -> None:
    begin(page, seeded)
    page.get_by_role("button", name="Drain", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.tagName === 'INPUT'")
    page.keyboard.type("east")
    page.get_by_role("button", name="What if?").focus()
    page.keyboard.press("Enter")
    page.get_by_role("region", name="What would happen").get_by_text("stays").wait_for()
    page.get_by_role("button", name="Leave out change 1").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.innerText === 'Add nodes'")


def test_a_field_of_the_form_with_invalid_json_shows_an_error(page: Any, seeded: Seeded) -> None:
    begin(page, seeded)
    request(page, 1)
    page.get_by_label("Other fields (JSON)").fill("{")
    page.get_by_role("button", name="What if?").click()
    page.get_by_role("alert").get_by_text("are not valid JSON").wait_for()


def test_the_form_of_a_what_if_starts_with_an_example_from_the_fleet(
    page: Any, seeded: Seeded
) -> None:
    page.goto(f"{seeded.console}/whatif")
    page.get_by_role("button", name="Leave out change 1").wait_for()
    shown = ask(page)
    shown.get_by_text("east/east-n0000+1 GPU").wait_for()
    rows = shown.get_by_role("table", name="Allocation and fragmentation").get_by_role("row")
    now, then = (each.replace("\xa0", " ") for each in rows.all_inner_texts()[1:])
    assert "6 (fragmentation 100 %)" in now
    assert "8\t" in now
    assert "16\t" in then

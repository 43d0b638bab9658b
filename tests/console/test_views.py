"""A person or a screen reader finds each view of the console by role and name."""

import re
import time
from typing import Any

import pytest
from consoles import VIEWS

from moorage.model import Demand
from moorage.records.fields import field_title
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # A browser.


def by(page: Any, role: str, name: str, **more: Any) -> Any:
    return page.get_by_role(role, name=name, **more)


def test_the_first_page_of_the_console_is_the_overview_with_working_links(
    page: Any, console_server: Any
) -> None:
    page.goto(console_server.console)
    by(page, "heading", "Overview", level=1).wait_for()
    for name in list(VIEWS.values())[1:]:
        page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        by(page, "heading", name, level=1).wait_for()
        page.wait_for_function("name => document.title.startsWith(name)", arg=name)
    page.go_back()
    by(page, "heading", "What-if", level=1).wait_for()


def test_the_view_of_a_lease_shows_its_reason_and_json(page: Any, console_server: Any) -> None:
    lease = console_server.ask(2)["lease"]["id"]
    page.goto(f"{console_server.console}/leases/{lease}")
    table = by(page, "table", "Leases")
    table.get_by_role("link", name=lease).wait_for()
    panel = by(page, "complementary", f"Lease {lease}")
    panel.get_by_text("first_fit:1.0-stable proposed").wait_for()
    panel.get_by_text("JSON", exact=True).click()
    assert f'"id": "{lease}"' in by(page, "region", "JSON").inner_text()


def test_leases_are_filtered_by_the_server(page: Any, console_server: Any) -> None:
    page.goto(f"{console_server.console}/leases")
    by(page, "table", "Leases").wait_for()
    by(page, "textbox", "Node").fill("east-n0000")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**/leases?node_id=east-n0000")
    page.get_by_text(re.compile(r"^(\d+) leases, \1 shown$")).wait_for()
    places = by(page, "table", "Leases").get_by_role("row").all_inner_texts()[1:]
    assert places
    assert all("east/east-n0000" in place for place in places)


def test_a_listing_shows_new_rows_on_request_and_keeps_ended_rows(
    page: Any, console_server: Any
) -> None:
    page.goto(f"{console_server.console}/leases")
    table = by(page, "table", "Leases")
    table.wait_for()
    before = table.get_by_role("rowheader").all_inner_texts()
    added = [console_server.ask(1)["lease"]["id"] for _ in range(2)]
    new = by(page, "button", "2 new")
    new.wait_for()
    assert table.get_by_role("rowheader").all_inner_texts() == before
    new.click()
    for lease in added:
        table.get_by_role("link", name=lease).wait_for()


def test_the_console_shows_a_difference_before_an_activation_or_a_rollback(
    page: Any, console_server: Any
) -> None:
    page.goto(f"{console_server.console}/policies/first_fit:stable")
    panel = by(page, "complementary", "first_fit:stable")
    panel.get_by_role("button", name="Roll back").click()
    dialog = by(page, "dialog", "Roll first_fit:stable back")
    difference = dialog.get_by_role("region", name="Difference").inner_text()
    assert "- " in difference
    assert "+ " in difference
    dialog.get_by_role("button", name="Roll back now").click()
    panel.get_by_role("link", name="first_fit:1.0-stable").wait_for()
    page.goto(f"{console_server.console}/policies/first_fit:1.1-stable")
    panel = by(page, "complementary", "first_fit:1.1-stable")
    by(panel, "textbox", "Alias").fill("first_fit:stable")
    panel.get_by_role("button", name="Activate").click()
    by(page, "button", "Activate now").click()
    by(page, "table", "Aliases").get_by_text("first_fit:1.1-stable").wait_for()
    assert console_server.http.get("/policy-alias/first_fit:stable").json()["data"][
        "policy_rule_uri"
    ] == ("first_fit:1.1-stable")


def test_the_console_shows_a_difference_before_it_starts_a_canary(
    page: Any, console_server: Any
) -> None:
    """The alias points at one version, and a canary sends a share of its requests to another."""
    means = console_server.http.get("/policy-alias/first_fit:stable").json()["data"][
        "policy_rule_uri"
    ]
    other = next(uri for uri in ("first_fit:1.0-stable", "first_fit:1.1-stable") if uri != means)
    page.goto(f"{console_server.console}/policies/{other}")
    panel = by(page, "complementary", other)
    by(panel, "spinbutton", "Percent").fill("25")
    by(panel, "button", "Canary", exact=True).click()
    dialog = by(page, "dialog", f"Send 25 % of first_fit:stable to {other}")
    dialog.get_by_role("region", name="Difference").wait_for()
    by(dialog, "button", "Canary now").click()
    by(page, "table", "Aliases").get_by_text(f"25 % {other}").wait_for()
    by(page, "link", "first_fit:stable").first.click()
    by(page, "button", "Stop the canary", exact=True).click()
    by(page, "button", "Stop the canary now").click()
    by(page, "button", "Stop the canary", exact=True).wait_for(state="hidden")
    assert (
        console_server.http.get("/policy-alias/first_fit:stable").json()["data"]["canary"] is None
    )


def test_the_playground_saves_a_version(page: Any, console_server: Any) -> None:
    page.goto(f"{console_server.console}/playground")
    page.get_by_label("Policy (Python)").fill(catalog.document("first_fit")["code"])
    by(page, "button", "Save as a version…").click()
    by(page, "textbox", "Version", exact=True).fill("mine:0.1-draft")
    by(page, "button", "Save", exact=True).click()
    by(page, "button", "Save now").click()
    page.wait_for_url("**/policies/mine%3A0.1-draft")
    by(page, "complementary", "mine:0.1-draft").get_by_text("registered").wait_for()


def test_the_operations_view_shows_health_events_and_cells(page: Any, console_server: Any) -> None:
    page.goto(f"{console_server.console}/operations")
    page.get_by_text("Requests are served.").wait_for()
    by(page, "link", "All metrics").wait_for()
    console_server.ask(1)
    page.get_by_text("was granted to local on").wait_for()
    page.get_by_text("was registered or changed: 24 nodes").wait_for()
    by(page, "table", "Cells of policies").get_by_role("link", name="first_fit:1").first.wait_for()


def test_missing_objects_have_an_error_page(page: Any, console_server: Any) -> None:
    page.goto(f"{console_server.console}/nothing")
    page.get_by_text("There is no view “nothing”.").wait_for()
    for path, name in (
        ("leases/100%", "Lease 100%"),
        ("leases/nothing", "Lease nothing"),
        ("policies/none:1-stable", "none:1-stable"),
    ):
        page.goto(f"{console_server.console}/{path}")
        by(page, "complementary", name).get_by_role("alert").wait_for()
    page.goto(f"{console_server.console}/queue")
    page.get_by_text("The queue is empty.").wait_for()


def test_the_why_page_lists_decisions_and_opens_a_decision_with_its_fleet(
    page: Any, console_server: Any
) -> None:
    page.goto(f"{console_server.console}/why")
    table = by(page, "table", "Decisions")
    table.get_by_role("link", name=console_server.refused).wait_for()
    by(page, "combobox", "State").select_option("refused")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**/why?state=refused")
    page.get_by_text(re.compile(r"^\d+ shown$")).wait_for()
    assert all("refused" in row for row in table.get_by_role("row").all_inner_texts()[1:])
    table.get_by_role("link", name=console_server.refused).click()
    panel = by(page, "complementary", f"Decision {console_server.refused}")
    by(panel, "textbox", "Version", exact=True).fill("first_fit:1.1-stable")
    by(panel, "button", "Compare").click()
    another = panel.get_by_role("region", name="Another version")
    another.get_by_text("first_fit:1.1-stable: ✕ refused").wait_for()
    granted = page.goto(f"{console_server.console}/why/{console_server.leases[0]}")
    assert granted.ok
    panel = by(page, "complementary", f"Decision {console_server.leases[0]}")
    by(panel, "button", "Score the nodes as they were").click()
    scores = by(panel, "table", "Scores of the best nodes")
    scores.get_by_role("cell", name=re.compile(r"^8 GPUs, .* cores and .* GiB$")).first.wait_for()
    page.goto(f"{console_server.console}/why/{console_server.refused}")
    panel = by(page, "complementary", f"Decision {console_server.refused}")
    panel.get_by_role("link", name="Open in the playground").click()
    page.wait_for_url("**/playground?decision=*")
    page.wait_for_function("() => document.querySelector('#code').value.includes('All equal')")
    assert by(page, "radio", "as it was at").is_checked()
    assert '"gpus": 9' in page.get_by_label("Requests (JSON list)").input_value()
    page.get_by_role("button", name="Run", exact=True).click()
    by(page, "table", "Results").get_by_text("never_fits").wait_for()
    page.get_by_text("On 40 nodes with 320 GPUs").wait_for()


WORDS = """async (field) => {
    const {changeWords} = await import("/console/static/views/reasons.js");
    return changeWords({field: `resources.${field}`, asked: ["a", "b"], fits: 3});
}"""


def test_the_why_page_shows_changes_that_would_make_a_request_fit_in_plain_words(
    page: Any, console_server: Any
) -> None:
    page.goto(console_server.console)
    for field in Demand.__struct_fields__:
        said = f"It would fit with {field_title(field)}: 3 instead of a or b."
        assert page.evaluate(WORDS, field) == said


TURN = """async ([row, why]) => {
    const {turn} = await import("/console/static/views/reasons.js");
    return turn(row, why);
}"""


def test_the_expected_start_is_a_time_a_range_or_a_reason(page: Any, console_server: Any) -> None:
    page.goto(console_server.console)
    now = time.time()
    row = {"position": 1, "deadline": now + 9000, "resources": {"gpus": 1}}
    waits = {"waits_for": [{"expires_at": now + 60}], "room_at": now + 3600}

    def turn_text(why: dict[str, Any], **more: Any) -> str:
        text: str = page.evaluate(TURN, [row | more, why])
        return text

    assert turn_text(waits, expected_at=now + 600).startswith("in ")
    assert "unless leases are renewed" in turn_text(waits)
    assert " to " in turn_text(waits)
    assert "or later: other requests come first" in turn_text(waits, position=2)
    assert "after its deadline" in turn_text(waits, deadline=now + 1800)
    assert "reserved for an earlier request" in turn_text({"nodes": 3, "misfits": {"cpu": 1}})
    assert "only its policy knows" in turn_text({}, resources=None)


def test_the_why_page_shows_refusals_of_one_kind_as_one_row(page: Any, console_server: Any) -> None:
    for _ in range(3):
        console_server.ask(7, resources={"gpus": 77})
    page.goto(f"{console_server.console}/why")
    table = by(page, "table", "Refused and waiting")
    row = table.get_by_role("row").filter(has_text="77 GPUs")
    row.get_by_text("3 times").wait_for()
    page.get_by_text(
        re.compile(r"Of the last \d+ refused requests, since \d{4}-\d\d-\d\d ")
    ).wait_for()
    assert row.count() == 1

"""The server sorts leases, a timeline shows them, and one dialog releases several."""

from typing import Any

import pytest
from consoles import Seeded

pytestmark = pytest.mark.heavy  # A browser.


def test_a_click_on_a_column_head_sorts_the_rows(page: Any, console_server: Seeded) -> None:
    short = console_server.ask(1, lease={"ttl_seconds": 900})["lease"]["id"]
    page.goto(f"{console_server.console}/leases")
    table = page.get_by_role("table", name="Leases")
    table.wait_for()
    assert table.get_by_role("rowheader").first.inner_text() == short
    table.get_by_role("button", name="GPUs").click()
    page.wait_for_url("**sort=-gpus")
    head = table.get_by_role("columnheader", name="GPUs")
    head.wait_for()
    assert head.get_attribute("aria-sort") == "descending"
    page.wait_for_function(
        "() => document.querySelector('main table tbody td:nth-child(5)').innerText === '4'"
    )
    assert page.get_by_text("A100").count() > 0


def test_the_timeline_works_by_keys_and_by_mouse(page: Any, console_server: Seeded) -> None:
    page.goto(f"{console_server.console}/leases")
    canvas = page.get_by_role("img", name="Timeline of")
    canvas.wait_for()
    legend = page.get_by_role("list", name="Colours by tenant")
    legend.get_by_text("local").wait_for()
    page.get_by_role("combobox", name="Colour").select_option("model")
    page.get_by_role("list", name="Colours by model").get_by_text("A100").wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 150 + (box["width"] - 154) / 9 + 8, box["y"] + 40)
    page.get_by_text("of local, ").wait_for()
    page.get_by_role("combobox", name="Lines by").select_option("tenant")
    page.get_by_role("img", name="by tenant").wait_for()
    legend.get_by_text("local").wait_for()  # A tenant's area includes all GPU models.
    page.mouse.move(box["x"] + box["width"] - 200, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 100, box["y"] + 50)
    page.mouse.up()
    page.get_by_role("button", name="Zoom to it").click()
    page.get_by_role("button", name="All times").click()
    page.get_by_role("button", name="Zoom to it").wait_for(state="hidden")


LINES = """async ([rows, order, cut]) => {
    const {lined} = await import("/console/static/timeline.js");
    return lined(rows, "node", order, cut).map(each => [each.name, each.rows.length]);
}"""


def test_the_timeline_draws_whole_nodes_only(page: Any, console_server: Seeded) -> None:
    def lease(ends: float, *nodes: str) -> dict[str, Any]:
        shares = [{"cluster_id": "c", "node_id": each, "gpus": ["0"]} for each in nodes]
        return {"placement": shares, "expires_at": ends, "tenant": "ann"}

    page.goto(console_server.console)
    rows = [lease(1, "a"), lease(5, "a"), lease(2, "b", "d"), lease(4, "b"), lease(3, "c")]
    whole = [["c/a", 2], ["c/b", 2], ["c/d", 1]]
    assert page.evaluate(LINES, [rows, "ends", False]) == [*whole, ["c/c", 1]]
    # More leases follow, node by node; leases of `c` and later nodes are incomplete here.
    assert page.evaluate(LINES, [rows, "ends", True]) == whole
    assert page.evaluate(LINES, [rows[:4], "ends", True]) == [["c/a", 2]]


def test_one_dialog_releases_several_leases(page: Any, console_server: Seeded) -> None:
    chosen = [console_server.ask(1, lease={"ttl_seconds": 600})["lease"]["id"] for _ in range(2)]
    page.goto(f"{console_server.console}/leases")
    for lease in chosen:
        page.get_by_role("checkbox", name=f"Select {lease}").check()
    page.get_by_text("2 selected").wait_for()
    page.get_by_role("button", name="Release 2", exact=True).click()
    dialog = page.get_by_role("dialog", name="Release 2 leases")
    dialog.get_by_text("Ends 2 leases, which hold 2 GPUs").wait_for()
    dialog.get_by_text("No waiting request then fits.").wait_for()
    dialog.get_by_role("button", name="Release 2 now").click()
    dialog.wait_for(state="hidden")
    for lease in chosen:
        row = page.get_by_role("row", name=lease)
        row.get_by_text("gone").or_(row.get_by_text("ended")).first.wait_for()

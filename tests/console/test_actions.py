"""Actions show their effects in a dialog first; only the confirmation changes anything."""

import re
from typing import Any

import pytest
from consoles import Seeded, legend_counts

pytestmark = pytest.mark.heavy  # A browser.


def test_the_console_shows_the_dry_run_of_a_cordon_before_the_cordon(
    page: Any, console_server: Seeded
) -> None:
    page.goto(f"{console_server.console}/fleet/west/west-n0015")
    node = page.get_by_role("region", name="west/west-n0015")
    node.get_by_role("button", name="Cordon", exact=True).click()
    dialog = page.get_by_role("dialog", name="Cordon west/west-n0015")
    dialog.get_by_text("The dry run as JSON").wait_for()
    dialog.get_by_text("No lease is there.").wait_for()
    dialog.get_by_text("No waiting request then fits.").wait_for()
    assert legend_counts(page)["cordoned"] == 0
    dialog.get_by_role("button", name="Cordon now").click()
    node.get_by_role("button", name="Uncordon").wait_for()
    page.wait_for_function(
        "() => /cordoned 8\\b/.test(document.querySelector('.legend').innerText)"
    )
    node.get_by_role("button", name="Uncordon").click()
    page.get_by_role("button", name="Uncordon now").click()
    node.get_by_role("button", name="Cordon", exact=True).wait_for()


def test_the_dialog_of_a_drain_shows_what_happens_to_each_lease(
    page: Any, console_server: Seeded
) -> None:
    page.goto(f"{console_server.console}/fleet/east/east-n0000")
    node = page.get_by_role("region", name="east/east-n0000")
    here = node.get_by_role("table", name="Leases here")
    here.wait_for()
    leases = here.get_by_role("row").count() - 1
    node.get_by_role("button", name="Drain", exact=True).click()
    dialog = page.get_by_role("dialog", name="Drain east/east-n0000")
    held = rf"{leases} leases? with .*: {leases} of local\. .*the last in"
    dialog.get_by_text(re.compile(held)).wait_for()
    dialog.get_by_text(f"{leases} × stays until it ends").wait_for()
    dialog.get_by_text("No waiting request then fits.").wait_for()
    dialog.get_by_role("button", name="Change nothing").click()


def test_the_dialog_of_a_release_names_the_waiters_that_it_serves(
    page: Any, console_server: Seeded
) -> None:
    """A gang needs one node more than is free; the release of a whole-node lease frees one."""
    lease = console_server.ask(8)["lease"]["id"]
    empty = console_server.http.get("/history").json()["data"]["now"]["models"]
    nodes = sum(each["nodes_empty"] for each in empty.values()) + 1
    with console_server.waiter(8, nodes=nodes):
        page.goto(f"{console_server.console}/leases/{lease}")
        panel = page.get_by_role("complementary", name=f"Lease {lease}")
        panel.get_by_role("button", name="Release", exact=True).click()
        dialog = page.get_by_role("dialog", name=f"Release lease {lease}")
        dialog.get_by_text("The dry run as JSON").wait_for()
        panel.get_by_text("● granted").wait_for()
        dialog.get_by_text("1 waiting request then fits").wait_for()
        dialog.get_by_text("No workload runs under it.").wait_for()
        dialog.get_by_role("button", name="Release now").click()
        panel.get_by_text(re.compile("ended|ending")).first.wait_for()


def test_a_waiting_request_is_shown_and_can_be_cancelled(page: Any, console_server: Seeded) -> None:
    with console_server.waiter(8, nodes=38) as request:
        page.goto(f"{console_server.console}/queue")
        page.get_by_role("table", name="Queue").get_by_role("link", name=request).click()
        panel = page.get_by_role("complementary", name=f"Request {request}")
        why = panel.get_by_role("region", name="Why it waits")
        why.get_by_text(re.compile(r"Of the \d+ nodes that could take it when empty")).wait_for()
        panel.get_by_role("button", name="Cancel", exact=True).click()
        dialog = page.get_by_role("dialog", name=f"Cancel request {request}")
        dialog.get_by_text("The dry run as JSON").wait_for()
        dialog.get_by_role("button", name="Cancel now").click()
        panel.get_by_text("It waits no longer.").wait_for()


def test_a_page_that_is_not_connected_yet_offers_no_action(
    page: Any, console_server: Seeded
) -> None:
    page.add_init_script("window.WebSocket = class { static OPEN = 1; readyState = 0; };")
    page.goto(f"{console_server.console}/leases")
    flush = page.get_by_role("button", name="Flush warm leases")
    flush.wait_for()
    assert flush.is_disabled()


def test_the_console_asks_for_confirmation_before_it_flushes_warm_leases(
    page: Any, console_server: Seeded
) -> None:
    page.goto(f"{console_server.console}/leases")
    page.get_by_role("button", name="Flush warm leases").click()
    dialog = page.get_by_role("dialog", name="Flush all warm leases")
    dialog.get_by_text("The dry run as JSON").wait_for()
    dialog.get_by_role("button", name="Flush warm leases now").click()
    dialog.wait_for(state="hidden")

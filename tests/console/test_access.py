"""The console works by screen reader and by keys alone, and axe finds no fault in either theme."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from consoles import VIEWS, open_page

pytestmark = pytest.mark.heavy  # A browser.


def settle(page: Any) -> None:
    """Wait until no part of the view is loading."""
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_function("() => !document.querySelector('.loading')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_fault_in_any_view(chromium: Any, console_server: Any, theme: str) -> None:
    found: dict[str, str] = {}
    with open_page(chromium, color_scheme=theme) as page:
        objects = (
            "fleet/east/east-n0000",
            f"leases/{console_server.leases[0]}",
            f"why/{console_server.refused}",
            "policies/first_fit:stable",
            "policies/first_fit:1.1-stable",
            "nothing",
        )
        for path in (*VIEWS, *objects):
            page.goto(f"{console_server.console}/{path}")
            settle(page)
            answer = Axe().run(page)
            if answer.violations_count:
                found[path] = answer.generate_report()
    assert not found, "\n".join(found.values())


def test_axe_finds_no_fault_in_dialogs_and_keys_are_enough_for_an_action(
    page: Any, console_server: Any
) -> None:
    lease = console_server.ask(1)["lease"]["id"]
    page.goto(f"{console_server.console}/leases/{lease}")
    release = page.get_by_role("button", name="Release", exact=True)
    release.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Release lease {lease}")
    dialog.wait_for()
    settle(page)
    assert Axe().run(page).violations_count == 0, Axe().run(page).generate_report()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert release.evaluate("each => each === document.activeElement")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    assert Axe().run(page).violations_count == 0, Axe().run(page).generate_report()


def test_keys_reach_every_view_and_every_row(page: Any, console_server: Any) -> None:
    page.goto(f"{console_server.console}/operations")
    settle(page)
    for key, name in zip("vfqlwpyio", VIEWS.values(), strict=True):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.get_by_role("heading", name=name, level=1, exact=True).wait_for()
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.get_by_role("table", name="Leases").wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.get_by_role("complementary", name=f"Lease {console_server.leases[0]}").wait_for()


def test_the_command_bar_leads_to_views_and_objects(page: Any, console_server: Any) -> None:
    page.goto(f"{console_server.console}/operations")
    settle(page)
    for text, path in (
        ("queue", "queue"),
        (console_server.leases[0], f"leases/{console_server.leases[0]}"),
        (console_server.refused, f"why/{console_server.refused}"),
        ("first_fit:1.0-stable", "policies/first_fit%3A1.0-stable"),
        ("east/east-n0001", "fleet/east/east-n0001"),
    ):
        page.keyboard.press("/")
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/console/{path}")

"""The numbers of the overview agree with the fleet, and each number leads to its view."""

import re
from typing import Any

import pytest
from consoles import PHONE, VIEWS, WIDE, Seeded, open_page, seed_server

pytestmark = pytest.mark.heavy  # A browser.


def test_numbers_and_charts_link_to_their_views(page: Any, console_server: Seeded) -> None:
    page.goto(f"{console_server.console}/overview")
    page.get_by_text("Nothing calls for attention.").wait_for()
    models = page.get_by_role("table", name="GPUs by model")
    rows = models.get_by_role("row").all_inner_texts()
    assert [row.split()[0] for row in rows[1:]] == ["A100", "H100"]
    assert rows[1].split()[-5:] == ["192", "up", "to", "8", "20"]
    chart = page.get_by_role("group", name="Fleet in use")
    drawn = chart.locator("path.line").first.get_attribute("d")
    assert re.findall(r"[ML]([\d.]+),", drawn)[-1] == "372.0"  # The newest point is at "now".
    chart.get_by_text("The figures").click()
    assert chart.get_by_role("table", name="Fleet in use").get_by_role("row").count() > 1
    numbers = page.get_by_role("list", name="Numbers")
    numbers.get_by_role("link", name="Refused").click()
    page.wait_for_url("**/why?state=refused")
    page.go_back()
    page.get_by_role("link", name="leases end within the hour").click()
    page.wait_for_url("**/leases?sort=expires_at")


def test_the_overview_lists_the_longest_waiters_with_reasons(
    page: Any, console_server: Seeded
) -> None:
    with console_server.waiter(8, nodes=39) as request:
        page.goto(f"{console_server.console}/overview")
        row = page.get_by_role("table", name="Longest waits").get_by_role("row").last
        row.get_by_text("8 GPUs on each of 39 nodes").wait_for()
        row.get_by_text("could take it when empty").wait_for()
        page.get_by_role("link", name="1 of 1 waiting request").wait_for()
        row.get_by_role("link").click()
        page.wait_for_url(f"**/queue/{request}")
        page.get_by_role("table", name="Waits for").wait_for()


def test_long_names_make_no_view_scroll_sideways(page: Any) -> None:
    with seed_server() as seeded:
        seeded.fleet("c" * 240, 2)
        for _ in range(3):
            seeded.ask(2)
        wide = {}
        with seeded.waiter(8, nodes=2) as request:
            for size in (WIDE, PHONE):
                page.set_viewport_size(size)
                for path in (*VIEWS, f"leases/{seeded.leases[0]}", f"queue/{request}"):
                    page.goto(f"{seeded.console}/{path}")
                    page.get_by_role("heading", level=1).wait_for()
                    page.wait_for_function("() => !document.querySelector('.loading')")
                    width = page.evaluate("document.documentElement.scrollWidth")
                    if width > size["width"]:
                        wide[path] = width
        assert not wide


def test_a_chosen_theme_stays_after_a_reload(page: Any, console_server: Seeded) -> None:
    page.goto(console_server.console)
    page.get_by_label("Theme").select_option("dark")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.reload()
    page.get_by_role("heading", level=1).wait_for()
    assert page.evaluate(ground) == dark
    page.get_by_label("Theme").select_option("light")
    assert page.evaluate(ground) != dark


def test_no_view_scrolls_sideways_on_a_phone(chromium: Any, console_server: Seeded) -> None:
    wide = {}
    with open_page(chromium) as page:
        page.set_viewport_size(PHONE)
        for path in (*VIEWS, f"leases/{console_server.leases[0]}", f"why/{console_server.refused}"):
            page.goto(f"{console_server.console}/{path}")
            page.get_by_role("heading", level=1).wait_for()
            page.wait_for_function("() => !document.querySelector('.loading')")
            if (width := page.evaluate("document.documentElement.scrollWidth")) > PHONE["width"]:
                wide[path] = width
            head = page.locator("header").bounding_box()
            assert head["height"] < 60, path
        page.get_by_role("button", name="☰ Why").click()
        page.get_by_role("navigation").get_by_role("link", name="Queue").click()
        page.get_by_role("heading", name="Queue", level=1).wait_for()
    assert not wide

"""Tests of a page whose server stops, stalls or wants a login, and of its security policy."""

from pathlib import Path
from typing import Any

import pytest
from consoles import enter, is_refusal, open_page, seed_server

from tests.ports import free_port

pytestmark = pytest.mark.heavy  # A browser, and a daemon for each way to lose it.


def test_an_open_page_recovers_from_a_restart_of_its_server(page: Any, tmp_path: Path) -> None:
    options = (f"--port={free_port()}", f"--http-port={free_port()}")
    with seed_server(tmp_path / "data", options=options) as seeded:
        seeded.fleet("east", 4)
        lease = seeded.ask(2)["lease"]["id"]
        page.goto(f"{seeded.console}/leases")
        page.get_by_role("link", name=lease).wait_for()
    stale = page.get_by_text("reconnecting")
    stale.wait_for()
    assert "as of" in stale.inner_text()
    assert page.get_by_role("link", name=lease).is_visible()
    with seed_server(tmp_path / "data", options=options) as seeded:
        page.get_by_text("live", exact=True).wait_for()
        added = seeded.ask(1)["lease"]["id"]
        page.get_by_role("button", name="1 new").click()
        page.get_by_role("link", name=added).wait_for()
        assert page.get_by_role("link", name=lease).is_visible()


def test_a_login_shows_the_data_of_its_tenant(chromium: Any) -> None:
    with seed_server(MOORAGE_TOKENS="ann:a-key") as seeded, open_page(chromium) as page:
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        seeded.fleet("east", 2)
        lease = seeded.ask(1)["lease"]["id"]
        enter(page, f"{seeded.console}/leases/{lease}", "no-key")
        page.get_by_role("heading", name="Log in to Moorage").wait_for()
        page.get_by_role("alert").wait_for()
        page.get_by_label("Token").fill("a-key")
        page.keyboard.press("Enter")
        page.get_by_role("complementary", name=f"Lease {lease}").wait_for()
        assert not any("a-key" in url for url in urls)
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Log out").click()
        page.get_by_role("heading", name="Log in to Moorage").wait_for()


def test_the_content_security_policy_of_the_page_forbids_foreign_scripts(
    chromium: Any, console_server: Any
) -> None:
    """Without this test, a test that reports no violation of the policy would prove nothing."""
    context = chromium.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if is_refusal(said) else None)
    page.goto(console_server.console)
    page.get_by_role("heading", level=1).wait_for()
    assert wrong == []
    page.evaluate(
        "() => document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.stranger = 1'}))"
    )
    page.evaluate("() => new Promise(done => setTimeout(done, 100))")
    assert page.evaluate("window.stranger") is None
    assert len(wrong) == 1
    context.close()

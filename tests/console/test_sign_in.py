"""Signing in to the console at an issuer of another site, in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from consoles import open_page

from moorage.testing.daemon_process import daemon
from tests.oidc_provider import provider

pytestmark = pytest.mark.heavy  # A browser.


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a console, under a name of another site than the issuer's."""
    folder: Path = tmp_path_factory.mktemp("issuer")
    with provider(folder) as issuer:
        environment = {
            "MOORAGE_OIDC_ISSUER": issuer.issuer,
            "MOORAGE_OIDC_AUDIENCE": "moorage",
            "MOORAGE_OIDC_CLIENT_ID": "moorage",
        }
        with daemon(environment=environment) as running:
            yield running.http.replace("127.0.0.1", "localhost") + "/console"


def sign_in(page: Any, console: str, person: str) -> None:
    page.goto(console)
    page.get_by_role("link", name="Sign in").click()
    page.get_by_placeholder("Enter any login").fill(person)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button").click()
    page.get_by_role("button").click()


def test_a_person_signs_in_at_the_issuer_and_gets_only_a_cookie(
    chromium: Any, console: str
) -> None:
    with open_page(chromium) as page:
        sign_in(page, console, "team.operator")
        page.get_by_role("heading", name="Overview", level=1).wait_for()
        session = page.evaluate("async () => (await (await fetch('/console/session')).json()).data")
        assert (session["tenant"], session["role"]) == ("team", "operator")
        cookies = {each["name"].rpartition("-")[0]: each for each in page.context.cookies(console)}
        assert cookies["moorage-console"]["httpOnly"]
        assert cookies["moorage-console"]["sameSite"] == "Strict"
        assert "moorage-sign-in" not in cookies
        page.goto(f"{console}/operations")
        page.get_by_role("heading", name="Operations", level=1).wait_for()


def test_a_person_without_a_role_or_with_a_forged_callback_is_refused(
    chromium: Any, console: str
) -> None:
    with open_page(chromium) as page:
        sign_in(page, console, "team.king")
        page.get_by_text("Your sign-in was refused").wait_for()
        assert page.get_by_role("link", name="Sign in").is_visible()
        page.goto(f"{console}/sign-in/callback?state=forged&code=stolen")
        page.get_by_text("Your sign-in was refused").wait_for()
        assert page.evaluate("async () => (await fetch('/console/session')).status") == 401

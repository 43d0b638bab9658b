"""A person signs in to the console at an issuer of another site, in a real browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from consoles import open_page

from moorage.testing.daemon_process import Running, daemon
from tests.oidc_provider import provider

pytestmark = pytest.mark.heavy  # A browser.


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running server that accepts tokens of an issuer."""
    folder: Path = tmp_path_factory.mktemp("issuer")
    with provider(folder) as issuer:
        environment = {
            "MOORAGE_OIDC_ISSUER": issuer.issuer,
            "MOORAGE_OIDC_AUDIENCE": "moorage",
            "MOORAGE_OIDC_CLIENT_ID": "moorage",
        }
        with daemon(environment=environment) as running:
            yield running


@pytest.fixture(scope="module")
def console(running: Running) -> str:
    """The address of the console, by a host name of another site than the issuer's."""
    return running.http.replace("127.0.0.1", "localhost") + "/console"


def sign_in(page: Any, console: str, person: str) -> None:
    page.goto(console)
    page.get_by_role("link", name="Sign in").click()
    fill_in(page, person)


def fill_in(page: Any, person: str) -> None:
    page.get_by_placeholder("Enter any login").fill(person)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


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


def come_back(page: Any) -> None:
    """Act as if the page's tab were shown again; a browser without a screen hides no tab."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_a_page_whose_login_ends_offers_to_sign_in_and_then_shows_its_view_again(
    chromium: Any, console: str
) -> None:
    with open_page(chromium) as page:
        sign_in(page, console, "team.viewer")
        page.get_by_role("heading", name="Overview", level=1).wait_for()
        page.goto(f"{console}/leases?sort=end")
        page.get_by_role("heading", name="Leases", level=1).wait_for()
        other = page.context.new_page()
        other.goto(console)
        other.get_by_role("button", name="Log out").click()
        other.get_by_role("button", name="No").click()
        page.get_by_role("link", name="Sign in").click()
        page.get_by_role("button").click()  # The issuer's session still exists.
        page.get_by_role("heading", name="Leases", level=1).wait_for()
        assert page.url == f"{console}/leases?sort=end"
        other.get_by_role("link", name="Sign in").wait_for()
        come_back(other)
        other.get_by_role("heading", name="Overview", level=1).wait_for()


def log_out(page: Any) -> dict[str, list[str]]:
    """Log out of the console and at the issuer; return the query of the page at the issuer."""
    page.get_by_role("button", name="Log out").click()
    agree = page.get_by_role("button", name="Yes")
    agree.wait_for()
    query = parse_qs(urlsplit(page.url).query)
    agree.click()
    return query


def test_a_logout_ends_the_login_at_the_issuer(chromium: Any, console: str) -> None:
    with open_page(chromium) as page:
        sign_in(page, console, "team.viewer")
        page.get_by_role("heading", name="Overview", level=1).wait_for()
        query = log_out(page)
        page.get_by_text("You are logged out").wait_for()
        assert query.pop("state")
        back = f"{console}/sign-in/callback"  # This server may accept the ID token, so it stays.
        assert query == {"client_id": ["moorage"], "post_logout_redirect_uri": [back]}
        assert page.evaluate("async () => (await fetch('/console/session')).status") == 401
        assert not page.context.cookies(f"{console}/sign-in")
        page.get_by_role("link", name="Sign in").click()
        page.get_by_placeholder("Enter any login").wait_for()  # The issuer knows no one.
        page.goto(f"{console}/sign-in/callback?state=forged")
        page.get_by_role("link", name="Sign in").wait_for()
        assert not page.get_by_role("alert").is_visible()


@contextmanager
def served(folder: Path, audience: str, **variables: str) -> Iterator[str]:
    """The address of the console of a server that has a separate issuer."""
    with provider(folder, AUDIENCE=audience, **variables) as issuer:
        environment = {
            "MOORAGE_OIDC_ISSUER": issuer.issuer,
            "MOORAGE_OIDC_AUDIENCE": audience,
            "MOORAGE_OIDC_CLIENT_ID": "moorage",
        }
        with daemon(environment=environment) as running:
            yield running.http.replace("127.0.0.1", "localhost") + "/console"


def test_a_logout_at_the_issuer_sends_an_id_token_that_gives_no_access(
    chromium: Any, tmp_path: Path
) -> None:
    with served(tmp_path, "lab") as console, open_page(chromium) as page:
        sign_in(page, console, "team.viewer")
        page.get_by_role("heading", name="Overview", level=1).wait_for()
        (hint,) = log_out(page)["id_token_hint"]
        page.get_by_text("You are logged out").wait_for()
        sent = {"Authorization": f"Bearer {hint}"}
        ask = "async (headers) => (await fetch('/policy', {headers})).status"
        assert page.evaluate(ask, sent) == 401


def test_without_an_issuers_logout_address_a_logout_ends_only_the_login_to_the_console(
    chromium: Any, tmp_path: Path
) -> None:
    with served(tmp_path, "lab", LOGOUT="off") as console, open_page(chromium) as page:
        sign_in(page, console, "team.viewer")
        page.get_by_role("heading", name="Overview", level=1).wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_role("link", name="Sign in").wait_for()
        assert page.url == console


def test_two_tabs_can_sign_in_at_the_same_time(chromium: Any, console: str) -> None:
    with open_page(chromium) as page:
        tabs = page, page.context.new_page()
        for each in tabs:
            each.goto(f"{console}/policies")
            each.get_by_role("link", name="Sign in").click()
            each.get_by_placeholder("Enter any login").wait_for()
        for each, person in zip(tabs, ("team.client", "team.author"), strict=True):
            fill_in(each, person)
            each.get_by_role("heading", name="Policies", level=1).wait_for()
        come_back(page)  # Now both tabs have the second tab's login.
        page.locator(".who", has_text="author").wait_for()
        cookies = [each["name"] for each in page.context.cookies(f"{console}/sign-in")]
        assert not any("moorage-sign-in" in each for each in cookies)


def test_the_log_says_why_a_sign_in_failed(chromium: Any, console: str, running: Running) -> None:
    with open_page(chromium) as page:
        page.goto(console)
        page.get_by_role("link", name="Sign in").click()
        page.get_by_role("link", name="Cancel").click()
        page.get_by_text("Your sign-in was refused").wait_for()
        assert "the issuer answers access_denied" in running.log.read_text()
        page.goto(f"{console}/sign-in/callback?state=forged&code=stolen")
        page.get_by_text("Your sign-in was refused").wait_for()
        assert "this browser did not begin the sign-in" in running.log.read_text()


def test_the_sign_in_page_says_that_the_issuer_is_silent(chromium: Any) -> None:
    environment = {
        "MOORAGE_OIDC_ISSUER": "http://127.0.0.1:1",
        "MOORAGE_OIDC_AUDIENCE": "moorage",
        "MOORAGE_OIDC_CLIENT_ID": "moorage",
    }
    with daemon(environment=environment) as running, open_page(chromium) as page:
        page.goto(f"{running.http}/console")
        page.get_by_role("link", name="Sign in").click()
        page.get_by_text("the issuer does not answer").wait_for()
        assert page.get_by_label("Token").is_visible()

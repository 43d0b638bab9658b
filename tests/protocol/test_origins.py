"""Tests of the check of origins of HTTP requests at both ports and at served pools."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moorage.protocol.origins import Origins, read_origin

HERE = "127.0.0.1"
OURS = Origins(
    hosts=("0.0.0.0", "Moorage.Example", "fd00::7"),  # noqa: S104  # Nothing listens here.
    origins=("https://console.example", "HTTP://tools.example:3000"),
    pages_port=8080,
)


def answer(origins=OURS, here=HERE, target="/", host="localhost:8765", **headers):
    """Return the header that caused the refusal of a request, or an empty text."""
    rows = [(name.replace("_", "-"), value) for name, value in headers.items()]
    found = origins.refusal(target, [("host", host), *rows], here)
    return "" if found is None else found.header


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8765",
        "localhost.",
        "localhost.:80",
        "localhost:",
        "127.0.0.1:8765",
        "127.8.9.1",
        "[::1]:8765",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]:8765",
        "0.0.0.0:8765",
        "moorage.example",
        "MOORAGE.example.:443",
        "[FD00:0::7]",
    ],
)
def test_requests_to_the_servers_own_names_are_answered(host):
    assert answer(host=host) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.localhost",
        "a@localhost",
        "localhost:8765@evil.example",
        "localhost:80:80",
        "localhost:eighty",
        "localhost evil.example",
        "localhost,evil.example",
        "localhost..",
        "localhost/",
        "10.0.0.7",
        "[fd00::8]",
        "[::1",
        "::1",
        "[localhost]",
        "127.1",
        "2130706433",
        "ⓛocalhost",
        "",
    ],
)
def test_requests_to_other_names_are_refused(host):
    assert answer(host=host) == "host"


def test_the_address_that_received_a_request_is_a_valid_host_name_for_the_request():
    for here, host in (
        ("10.0.0.7", "10.0.0.7:8080"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "[fe80::1]:8080"),
    ):
        assert answer(here=here, host=host) == ""
        assert answer(here="10.0.0.8", host=host) == "host"


def test_each_host_header_of_a_request_and_the_target_are_checked():
    assert answer(target="http://localhost:8080/x?y=//evil.example") == ""
    assert answer(target="//evil.example/") == ""  # Not a URL, but a path.
    assert answer(target="/?at=http://evil.example") == ""
    for target in ("http://evil.example", "HTTP://evil.example/x", "ws://evil.example?localhost"):
        assert answer(target=target) == "host"
    both = [("host", "localhost"), ("host", "evil.example")]
    for rows in (both, both[::-1]):
        found = OURS.refusal("/", rows, HERE)
        assert found is not None
        assert found.header == "host"
    assert OURS.refusal("/", [], HERE) is None  # HTTP/1.0, so not from a browser.


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8765", "localhost:8765"),  # The same host, at any port.
        ("http://localhost:9999", "LOCALHOST.:9999"),
        ("http://127.0.0.1", "127.0.0.1"),
        ("https://moorage.example", "moorage.example"),  # Through a proxy that ends TLS.
        ("https://moorage.example", "moorage.example:443"),
        ("http://[::1]:8765", "[::1]:8765"),
        ("http://localhost:8080", "localhost:8765"),  # A page of our other port.
        ("http://127.0.0.1:8080", "localhost:8765"),
        ("http://[::1]:8080", "localhost:8765"),
        ("http://moorage.example:8080", "moorage.example:8765"),
        ("https://console.example", "localhost:8765"),  # A configured origin.
        ("https://CONSOLE.example:443", "localhost:8765"),
        ("http://tools.example:3000", "localhost:8765"),
    ],
)
def test_pages_of_the_server_and_of_configured_sites_are_accepted(origin, host):
    assert answer(origin=origin, host=host) == ""
    assert answer(origin=origin, host=host, sec_fetch_site="cross-site") == ""


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "https://evil.example",
        "http://evil.example:8080",
        "http://localhost.evil.example:8080",
        "http://localhost:3000",  # Another server on this machine.
        "http://localhost",
        "http://console.example",  # Another scheme than the configured one.
        "https://console.example:8443",
        "https://console.example.",
        "https://tools.example:3000",
        "https://console.example https://evil.example",
        "https://console.example/",
        "https://a@localhost:8765",
        "file://localhost:8765",
        "chrome-extension://localhost:8765",
        "localhost:8765",
        "//localhost:8765",
    ],
)
def test_pages_of_other_sites_are_refused(origin):
    expected = "" if origin == "https://console.example." else "origin"  # The same name.
    assert answer(origin=origin) == expected
    assert answer(origin=origin, sec_fetch_site="same-origin") == expected


def test_a_request_with_two_origins_of_which_one_is_foreign_is_refused():
    rows = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "null")]
    assert OURS.refusal("/", rows, HERE) is not None


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("none", ""),
        ("same-origin", ""),
        ("same-site", "sec-fetch-site"),
        ("cross-site", "sec-fetch-site"),
        ("", "sec-fetch-site"),
        ("new-in-some-year", "sec-fetch-site"),
    ],
)
def test_for_a_request_without_an_origin_sec_fetch_site_decides(site, expected):
    assert answer(sec_fetch_site=site) == expected


def test_the_refusal_of_a_page_names_the_origin_and_the_remedy():
    found = OURS.refusal("/", [("host", "evil.example")], HERE)
    assert found is not None
    assert "'evil.example'" in found.reason
    assert found.advice == f"{found.reason}; setting `allowed_hosts` allows it"
    found = OURS.refusal("/", [("host", "localhost"), ("origin", "null")], HERE)
    assert found is not None
    assert found.advice == found.reason  # No setting admits a hidden origin.


@given(st.text(), st.text())
@example("[", "http://[")
@example("[::1%]", "http://[::%]:99999")
def test_any_text_in_the_headers_is_accepted_or_refused_without_an_error(host, origin):
    answer(host=host, origin=origin, target=host)
    read_origin(origin)


@given(st.from_regex(r"[a-z0-9.-]{1,30}\.[a-z]{2,9}", fullmatch=True))
def test_without_settings_no_name_with_a_domain_is_accepted(name):
    assert answer(Origins(), host=name) == "host"
    assert answer(Origins(), origin=f"http://{name}:8765") == "origin"

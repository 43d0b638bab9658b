"""The console in a real browser, Debian's Chromium, with real daemons that tests fill by API."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # Lets the tests here import `consoles`.

from consoles import Seeded, open_page, seed_server

from tests.chromium import running_chromium


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """A browser, closed after this package: while it is open, no test can start an event loop."""
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page in the browser; a script error or a breach of its security policy fails the test."""
    with open_page(chromium) as each:
        yield each


@pytest.fixture(scope="module")
def console_server() -> Iterator[Seeded]:
    """A daemon with two clusters, some leases, a refusal, and an alias of two versions."""
    with seed_server() as seeded:
        seeded.fleet("east", 24, model="A100")
        seeded.fleet("west", 16, model="H100")
        for n in range(12):
            seeded.ask(n % 4 + 1)
        seeded.refused = seeded.ask(9)["request"]
        seeded.second_version()
        for version in ("1.0", "1.1"):
            chosen = {"policy_rule_uri": f"first_fit:{version}-stable"}
            seeded.http.post("/policy-alias/first_fit:stable/activate", json=chosen)
        yield seeded

"""Debian's Chromium without a window, driven by Playwright."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

_PROGRAMS: Final = ("chromium-headless-shell", "chromium")
"""Programs in order of preference: the first one needs a quarter less CPU time."""
_FLAGS: Final = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    "--host-resolver-rules=MAP *.example 127.0.0.1",
)


@contextmanager
def running_chromium(flags: Sequence[str] = ()) -> Iterator[Any]:
    """Run a browser until the block ends, or skip the test if there is none."""
    path = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if path is None:
        pytest.skip(f"no Chromium is here; on Debian: apt-get install {_PROGRAMS[0]}")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives chromium, is not installed"
    )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*_FLAGS, *flags])
        yield browser
        browser.close()

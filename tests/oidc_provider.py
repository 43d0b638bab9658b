"""Runs npm's `oidc-provider` on loopback, and plays a person who signs in there by browser.

npm installs it once, into a folder where tests cache such programs.
"""

import contextlib
import fcntl
import html
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

_SOURCE: Final = Path(__file__).with_suffix(".mjs")
_PACKAGE: Final = "oidc-provider@9.13.3"
_INSTALL: Final = ("npm", "install", "--no-audit", "--no-fund", "--loglevel=error", _PACKAGE)
_READY_SECONDS_MAX: Final = 120.0


class Provider:
    """The running issuer.

    Args:
        process: The issuer's process.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.issuer: str = self._read_line()["issuer"]

    def token(self, role: str, tenant: str = "research") -> str:
        """Return the access token of a program."""
        answer = httpx.post(
            f"{self.issuer}/token",
            data={"grant_type": "client_credentials"},
            auth=(f"{tenant}.{role}", "s3cret"),
        )
        return str(answer.raise_for_status().json()["access_token"])

    def rotate(self) -> None:
        """Sign with a new key; only the previous key is published beside it."""
        self._process.send_signal(signal.SIGHUP)
        assert "signs" in self._read_line()

    def stop(self) -> None:
        """Have the issuer accept connections but answer no request, until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have the issuer answer requests again."""
        self._process.send_signal(signal.SIGCONT)

    def confirm(self, url: str, person: str) -> None:
        """Open the page for a device code, sign in there and agree."""
        with httpx.Client(follow_redirects=True, timeout=30) as browser:
            page = browser.get(url)
            for more in ({}, {"confirm": "yes"}, {"login": person, "password": "any"}, {}):
                page = _submit(browser, page, more)
        assert "successful" in page.text, page.text

    def refuse(self, url: str) -> None:
        """Open the page for a device code, and refuse it."""
        with httpx.Client(follow_redirects=True, timeout=30) as browser:
            page = browser.get(url)
            for more in ({}, {"abort": "yes"}):
                page = _submit(browser, page, more)

    def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(_READY_SECONDS_MAX, self._process.kill)
        late.start()
        try:
            lines = iter(self._process.stdout.readline, "")
            said: dict[str, Any] = json.loads(next(each for each in lines if each[0] == "{"))
        finally:
            late.cancel()
        return said


@contextlib.contextmanager
def provider(folder: Path, **variables: str) -> Iterator[Provider]:
    """Run an OpenID Connect issuer until the block ends."""
    program = folder / _SOURCE.name
    program.write_bytes(_SOURCE.read_bytes())
    (folder / "node_modules").symlink_to(_install() / "node_modules")
    with (folder / "stderr.log").open("w") as log:
        process = subprocess.Popen(
            ["node", program],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **variables},
        )
    try:
        yield Provider(process)
    finally:
        process.kill()
        process.communicate()


def _install() -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node here: apt-get install nodejs npm")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home, "moorage-tests", _PACKAGE)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another run of the tests may be installing it.
        if not (folder / "installed").exists():
            subprocess.run(_INSTALL, cwd=folder, check=True, timeout=300)
            (folder / "installed").touch()
    return folder


def _submit(browser: httpx.Client, page: httpx.Response, more: dict[str, str]) -> httpx.Response:
    """Submit the form on a page; return the next page."""
    form = re.search(r'action="([^"]+)"', page.text)
    assert form is not None, page.text
    fields = dict(re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', page.text))
    return browser.post(page.url.join(html.unescape(form[1])), data={**fields, **more})

"""How to install an extra, by what pip noted of the installation."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from moorage import extras


def test_a_checkout_that_is_gone_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path.as_uri()
    noted = SimpleNamespace(read_text=lambda _: json.dumps({"url": url}))
    monkeypatch.setattr(extras, "distribution", lambda _: noted)
    assert extras.install_command("ray") == f"pip install '{tmp_path}[ray]'"
    tmp_path.rmdir()  # As in an image, which has no checkout any more.
    assert extras.install_command("ray") == "pip install 'moorage[ray]'"

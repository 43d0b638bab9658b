"""Tests of the caretaker, which ends workloads that a dead program left on a remote backend."""

import os
import subprocess
from pathlib import Path

import pytest

from moorage.launch import command
from moorage.resources.caretaker import BEGUN, NOTHING


@pytest.mark.heavy
@pytest.mark.ray
def test_an_idle_caretaker_connects_to_no_cluster(tmp_path: Path):
    """No Ray runs at the address, so a caretaker that connects would exceed the time limit."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    root = tmp_path / "root"
    root.mkdir()
    (root / "driver.log").touch()
    subprocess.run(
        command("moorage.resources.caretaker", "ray", os.fspath(root)),
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        input=BEGUN + NOTHING,
        timeout=60,
        check=True,
    )
    assert not root.exists()

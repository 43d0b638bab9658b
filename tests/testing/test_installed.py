"""The fixture `moorage_server` works in another project's tests with the installed wheel."""

import os
import subprocess
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

TESTS = """
import sys

import moorage
import pytest
from moorage.testing import fake_cluster
from moorage_client import BlockingClient, RequestRefused

TERMS = {"lease": {"ttl_seconds": 60}}


@pytest.fixture
def moorage_fleet():
    return [fake_cluster("mine", nodes=1, gpus=1)]


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_has_a_fleet_of_its_own(moorage_server, turn):
    assert moorage.__file__.startswith(sys.prefix)
    with BlockingClient(moorage_server.ws) as client:
        granted = client.ask("first_fit:1.0-stable", resources={"gpus": 1}, **TERMS)
        assert granted.lease.placement[0].node_id == "mine-1"
        with pytest.raises(RequestRefused, match="."):
            client.ask("first_fit:1.0-stable", resources={"gpus": 1}, **TERMS)
"""


def test_the_fixture_works_with_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # The wheel's requirements are installed already: installing them would need a network.
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    places = {str(each.locate_file("")) for each in distributions() if each.name != "moorage"}
    (packages / "dependencies.pth").write_text("\n".join(sorted(places)))
    install = [python, "-m", "pip", "install", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)

    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conftest.py").write_text('pytest_plugins = ["moorage.testing.plugin"]\n')
    (folder / "test_mine.py").write_text(TESTS)
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout

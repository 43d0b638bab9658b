"""A real daemon per test file: `moored serve` as a child process, with sockets and a jail."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.testing.daemon_process import daemon

sys.path.insert(0, str(Path(__file__).parent))  # Lets the tests of this package import `served`.
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))  # And `aws_world`.
sys.path.insert(0, str(Path(__file__).parents[1] / "web"))  # And `interface`.
sys.path.insert(0, str(Path(__file__).parents[1] / "kubernetes"))  # And `kubernetes_plane`.

from fleets import Fleet
from served import Server, cluster

# Stop hanging policies soon; the default leaves time for long searches.
os.environ.setdefault("MOORAGE_POLICY_DEADLINE_SECONDS", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A daemon with two clusters of eight A100s each and the shipped first_fit."""
    with daemon() as running:
        server = Server(running)
        server.fill(cluster("east"), cluster("west", model="H100"))
        yield server
        assert running.log.read_text() == "", "the daemon logged a warning or an error"
        server.close()


@pytest.fixture(autouse=True)
def _end_leases(request) -> Iterator[None]:
    """End every lease that a test leaves behind on the shared daemon."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for lease in server.leases:
            server.release(lease)
        server.leases = []


@pytest.fixture
def fleet(shared_fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    """A separate cluster for each test, on the server that the tests of a file share."""
    with shared_fleet.apart(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a small disk for one test."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if os.getuid() != 0 or mount is None:
        pytest.skip("only root can make a small disk")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=56m", "none", str(place)],
        check=False,
        capture_output=True,
    )
    if done.returncode != 0:
        pytest.skip("only root can make a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # Workloads may still be ending.

"""A pool neither uses nor harms files that other users planted in its folder."""

import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from moorage_client import ConnectionFailed
from moorage_client.pool import ResourcePoolAdapter
from tests.clients import pools

pytestmark = pytest.mark.heavy

NOBODY = 65_534


def environment(tmp_path: Path) -> dict[str, str]:
    """Make a folder the system's temporary folder, which pools use if XDG_RUNTIME_DIR is unset."""
    given = {n: v for n, v in os.environ.items() if not n.startswith(("MOORAGE_", "XDG_"))}
    return given | {"TMPDIR": str(tmp_path)}


def refusal(tmp_path: Path, *options: str) -> str:
    return pools.refusal("-r", "cpus=1", *options, **environment(tmp_path))


def serving(tmp_path: Path, *options: str) -> AbstractContextManager:
    return pools.serving("-r", "cpus=1", *options, **environment(tmp_path))


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / f"moorage-{os.getuid()}"


def test_the_pool_makes_and_uses_a_folder_that_only_its_user_can_enter(
    tmp_path, folder, monkeypatch
):
    with serving(tmp_path) as (address, _):
        assert address == f"uds:{folder}/pool.sock"
        assert oct(folder.stat().st_mode)[-3:] == "700"
        for name in ("MOORAGE_POOL_ADDRESS", "CANARY_RESOURCE_POOL_ADDR", "XDG_RUNTIME_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert ResourcePoolAdapter().count("cpus") == 1
        folder.chmod(0o777)
        with pytest.raises(ConnectionFailed, match="no other user may write"):
            ResourcePoolAdapter().count("cpus")


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            lambda folder: (folder.mkdir(), os.chown(folder, NOBODY, NOBODY)),
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away"),
            id="of another user",
        ),
        pytest.param(lambda folder: (folder.mkdir(), folder.chmod(0o777)), id="for everybody"),
        pytest.param(
            lambda folder: ((folder.parent / "x").mkdir(), folder.symlink_to("x")), id="a link"
        ),
    ],
)
def test_a_folder_that_another_user_may_have_made_is_not_used(tmp_path, folder, plant):
    plant(folder)
    assert f"{folder}: expected a folder of yours" in refusal(tmp_path)
    assert not (folder / "pool.sock").exists()


def test_a_link_in_place_of_the_socket_empties_no_file(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "pool.sock"
    victim.write_text("precious")
    lock = tmp_path / "pool.sock.lock"
    lock.symlink_to(victim)
    assert f"{lock}: is a link" in refusal(tmp_path, "--address", f"uds:{path}")
    assert victim.read_text() == "precious"
    lock.unlink()
    lock.write_text("notes")  # A plain file, but of the user.
    with serving(tmp_path, "--address", f"uds:{path}"):
        assert lock.read_text() == "notes"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path.write_text("precious"), id="file"),
        pytest.param(lambda path: path.mkdir(), id="folder"),
        pytest.param(lambda path: path.symlink_to(path.parent), id="link"),
        pytest.param(os.mkfifo, id="pipe"),
    ],
)
def test_the_pool_does_not_remove_a_file_that_is_not_a_socket(tmp_path, make):
    path = tmp_path / "precious"
    make(path)
    assert f"{path}: is not a socket" in refusal(tmp_path, "--address", f"uds:{path}")
    assert path.is_symlink() or path.exists()


def test_the_pool_does_not_remove_the_socket_of_another_program(tmp_path):
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        said = refusal(tmp_path, "--address", f"uds:{path}")
        assert "another program listens there" in said
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))


def test_the_pool_does_not_remove_a_file_that_has_replaced_its_socket(tmp_path):
    path = tmp_path / "pool.sock"
    with serving(tmp_path, "--address", f"uds:{path}"):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"

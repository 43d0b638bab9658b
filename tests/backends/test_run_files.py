"""Files of a run: unreadable files are named, and a folder that moves is found."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moorage.backends.local.run_files import list_files
from moorage.backends.local.workload_store import WorkloadStore

OTHER_USER = 65_534


@contextmanager
def drop_root() -> Iterator[None]:
    """Run for a while as a user without root's right to read every file."""
    before = os.getresuid()
    if before[1] == 0:
        os.setresuid(OTHER_USER, OTHER_USER, 0)
    try:
        yield
    finally:
        os.setresuid(*before)


def test_unreadable_files_are_left_out_and_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for name in ("a/file", "open", "secret", "shut/file", "z"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name, mode in (("secret", 0), ("shut", 0), ("open", 0o644), ("a", 0o444)):
        (tmp_path / name).chmod(mode)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with drop_root():
        found = list_files(folder)
    os.close(folder)
    for name in ("shut", "a"):
        (tmp_path / name).chmod(0o755)
    assert found.files == (("open", 1), ("z", 1))
    denied = "it cannot be read: Permission denied"
    assert found.left_out == (("a/file", denied), ("secret", "it cannot be read"), ("shut", denied))


def test_a_folder_that_moves_during_the_search_is_found(tmp_path: Path) -> None:
    store = WorkloadStore(tmp_path)
    running, ended = tmp_path / "running" / "w", tmp_path / "ended" / "w@1"
    (running / "work").mkdir(parents=True)
    (running / "order.json").write_text("{}")
    done = threading.Event()

    def move() -> None:
        while not done.is_set():
            running.rename(ended)
            ended.rename(running)

    moving = threading.Thread(target=move)
    moving.start()
    try:
        opened = [store.work("w", 1) for _ in range(2_000)]
    finally:
        done.set()
        moving.join()
    for each in filter(None, opened):
        os.close(each)
    assert any(opened)

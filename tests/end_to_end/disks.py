"""Fills the disks of tests."""

import contextlib
from pathlib import Path


def fill(filler: Path) -> None:
    """Write a file until the disk of a folder is full."""
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)

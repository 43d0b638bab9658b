"""Makes small disks in memory, which tests can fill. Only root can make a disk."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PIECE: Final = bytes(1 << 20)


@contextlib.contextmanager
def small_disk(place: Path, mebibytes: int) -> Iterator[None]:
    """Mount a small disk on an empty folder until the block ends.

    Raises:
        CalledProcessError: The caller is not root.
    """
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700"]
    subprocess.run(["mount", *options, "none", str(place)], check=True, capture_output=True)  # noqa: S603, S607  # The machine's own.
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)  # noqa: S603, S607  # As above.


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[None]:
    """Fill a disk until the block ends."""
    filler = place / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(PIECE)
        yield
    finally:
        filler.unlink()

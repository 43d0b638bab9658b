"""The Debian below the image of the Dockerfile: `debootstrap` makes it, once per machine.

`.ci/run` has it made ahead, beside the fast tests.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moorage-tests"
MAKE_SECONDS_MAX: Final = 900


def debian_base() -> Path:
    """Return an archive of a Debian with Python; make it if it is missing."""
    archive = CACHE / "debian" / "bookworm-python.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        folder = archive.with_suffix(f".{os.getpid()}")
        packages = "python3,python3-venv,python-is-python3,ca-certificates"
        make = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder]
        try:
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=MAKE_SECONDS_MAX)
            packed = folder.with_suffix(".packed")
            subprocess.run(["tar", "-C", folder, "-cf", packed, "."], check=True)
            packed.rename(archive)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return archive


if __name__ == "__main__":
    print(debian_base())

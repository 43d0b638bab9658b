"""A separate Podman for tests, with a store of images that is made once per machine.

The store has Debian with Python, made by `debootstrap`, and on top of it all that the Dockerfile
installs before it copies a source file. The tests build the rest. `.ci/run` makes the store early,
beside the fast tests: `python tests/end_to_end/image_store.py`.
"""

import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moorage-tests"
BASE: Final = "localhost/moorage-base:bookworm"
PACKAGES: Final = "python3,python3-venv,python-is-python3,ca-certificates"
MAKE_SECONDS_MAX: Final = 900
UNUSED_SECONDS_MAX: Final = 86_400
"""Seconds without use after which a store of another Dockerfile is removed."""
_BOUNDS: Final = ((resource.RLIMIT_NOFILE, 1024), (resource.RLIMIT_NPROC, 500))


class Podman:
    """Podman with all its data in separate folders.

    Args:
        images: Folder of its images.
        running: Folder of its state; Podman allows a path of 50 characters.
        store: Folder of further images, which it never changes.
    """

    def __init__(self, images: Path, running: Path, store: Path | None = None) -> None:
        own = ["--root", str(images), "--runroot", str(running)]
        how = ["--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file"]
        below = ["--storage-opt", f"overlay.imagestore={store}"] if store else []
        self._command = ["podman", *own, *how, *below]
        files, tasks = (min(bound, *resource.getrlimit(each)) for each, bound in _BOUNDS)
        self.bounds = f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={tasks}:{tasks}"

    def run(self, *words: str | Path, fails: bool = False) -> str:
        """Run a command to its end; return its stdout and stderr."""
        done = subprocess.run(
            [*self._command, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MAKE_SECONDS_MAX,
            check=False,
        )
        assert bool(done.returncode) is fails, done.stdout
        return done.stdout

    def build(self, context: Path, image: str, target: str) -> str:
        """Build a target of the Dockerfile in a folder; return the output of the build."""
        installs = [  # Downloads inside use this machine's proxy settings.
            f"--volume={each}:{each}:ro"
            for each in ("/etc/ssl/certs", "/etc/pip.conf")
            if Path(each).exists()
        ]
        how = ("--format=docker", "--network=host", *self.bounds, *installs)
        what = ("--build-arg", f"BASE={BASE}", "--target", target, "-t", image)
        return self.run("build", *how, *what, context)


def image_store() -> Path:
    """Return the folder of a store with what the Dockerfile installs; make it if it is missing."""
    stores = CACHE / "images"
    stores.mkdir(parents=True, exist_ok=True)
    store = stores / _key()
    with (CACHE / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another test run may be making the store.
        if not store.exists():
            _make_store(store)
        os.utime(store)
        for each in stores.iterdir():
            if each.stat().st_mtime < time.time() - UNUSED_SECONDS_MAX:
                shutil.rmtree(each)
    return store


def _key() -> str:
    """Return a digest of everything that determines the store's content."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["dependencies"], project["optional-dependencies"]
    content = [(ROOT / "Dockerfile").read_text(), json.dumps(needs), PACKAGES]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:12]


def _make_store(store: Path) -> None:
    unfinished = store.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="pod-", dir="/tmp") as folder:
        context = Path(folder, "context")
        context.mkdir()
        for name in ("Dockerfile", "pyproject.toml"):
            shutil.copy(ROOT / name, context)
        podman = Podman(unfinished, Path(folder, "run"))
        podman.run("import", _debian(), BASE)
        podman.build(context, "localhost/moorage-dependencies", "dependencies")
    unfinished.rename(store)


def _debian() -> Path:
    """Return an archive of a Debian with Python; make it if it is missing."""
    archive = CACHE / "debian" / "bookworm-python.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        folder = archive.with_suffix(f".{os.getpid()}")
        make = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder]
        try:
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=MAKE_SECONDS_MAX)
            packed = folder.with_suffix(".packed")
            downloads = ["--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*"]
            subprocess.run(["tar", "-C", folder, *downloads, "-cf", packed, "."], check=True)
            packed.rename(archive)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return archive


if __name__ == "__main__":
    print(image_store())

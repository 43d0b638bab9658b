"""The programs of a Kubernetes control plane, built once per machine from `tools/*/go.mod`.

The fixtures build missing programs; `python tests/kubernetes/kubernetes_binaries.py` builds all of
them before the tests. A program in the folder that `KUBEBUILDER_ASSETS` names is taken as it is.
All others are built with Go into `$XDG_CACHE_HOME/moorage-tests`. The first build downloads 0.3 GB
and takes some six minutes on two cores; with Go's own caches, the next build takes seconds.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOOLS: Final = Path(__file__).parent / "tools"
BUILD_SECONDS_MAX: Final = 2400
"""Longest time to build all programs, also on a busy machine."""

KUBERNETES: Final = "1.34.4"
_MAJOR, _MINOR, _ = KUBERNETES.split(".")
_VERSION: Final = "-X k8s.io/component-base/version.git"
_LINKING: Final = (
    f"-s -w {_VERSION}Version=v{KUBERNETES} {_VERSION}Major={_MAJOR} {_VERSION}Minor={_MINOR}"
)


@dataclass(frozen=True)
class Program:
    """A program to build: its Go package, and the folder of `tools` whose go.mod sets versions."""

    module: str
    package: str


PROGRAMS: Final = {
    "etcd": Program("etcd", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-controller-manager": Program(
        "kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"
    ),
    "kube-scheduler": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kwok": Program("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "kubectl": Program("kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    "helm": Program("helm", "helm.sh/helm/v3/cmd/helm"),
    "kueue": Program("kueue", "sigs.k8s.io/kueue/test/performance/scheduler/minimalkueue"),
}
CONTROL_PLANE: Final = tuple(name for name in PROGRAMS if name not in {"kubectl", "helm", "kueue"})
FOR_TESTS: Final = tuple(name for name in PROGRAMS if name != "kueue")
"""All programs except those that only `python -m benchmarks.peers` runs: see `make kueue`."""
_LIMITS: Final = {"QPS = 50": "QPS = 10_000", "Burst = 100": "Burst = 10_000"}
"""Rate limits of Kueue's client, equal to kube-scheduler's in the benchmark; no flag sets them."""


class BinariesError(Exception):
    """A program is missing and cannot be built; the message gives the reason and a remedy."""


def binaries(*names: str) -> dict[str, Path]:
    """Return the paths of the programs; missing ones are built first.

    Raises:
        BinariesError: A program is missing, and Go is missing, too, or could not build it.
    """
    found = {name: _find_given(name) or _find_built(name) for name in names or CONTROL_PLANE}
    missing = [name for name, path in found.items() if not path.exists()]
    if missing:
        _build(missing)
    return found


def _find_given(name: str) -> Path | None:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(folder, name) if folder else None
    return path if path and path.exists() else None


def _find_built(name: str) -> Path:
    """Return the path of a program that was built from the present go.mod."""
    program = PROGRAMS[name]
    files = [TOOLS / program.module / each for each in ("go.mod", "go.sum")]
    content = b"\0".join([*(each.read_bytes() for each in files), _LINKING.encode()])
    return _cache() / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}" / name


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "moorage-tests", "kubernetes")


def _build(missing: list[str]) -> None:
    go = shutil.which("go")
    if go is None:
        raise BinariesError(
            f"no Go here to build {', '.join(missing)}: install Go 1.24 or newer (go.dev/dl), "
            "or set KUBEBUILDER_ASSETS to a folder with these programs"
        )
    _cache().mkdir(parents=True, exist_ok=True)
    with (_cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another test run may be building them.
        for name in missing:
            if not _find_built(name).exists():
                print(f"Building {name} for tests with Kubernetes, once.", file=sys.stderr)
                _build_one(go, name)


def _build_one(go: str, name: str) -> None:
    program, target = PROGRAMS[name], _find_built(name)
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    command = ["nice", "-n", "19", go, "build", "-buildvcs=false", "-ldflags", _LINKING]
    folder, package = TOOLS / program.module, program.package
    if name == "kueue":
        folder, package = _kueue_source(go, program, target.parent), "."
    try:
        built = subprocess.run(
            [*command, "-o", unfinished, package],
            cwd=folder,
            env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BinariesError(f"building {name} took over {BUILD_SECONDS_MAX} s") from error
    if built.returncode:
        said = "\n".join(built.stderr.splitlines()[-10:])
        raise BinariesError(f"Go could not build {name}:\n{said}")
    unfinished.rename(target)


def _kueue_source(go: str, program: Program, folder: Path) -> Path:
    """Put Kueue's CRDs into a folder, with the source of its main program without rate limits."""
    listed = subprocess.run(
        [go, "mod", "download", "-json", "sigs.k8s.io/kueue"],
        cwd=TOOLS / program.module,
        env={**os.environ, "GOWORK": "off"},
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        raise BinariesError(f"Go could not download Kueue:\n{listed.stderr.decode()}")
    source = Path(json.loads(listed.stdout)["Dir"])
    crds = folder / "crds"
    crds.mkdir(exist_ok=True)
    for each in (source / "config/components/crd/bases").glob("*.yaml"):
        shutil.copyfile(each, crds / each.name)
    main = source / program.package.removeprefix("sigs.k8s.io/kueue/") / "main.go"
    text = main.read_text()
    for default, lifted in _LIMITS.items():
        if default not in text:
            raise BinariesError(f"{main} does not contain {default!r}: Kueue has changed")
        text = text.replace(default, lifted)
    made = folder / "source"
    made.mkdir(exist_ok=True)
    (made / "main.go").write_text(text)
    for each in ("go.mod", "go.sum"):
        shutil.copyfile(TOOLS / program.module / each, made / each)
    return made


if __name__ == "__main__":
    try:
        for _name, _path in binaries(*(sys.argv[1:] or FOR_TESTS)).items():
            print(f"{_name}: {_path}")
    except BinariesError as error:
        # Without Go all other tests run: those of Kubernetes are skipped with this reason.
        print(error, file=sys.stderr)

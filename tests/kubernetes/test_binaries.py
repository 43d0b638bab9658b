"""Tests use installed programs of the control plane; without Go, an error names the remedy."""

import os
import subprocess
import sys
from pathlib import Path

from kubernetes_binaries import FOR_TESTS

SCRIPT = Path(__file__).parent / "kubernetes_binaries.py"


def run(cache: Path, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Look for the programs on a machine with neither Go nor built programs."""
    variables = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(cache), **environment}
    return subprocess.run(
        [sys.executable, SCRIPT, *names], env=variables, capture_output=True, text=True, check=False
    )


def test_without_go_the_error_names_the_remedy(tmp_path: Path) -> None:
    ran = run(tmp_path, KUBEBUILDER_ASSETS="")
    assert ran.returncode == 0
    assert "no Go here to build etcd, kube-apiserver, kube-controller-manager" in ran.stderr
    assert "KUBEBUILDER_ASSETS" in ran.stderr


def test_existing_kubernetes_programs_are_used(tmp_path: Path) -> None:
    for name in FOR_TESTS:
        (tmp_path / name).touch()
    ran = run(tmp_path, KUBEBUILDER_ASSETS=str(tmp_path))
    assert ran.stdout.splitlines() == [f"{name}: {tmp_path / name}" for name in FOR_TESTS]

"""docs/how-to/ray.md: its commands and programs run, in order, on a real Ray."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ray_world import RayWorld, ray_world
from served import until

from moorage.testing.daemon_process import daemon

__all__ = ["ray_world"]

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ray.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE = ("pip ", "MOORAGE_BACKENDS=")
"""Commands that the test itself has already run."""


def test_the_page_works_as_described(ray_world: RayWorld, tmp_path: Path) -> None:
    settings = {"MOORAGE_BACKENDS": "ray,memory", "MOORAGE_RAY_ADDRESS": ray_world.address}
    with daemon(tmp_path / "data", environment=settings) as running:
        with httpx.Client(base_url=running.http) as http:
            until(lambda: http.get("/clusters/ray").status_code == 200)
        binaries = Path(sys.executable).parent
        variables = {
            **os.environ,
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "MOORAGE_URL": running.ws,
            "MOORAGE_HTTP_URL": running.http,
            "MOORAGE_STATE": str(tmp_path / "leases.json"),
            "MOORAGE_POLICY": "best_fit:1.0-stable",
            "NO_COLOR": "1",
        }

        def run(*command: str) -> str:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env=variables, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        shown, played = "", 0
        for language, text in BLOCK.findall(PAGE.read_text()):
            text = text.replace("HOST:6379", ray_world.address)
            if language == "python":
                shown = run(sys.executable, "-c", text)
            elif language == "text":
                assert same(text, shown)
            for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, wanted = example.partition("\n")
                if not command.startswith(OUTSIDE):
                    shown = run("bash", "-c", command)
                    assert same(wanted, shown), f"$ {command}\n{shown}"
            played += 1
        assert played > 8
    until(lambda: not ray_world.workloads())


def same(wanted: str, shown: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted.replace("…", "..."), shown, flags)

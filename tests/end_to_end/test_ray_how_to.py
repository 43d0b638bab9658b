"""The commands and programs of docs/how-to/ray.md run, in order, on a real Ray."""

import sys
from pathlib import Path

import httpx
import pytest
from ray_world import RayWorld, ray_world
from served import until

from moorage.testing.daemon_process import daemon
from tests.docs.conftest import Story, is_shown
from tests.docs.test_pages import blocks

__all__ = ["ray_world"]

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ray.md"


def test_the_page_about_ray_works_as_described(ray_world: RayWorld, tmp_path: Path) -> None:
    settings = {"MOORAGE_BACKENDS": "ray,memory", "MOORAGE_RAY_ADDRESS": ray_world.address}
    with daemon(tmp_path / "data", environment=settings) as running:
        with httpx.Client(base_url=running.http) as http:
            until(lambda: http.get("/clusters/ray").status_code == 200)
        story = Story(tmp_path, lambda: {"ws": running.ws, "http": running.http})
        shown, played = "", 0
        for language, text in blocks(PAGE):
            text = text.replace("HOST:6379", ray_world.address)
            if language == "python":
                shown = story.run([sys.executable, "-c", text])
            elif language == "text":
                assert is_shown(text, shown)
            else:
                story.play(language, text)
            played += 1
        assert played > 8
    until(lambda: not ray_world.workloads())

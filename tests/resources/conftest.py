"""The test setups of all backends, and an image whose command is a shell, as in distributions."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kubernetes"))

from aws_world import aws, aws_server  # After the lines above.

with contextlib.suppress(ImportError):  # Extras, which the fast tests do without.
    from kubernetes_plane import fresh_plane, plane
    from ray_world import ray_world

__all__ = ["aws", "aws_server", "fresh_plane", "plane", "ray_world"]

SHELL_IMAGE = "localhost/moorage-shell:1"


@pytest.fixture
def shell_image(container_engine: Any, container_image: str) -> str:
    made = container_engine.create_container(container_image, command=["true"])
    repository, _, tag = SHELL_IMAGE.rpartition(":")
    container_engine.commit(made["Id"], repository, tag, changes=['CMD ["/bin/sh"]'])
    container_engine.remove_container(made["Id"])
    return SHELL_IMAGE

"""Lets the conformance tests import `aws_world` and other helpers, and use their fixtures."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kubernetes"))

from aws_world import aws, aws_server  # After the lines above.
from kubernetes_plane import fresh_plane, plane

with contextlib.suppress(ImportError):  # An extra, which the fast tests do without.
    from ray_world import ray_world

__all__ = ["aws", "aws_server", "fresh_plane", "plane", "ray_world"]

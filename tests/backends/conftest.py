"""Lets the tests of this package import `aws_world` and other helpers, and use their fixtures."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from aws_world import aws, aws_server  # After the line above.

with contextlib.suppress(ImportError):  # An extra, which the fast tests do without.
    from ray_world import ray_backend, ray_world

__all__ = ["aws", "aws_server", "ray_backend", "ray_world"]

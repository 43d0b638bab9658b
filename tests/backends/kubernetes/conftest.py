"""Lets the tests of this package use a control plane, and create objects in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "kubernetes"))

from kubernetes_plane import fresh_plane, plane  # After the line above.

__all__ = ["fresh_plane", "plane"]

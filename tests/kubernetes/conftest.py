"""A real Kubernetes control plane per test file, as `kubernetes_plane` runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # Lets tests import `kubernetes_plane` and others.

from kubernetes_plane import fresh_plane, plane  # After the line above.

__all__ = ["fresh_plane", "plane"]

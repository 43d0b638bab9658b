"""Lets the tests of this package import `simulated`, the world in which the core runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

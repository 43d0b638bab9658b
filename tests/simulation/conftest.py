"""Lets the tests of this package import `simulated`, the world that they run the core against."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Lets the tests of this package import `small`, which builds small fleets."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

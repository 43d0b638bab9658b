"""Lets the tests of this package import `harbour`, which builds inventories for hypothesis."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

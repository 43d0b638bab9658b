"""Lets the tests of this package import `by_hand`, a short way to play the allocator by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

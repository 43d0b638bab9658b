"""Lets the tests of this package import `by_hand`, which drives the allocator step by step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

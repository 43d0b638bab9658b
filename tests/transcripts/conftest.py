"""Lets the tests of this package import `storyteller`, which plays transcripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

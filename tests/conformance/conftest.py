"""Lets the tests of conformance import `aws_world`, and ask for `aws`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from aws_world import aws, aws_server  # After the line above.

__all__ = ["aws", "aws_server"]

"""Lets the tests of this package import `aws_world`, and ask for `aws`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from aws_world import aws, aws_server  # After the line above.

__all__ = ["aws", "aws_server"]

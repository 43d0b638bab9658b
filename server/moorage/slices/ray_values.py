"""Names for what Ray has no types for; all of this package uses them."""

from collections.abc import Callable
from typing import Any, TypeAlias

RayValue: TypeAlias = Any
"""What Ray gives and takes without a type: actors, references, groups, arguments and results."""
UserFunction: TypeAlias = Callable[..., RayValue]
"""A function that runs on hosts."""

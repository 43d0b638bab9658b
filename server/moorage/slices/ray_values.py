"""Names of types for values of Ray, which declares no types."""

from collections.abc import Callable
from typing import Any, TypeAlias

RayValue: TypeAlias = Any
"""A value that Ray does not type: an actor, a reference, a group, an argument or a result."""
UserFunction: TypeAlias = Callable[..., RayValue]
"""A user's function that runs on hosts."""

"""JSON without a type of its own: documents of users, and rows whose fields differ.

Documents, inputs, parameters, specs and answers of policies are the user's, and stay as they came.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = Any
"""A value as JSON has it: an object, an array, a string, a number, a boolean or null."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""A JSON object."""

JsonMapping: TypeAlias = Mapping[str, JsonValue]
"""A JSON object that is read, and not changed."""

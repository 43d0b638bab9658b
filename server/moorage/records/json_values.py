"""JSON values without a record type: documents of users, and objects whose fields differ.

The server does not change users' documents, inputs, parameters and specs, nor the answers of
policies.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = Any
"""A JSON value: an object, an array, a string, a number, a boolean or null."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""A JSON object."""

JsonMapping: TypeAlias = Mapping[str, JsonValue]
"""A JSON object that must not be changed."""

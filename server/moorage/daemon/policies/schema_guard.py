"""Applies a policy's schemas for the sandbox's host; see `sandbox.host.contract.Guard`.

`daemon.policies.finder.code_of` makes a `SchemaGuard` for every policy that has schemas. Catalog
and sandbox do not know each other, so this class turns the catalog's `ServiceError` into a
`PolicyFault`.
"""

import asyncio

from moorage.catalog.documents.schemas import PolicySchemas
from moorage.core.state.facts import Refusal
from moorage.daemon.answers import refusal_of
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonValue
from moorage.sandbox.host.sandbox import PolicyFault


class SchemaGuard:
    """A `Guard` that applies the schemas of one policy.

    Args:
        schemas: The schemas, as the catalog read them.
    """

    def __init__(self, schemas: PolicySchemas) -> None:
        self._schemas = schemas

    def overrides(
        self, parameters: JsonMapping, settings: JsonMapping
    ) -> tuple[JsonMapping, JsonMapping]:
        try:
            return self._schemas.overrides(parameters, settings)
        except ServiceError as error:
            raise PolicyFault(refusal_of(error)) from error

    async def complete(self, input_data: JsonValue) -> JsonValue:
        """Check the input and add defaults; other tasks run between two parts of a long list."""
        try:
            if not isinstance(input_data, list) or self._schemas.inputs is None:
                return self._schemas.completed_input(input_data)
            completed: list[JsonValue] = []
            for part in self._schemas.complete_parts(input_data):
                completed += part
                await asyncio.sleep(0)
        except ServiceError as error:
            raise PolicyFault(refusal_of(error)) from error
        return completed

    def command(self, action: str, data: JsonValue) -> JsonValue:
        try:
            return self._schemas.command(action, data)
        except ServiceError as error:
            raise PolicyFault(refusal_of(error)) from error

    def judge(self, value: JsonValue) -> Refusal | None:
        try:
            self._schemas.judge(value)
        except ServiceError as error:
            return refusal_of(error)
        return None

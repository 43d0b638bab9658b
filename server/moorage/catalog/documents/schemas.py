"""The schemas of a PolicyRule document, which are read at its upload and enforced on every call.

`catalog.documents.policies` reads the schemas. Admission checks a request with them before it
consults the policy; the sandbox's host checks the input and the answer of the policy.
`policy.schema` has the schema language. A policy's answer may be hostile, so it is checked here,
outside the cell.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from moorage.model import Ask, Code
from moorage.policy.schema import Schema, SchemaError, SchemaPattern
from moorage.policy.schema_reader import read_schema
from moorage.protocol.faults import ServiceError
from moorage.query import QueryError, expression
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

COMMANDS_MAX: Final = 100
"""Maximum management commands of one policy."""
PART_MAX: Final = 256
"""Maximum documents that are checked against an input schema without a pause: some milliseconds."""
NO_ANSWER: Final = frozenset({"error", "declined"})
"""An answer, or a part of a list, with one of these fields and no cluster is a refusal, so the
output schema does not apply to it."""
_NOTHING: Final[JsonMapping] = {}
_COMMANDS_FIELD: Final = "management_commands_schema"


@dataclass(frozen=True, slots=True)
class PolicySchemas:
    """The schemas of one policy; each is None if the policy has no such schema.

    Args:
        inputs: `policy_input_schema`, for the `inputs` of a request, or for the argument of `eval`,
            or for each of its elements if it is a list.
        output: `policy_output_schema`, for the result of `eval`, or for each element of a list.
        settings: `policy_settings_schema`.
        parameters: `policy_parameters_schema`.
        commands: `management_commands_schema`, by name of the command.
        settings_completed: The document's `policy_settings` with the schema's defaults.
        parameters_completed: The document's `policy_parameters` with the schema's defaults.
    """

    uri: str
    inputs: Schema | None = None
    output: Schema | None = None
    settings: Schema | None = None
    parameters: Schema | None = None
    commands: Mapping[str, Schema | None] | None = None
    settings_completed: JsonMapping = field(default_factory=JsonObject)
    parameters_completed: JsonMapping = field(default_factory=JsonObject)

    def complete(self, inputs: JsonValue) -> JsonValue:
        """Return a request's inputs with the schema's defaults, or raise `bad_message`."""
        return self._check(self.inputs, inputs, "inputs")

    def completed_input(self, input_data: JsonValue) -> JsonValue:
        """Return the `input_data` of a call that is not a request, with the schema's defaults.

        If the policy runs for another server, only the `inputs` of that server's request are
        checked. Else, for a block or a ranking, all input is checked; of a ranking's list, each
        element.

        Raises:
            ServiceError: `bad_message`.
        """
        if self.inputs is None:
            return input_data
        if isinstance(input_data, list):
            return [each for part in self.complete_parts(input_data) for each in part]
        if isinstance(input_data, dict) and "inputs" in input_data:
            given = self._check(self.inputs, input_data["inputs"], "input_data.inputs")
            return {**input_data, "inputs": given}
        return self._check(self.inputs, input_data, "input_data")

    def complete_parts(self, values: Sequence[JsonValue]) -> Iterator[Sequence[JsonValue]]:
        """Yield parts of an input list, with each element checked and completed by the schema."""
        for first in range(0, len(values), PART_MAX):
            part = values[first : first + PART_MAX]
            if self.inputs is not None:
                with self._refusals():
                    part = self.inputs.check_each(part, "input_data", first)
            yield part

    def overrides(
        self, parameters: JsonMapping, settings: JsonMapping
    ) -> tuple[JsonMapping, JsonMapping]:
        """Check a caller's overrides of the defaults; refuse wrong values as `bad_message`."""
        return (
            self._check(self.parameters, parameters, "parameters", self.parameters_completed),
            self._check(self.settings, settings, "settings", self.settings_completed),
        )

    def completed(self, ask: Ask) -> Ask:
        """Return a request, checked and completed with this policy's defaults.

        Raises:
            ServiceError: `bad_message`.
        """
        parameters, settings = self.overrides(ask.parameters, ask.settings)
        inputs = self.complete(ask.inputs)
        return replace(ask, inputs=inputs, parameters=parameters, settings=settings)

    def judge(self, value: JsonValue) -> None:
        """Check the value that the policy returned.

        Raises:
            ServiceError: `policy_bad_output`: the value does not match the output schema.
        """
        if self.output is None or _says_no(value):
            return
        try:
            if isinstance(value, list):
                self.output.check_each(value, "output", skips=_is_empty_part)
            else:
                self.output.check(value, "output")
        except SchemaError as error:
            raise ServiceError(
                Code.POLICY_BAD_OUTPUT,
                f"{self.uri} does not keep to its policy_output_schema: {error}",
                field=error.path,
                expected=error.expected,
                details={"policy_rule_uri": self.uri},
            ) from error

    def command(self, action: str, data: JsonValue) -> JsonValue:
        """Return the data of a management command with the schema's defaults.

        Raises:
            ServiceError: `bad_message`: the policy has no such command, or the data are wrong.
        """
        if self.commands is None:
            return data
        if action not in self.commands:
            names = ", ".join(self.commands)
            raise ServiceError(
                Code.BAD_MESSAGE,
                f"action: {self.uri} has no management command “{action[:60]}”; it has {names}",
                field="action",
                expected=f"one of {names}",
            )
        return self._check(self.commands[action], {} if data is None else data, "data")

    def _check(
        self, schema: Schema | None, value: JsonValue, path: str, known: JsonMapping = _NOTHING
    ) -> JsonValue:
        if schema is None or (value == {} and schema.takes_nothing(known)):
            return value
        with self._refusals():
            return schema.check(value, path, known=known)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Convert schema errors in this block into refusals that name the policy."""
        try:
            yield
        except SchemaError as error:
            reason = f"{error} (the schema of {self.uri})"
            raise ServiceError(
                Code.BAD_MESSAGE, reason, field=error.path, expected=error.expected
            ) from error


def read_schemas(document: JsonMapping) -> tuple[PolicySchemas | None, tuple[str, ...]]:
    """Return the schemas of a PolicyRule document, None if it has none, and warnings.

    A warning says which schema cannot be read, and so is not enforced, or which default of the
    document its own schema does not allow; such defaults stay unchanged.

    Args:
        document: The document, with complete identity.
    """
    notes: list[SchemaError] = []
    inputs = _schema(document, "policy_input_schema", notes)
    output = _schema(document, "policy_output_schema", notes)
    settings = _schema(document, "policy_settings_schema", notes)
    parameters = _schema(document, "policy_parameters_schema", notes)
    commands = _commands(document.get(_COMMANDS_FIELD), notes)
    warnings = [f"{note}: it is stored, but not enforced" for note in notes]
    if not (inputs or output or settings or parameters or commands):
        return None, tuple(warnings)
    schemas = PolicySchemas(
        document["policy_rule_uri"],
        inputs,
        output,
        settings,
        parameters,
        commands,
        _complete(settings, document, "policy_settings", warnings),
        _complete(parameters, document, "policy_parameters", warnings),
    )
    return schemas, tuple(warnings)


def _complete(
    schema: Schema | None, document: JsonMapping, field: str, warnings: list[str]
) -> JsonMapping:
    """Return the values in `field` of a document, and its schema's defaults for missing values.

    Required values may be missing, too: requests can give them.
    """
    given: JsonMapping = document.get(field) or {}
    try:
        return given if schema is None else schema.check(given, field, known=schema.required)
    except SchemaError as error:
        warnings.append(f"{error} (its own schema): the defaults are not changed")
        return given


def _schema(document: JsonMapping, name: str, notes: list[SchemaError]) -> Schema | None:
    schema, new = read_schema(document.get(name), name, _pattern)
    notes += new
    return schema


def _pattern(text: str, path: str) -> SchemaPattern:
    try:
        return expression(text, "", path)
    except QueryError as error:
        found = f"in {_quote(text)}, {error.reason}"
        raise SchemaError(path, error.expected, found) from error


def _commands(given: JsonValue, notes: list[SchemaError]) -> Mapping[str, Schema | None] | None:
    """Return the management commands; None and a warning if their schema cannot be read."""
    if not given:
        return None
    if not isinstance(given, list) or len(given) > COMMANDS_MAX:
        expected = f"a list of at most {COMMANDS_MAX} objects {{name, description, schema}}"
        found = f"found {len(given)} entries" if isinstance(given, list) else "found no list"
        notes.append(SchemaError(_COMMANDS_FIELD, expected, found))
        return None
    commands: dict[str, Schema | None] = {}
    for number, each in enumerate(given):
        path = f"{_COMMANDS_FIELD}[{number}]"
        if not isinstance(each, dict):
            notes.append(SchemaError(path, "an object {name, description, schema}", "found none"))
            return None
        name = each.get("name")
        if not isinstance(name, str) or not name or name in commands:
            found = "it is missing" if name is None else f"found {_quote(str(name))}"
            expected = "a text that no other command has as name"
            notes.append(SchemaError(f"{path}.name", expected, found))
            return None
        commands[name], new = read_schema(each.get("schema"), f"{path}.schema", _pattern)
        notes += new
    return commands


def _is_empty_part(value: JsonValue) -> bool:
    return value is None or _says_no(value)


def _says_no(value: JsonValue) -> bool:
    return isinstance(value, dict) and "cluster_id" not in value and bool(NO_ANSWER & value.keys())


def _quote(text: str) -> str:
    return f'"{text[:60]}"'

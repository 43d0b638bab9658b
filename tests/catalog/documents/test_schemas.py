"""Malformed parts of a policy's schemas cause warnings; all other parts apply to every call."""

import pytest

from moorage.catalog.documents.policies import complete_policy_document, make_prepared
from moorage.catalog.documents.schemas import PolicySchemas, read_schemas
from moorage.model import Code
from moorage.protocol.faults import ServiceError

FILES = {"function.py": b"class AIOSv1PolicyRule: ..."}
GIVEN = {"policy_rule_uri": "a:1-b", "code": "class AIOSv1PolicyRule: ..."}
SIZE = {"type": "number", "min": 1, "default": 2}
ZONE = {"type": "string", "required": True}


def prepare_policy(**more):
    return make_prepared(complete_policy_document({**GIVEN, **more}), FILES)


def prepare(**more):
    return prepare_policy(**more).record


def schemas(**more) -> PolicySchemas:
    found, warnings = read_schemas({**GIVEN, **more})
    assert found is not None
    assert not warnings
    return found


def refusal(call, *arguments) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call(*arguments)
    return caught.value


def test_a_policy_without_schema_fields_has_no_schemas():
    assert prepare().schemas is None
    assert prepare(policy_input_schema={}, management_commands_schema=[]).schemas is None


def test_defaults_of_the_schema_complete_the_defaults_of_the_document():
    record = prepare(
        policy_parameters_schema={"size": SIZE, "zone": ZONE, "more": {"type": "any"}},
        policy_parameters={"more": 1},
        policy_settings_schema={"size": SIZE},
        policy_settings={"size": 5},
    )
    assert record.parameters == {"more": 1, "size": 2}
    assert record.settings == {"size": 5}
    assert record.document["policy_parameters"] == {"more": 1}, "the document is unchanged"


def test_a_policy_with_another_schema_is_another_policy():
    assert prepare().ref.digest != prepare(policy_input_schema={"a": SIZE}).ref.digest
    assert prepare().ref.digest == prepare(policy_input_schema={}).ref.digest


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"policy_input_schema": {"a": {}}}, "policy_input_schema.a.type"),
        ({"policy_output_schema": {"a": 1}}, "policy_output_schema.a"),
        (
            {"policy_settings_schema": {"a": {"type": "string", "pattern": "(?=x)"}}},
            "policy_settings_schema.a.pattern",
        ),
        (
            {"policy_parameters_schema": {"a": SIZE}, "policy_parameters": {"a": 0}},
            "policy_parameters.a",
        ),
        (
            {"policy_settings_schema": {"a": SIZE}, "policy_settings": {"a": "x"}},
            "policy_settings.a",
        ),
        ({"management_commands_schema": [7]}, "management_commands_schema[0]"),
        ({"management_commands_schema": [{}]}, "management_commands_schema[0].name"),
        (
            {"management_commands_schema": [{"name": "a"}, {"name": "a"}]},
            "management_commands_schema[1].name",
        ),
        (
            {"management_commands_schema": [{"name": "a", "schema": {"x": 1}}]},
            "management_commands_schema[0].schema.x",
        ),
        (
            {"management_commands_schema": [{"name": str(n)} for n in range(101)]},
            "management_commands_schema",
        ),
    ],
)
def test_malformed_parts_of_schemas_are_stored_with_a_warning(more, field):
    """Other servers read no schemas, so existing documents may have malformed schemas."""
    found = prepare_policy(**more)
    (warning,) = found.warnings
    assert warning.startswith(f"{field}: expected ")
    assert found.record.document.items() >= more.items()
    assert found.record.parameters == (more.get("policy_parameters") or {})


def test_only_readable_parts_of_a_schema_are_enforced():
    found = prepare_policy(
        policy_input_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "not": {}},
        policy_output_schema=[],
        policy_parameters_schema={"a": {"type": "string"}, "b": {"type": "number", "default": 1}},
        policy_parameters={"a": 7},
        management_commands_schema={"reset": {}},
    )
    assert [each.partition(":")[0] for each in found.warnings] == [
        *("policy_input_schema.not", "policy_output_schema", "management_commands_schema"),
        "policy_parameters.a",
    ]
    schemas = found.record.schemas
    assert schemas.complete({"n": 1}) == {"n": 1}
    assert refusal(schemas.complete, {"n": "x"}).field == "inputs.n"
    schemas.judge("anything")
    assert schemas.command("anything", 7) == 7
    assert found.record.parameters == {"a": 7}


def test_inputs_are_checked_and_completed():
    found = schemas(policy_input_schema={"size": SIZE, "zone": ZONE})
    assert found.complete({"zone": "a"}) == {"zone": "a", "size": 2}
    error = refusal(found.complete, {"size": 1})
    assert error.reason == ("inputs.zone: expected a text; it is missing (the schema of a:1-b)")
    assert (error.code, error.field, error.expected) == (Code.BAD_MESSAGE, "inputs.zone", "a text")


def test_a_caller_must_give_the_values_that_have_no_default():
    found = schemas(
        policy_parameters_schema={"size": SIZE, "zone": ZONE},
        policy_settings_schema={"zone": ZONE},
        policy_settings={"zone": "z"},
    )
    assert found.overrides({"zone": "a"}, {}) == ({"zone": "a"}, {})
    assert found.overrides({"zone": "a", "size": 7, "x": 1}, {"zone": None}) == (
        {"zone": "a", "size": 7, "x": 1},
        {},
    ), "a null does not remove a default"
    assert refusal(found.overrides, {}, {}).field == "parameters.zone"
    assert refusal(found.overrides, {"zone": "a"}, {"zone": 1}).field == "settings.zone"


def test_answers_are_checked_against_the_output_schema():
    found = schemas(policy_output_schema={"cluster_id": ZONE, "gpus": {"type": "array"}})
    placed = {"cluster_id": "a", "gpus": [0], "score": 1}
    found.judge(placed)
    found.judge([placed, placed])
    found.judge({"declined": "full"})
    found.judge({"error": "full"})
    found.judge([placed, None, {"declined": "full"}, {"error": "full"}])
    for wrong, field in (
        ({}, "output.cluster_id"),
        ({"cluster_id": "a", "gpus": 0}, "output.gpus"),
        ({"cluster_id": 1, "error": "x"}, "output.cluster_id"),
        ([placed, {}], "output[1].cluster_id"),
        ([None, {"error": "full"}, {}], "output[2].cluster_id"),
        ([placed, 7], "output[1]"),
        ("a", "output"),
        (None, "output"),
    ):
        error = refusal(found.judge, wrong)
        assert (error.code, error.field) == (Code.POLICY_BAD_OUTPUT, field)
        assert "a:1-b does not keep to its policy_output_schema" in error.reason


def test_undeclared_management_commands_are_refused():
    found = schemas(
        management_commands_schema=[{"name": "reset"}, {"name": "set", "schema": {"size": SIZE}}]
    )
    assert found.command("reset", {"any": 1}) == {"any": 1}
    assert found.command("set", None) == {"size": 2}
    assert refusal(found.command, "set", {"size": 0}).field == "data.size"
    error = refusal(found.command, "drop", {})
    assert (error.field, error.expected) == ("action", "one of reset, set")
    assert schemas(policy_input_schema={"a": SIZE}).command("anything", 7) == 7

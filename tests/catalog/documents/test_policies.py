"""Tests of PolicyRule documents: identity, checks without running code, requirements, digest."""

import pytest

from moorage.catalog.documents.policies import (
    complete_policy_document,
    differing_fields,
    entry_name,
    make_prepared,
)
from moorage.model import Code
from moorage.protocol.faults import ServiceError

FILES = {"function.py": b"class AIOSv1PolicyRule: ...", "a.py": b"1"}
GIVEN = {"policy_rule_uri": "policies.first:v0.0.1-beta", "code": "class AIOSv1PolicyRule: ..."}


@pytest.mark.parametrize(
    ("identity", "uri", "parts"),
    [
        ({"policy_rule_uri": "ip:1.0-beta"}, "ip:1.0-beta", ("ip", "1.0", "beta")),
        (
            {"name": "ip", "version": "1.0", "release_tag": "beta"},
            "ip:1.0-beta",
            ("ip", "1.0", "beta"),
        ),
        (
            {"policy_rule_uri": "a.b-c:v1-rc-2", "name": "a.b-c"},
            "a.b-c:v1-rc-2",
            ("a.b-c", "v1", "rc-2"),
        ),
        (
            {"policy_rule_uri": "", "name": "x", "version": "1-2", "release_tag": "t"},
            "x:1-2-t",
            ("x", "1-2", "t"),
        ),
    ],
)
def test_a_policy_is_identified_by_its_uri_or_its_parts(identity, uri, parts):
    document = complete_policy_document({"code": "x\n", **identity})
    assert document["policy_rule_uri"] == uri
    assert (document["name"], document["version"], document["release_tag"]) == parts


@pytest.mark.parametrize(
    ("given", "files", "named"),
    [
        ({"code": "x\n", "code_file": "tightest.py"}, ["function.py"], "tightest.py"),
        ({"code": "https://git.example/rules/tightest.py"}, ["function.py"], "tightest.py"),
        ({"code": "x\n"}, ["function.py"], "function.py"),
        ({"code": "UEsDB…", "code_file": "tightest.py"}, ["function.py", "a.py"], "function.py"),
    ],
)
def test_a_policy_has_the_file_name_that_its_author_gave_it(given, files, named):
    document = complete_policy_document({**GIVEN, **given})
    assert entry_name(document, dict.fromkeys(files, b"")) == named
    assert differing_fields(document, {**document, "code_file": "o.py"}, policy_only=False) == []


@pytest.mark.parametrize("name", ["a/b.py", 'a".py', "a.txt", "x" * 100 + ".py"])
def test_an_invalid_file_name_is_refused(name):
    with pytest.raises(
        ServiceError, match="code_file: expected the author's name of the code file"
    ):
        complete_policy_document({**GIVEN, "code_file": name})


@pytest.mark.parametrize("kind", ["python_class_v1", "Python", "policy", "", None])
def test_the_types_of_python_policies_and_no_type_are_accepted(kind):
    """A null field counts as missing, since stored documents have all fields, even unused ones."""
    assert complete_policy_document({**GIVEN, "type": kind})["type"] == (kind or "")


@pytest.mark.parametrize("login", ["user:pw@", "user@", "a%40b:c@d@", ":@", ""])
def test_the_urls_of_stored_policies_have_no_credentials(login):
    given = {**GIVEN, "code": f"HTTPS://{login}code.example:1/a@b?c=@"}
    assert complete_policy_document(given)["code"] == "HTTPS://code.example:1/a@b?c=@"


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"policy_rule_uri": "no-colon"}, Code.BAD_MESSAGE, "policy_rule_uri"),
        ({"policy_rule_uri": "a:1"}, Code.BAD_MESSAGE, "policy_rule_uri"),
        ({"policy_rule_uri": "../a:1-b"}, Code.BAD_MESSAGE, "policy_rule_uri"),
        ({"policy_rule_uri": 7}, Code.BAD_MESSAGE, "policy_rule_uri"),
        ({"policy_rule_uri": "a:1-" + "b" * 300}, Code.BAD_MESSAGE, "policy_rule_uri"),
        ({"name": "another"}, Code.BAD_MESSAGE, "name"),
        ({"version": "v2"}, Code.BAD_MESSAGE, "version"),
        ({"policy_rule_uri": None, "name": "a"}, Code.MISSING_FIELDS, "version"),
        ({"code": ""}, Code.BAD_MESSAGE, "code"),
        ({"type": "javascript"}, Code.BAD_MESSAGE, "type"),
        ({"code": {"function.py": ""}}, Code.BAD_MESSAGE, "code"),
        ({"policy_parameters": []}, Code.BAD_MESSAGE, "policy_parameters"),
        ({"description": 1}, Code.BAD_MESSAGE, "description"),
    ],
)
def test_the_refusal_of_a_policy_document_names_each_wrong_field(change, code, field):
    with pytest.raises(ServiceError) as caught:
        complete_policy_document({**GIVEN, **change})
    assert (caught.value.code, caught.value.field) == (code, field)
    uri_is_wrong = (code, field) == (Code.BAD_MESSAGE, "policy_rule_uri")
    assert ("at most 255 ASCII letters" in caught.value.expected) is uri_is_wrong


def prepare(files=FILES, **more):
    return make_prepared(complete_policy_document({**GIVEN, **more}), files).record


def test_the_record_of_a_policy_has_all_fields_for_the_sandbox():
    record = prepare(policy_settings={"s": 1}, policy_parameters={"p": 2}, vendor="kept")
    assert record.ref.uri == "policies.first:v0.0.1-beta"
    assert (record.settings, record.parameters, record.files) == ({"s": 1}, {"p": 2}, FILES)
    assert record.document["vendor"] == "kept"
    assert record.document["digest"] == record.ref.digest


def test_the_digest_covers_files_and_defaults_and_no_descriptive_fields():
    digest = prepare().ref.digest
    assert prepare(description="another", tags="a,b").ref.digest == digest
    assert prepare(files=dict(reversed(FILES.items()))).ref.digest == digest
    assert prepare(policy_settings=None, policy_parameters={}).ref.digest == digest
    others = [
        prepare(policy_settings={"s": 1}),
        prepare(policy_parameters={"s": 1}),
        prepare(files={**FILES, "a.py": b"2"}),
        prepare(files={"function.py": FILES["function.py"], "b.py": b"1"}),
    ]
    assert len({digest, *(record.ref.digest for record in others)}) == 5


def test_the_comparison_of_two_documents_names_the_differing_fields():
    old = prepare(description="one", policy_settings={"s": 1}).document
    described = prepare(description="two", policy_settings={"s": 1}).document
    assert differing_fields(old, old, policy_only=False) == []
    assert differing_fields(old, described, policy_only=False) == ["description"]
    assert differing_fields(old, described, policy_only=True) == []
    tuned = prepare(description="one", policy_settings={"s": 2}).document
    assert differing_fields(old, tuned, policy_only=True) == ["policy_settings"]
    coded = prepare({**FILES, "a.py": b"2"}, description="one", policy_settings={"s": 1}).document
    assert differing_fields(old, coded, policy_only=True) == ["code"]
    repacked = {**old, "code": "packed otherwise"}
    assert differing_fields(old, repacked, policy_only=False) == []
    schema = {**old, "policy_input_schema": {"gpus": {"type": "number"}}}
    assert differing_fields(old, schema, policy_only=True) == ["policy_input_schema"]


def test_available_requirements_cause_no_warning():
    text = b"# needs\n\nnumpy>=2.1\nmsgspec ; python_version > '3'\nTyping\nheapq  # std\n"
    assert prepare({**FILES, "requirements.txt": text}).files["requirements.txt"] == text


@pytest.mark.parametrize(
    "line",
    ["torch", "requests==2", "-r other.txt", "--index-url http://x", "git+https://x/y", "./numpy"],
)
def test_each_unmet_requirement_is_reported_with_its_line(line):
    files = {**FILES, "requirements.txt": b"numpy\n" + line.encode()}
    found = make_prepared(complete_policy_document(GIVEN), files)
    (warning,) = found.warnings
    assert warning.startswith(f"requirements.txt line 2: {line!r} is not available to policies")


def test_of_many_unmet_requirements_the_first_are_named_and_the_rest_is_counted():
    files = {**FILES, "requirements.txt": b"torch\n" * 1100}
    warnings = make_prepared(complete_policy_document(GIVEN), files).warnings
    assert len(warnings) == 22
    assert warnings[-2] == "requirements.txt: 980 more are not available"


def test_one_refusal_names_all_faults_of_a_policy_document():
    with pytest.raises(ServiceError) as caught:
        complete_policy_document({"name": "a", "type": "wasm", "tags": 7, "parameters": {}})
    error = caught.value
    fields = [each["field"] for each in error.details["objections"]]
    assert fields == ["tags", "parameters", "type", "code", "version"]
    assert all(f"{field}: expected " in error.reason for field in fields[:-1])
    assert "Missing required fields: version, release_tag" in error.reason
    assert (error.code, error.field) == (Code.BAD_MESSAGE, "tags")


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("polcy_input_schema", "policy_input_schema"),
        ("policy_outputs_schema", "policy_output_schema"),
        ("parameters", "policy_parameters"),
        ("settings_schema", "policy_settings_schema"),
        ("management_command_schema", "management_commands_schema"),
    ],
)
def test_a_misspelt_field_is_refused(field, meant):
    given = {"policy_rule_uri": "a:1-b", "code": "x", field: {}}
    with pytest.raises(ServiceError) as caught:
        complete_policy_document(given)
    assert caught.value.field == field
    assert meant in caught.value.expected


def test_unknown_fields_are_stored():
    own = {"_id": "5", "owner": "me", "policy_input": 1, "inputs": {}, "created_at": 1, "types": []}
    given = {"policy_rule_uri": "a:1-b", "code": "x", **own}
    assert complete_policy_document(given).items() >= own.items()
    both = {**given, "parameters": {"of": "theirs"}, "policy_parameters": {}}
    assert complete_policy_document(both)["parameters"] == {"of": "theirs"}

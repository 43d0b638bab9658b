"""Broken policies, each in a way of its own, and what its author must be told; for the tests.

`BROKEN` maps a kind to a PolicyRule document (or the bytes of a request's body) and to a piece of
the one sentence that the answer must have. `WARNED` has what is registered all the
same. `HTTP` stands for the daemon's own HTTP address.
"""

from typing import Any

from broken_code import ARCHIVES, GOOD, HTTP, POLICIES, URI, Broken, document, files
from broken_code import WARNED as WARNED_CODE

__all__ = ["BROKEN", "HTTP", "URI", "WARNED"]


def exampled(*examples: Any, **more: Any) -> dict[str, Any]:
    return document(metadata={"examples": list(examples)}, **more)


def schema(entry: Any, field: str = "policy_input_schema") -> dict[str, Any]:
    return document(**{field: {"size": entry}})


def commands(*each: Any) -> dict[str, Any]:
    return document(management_commands_schema=list(each))


DOCUMENTS: Broken = {
    "no JSON": (b"{", "JSON"),
    "no object": (b"[]", "body: expected a JSON object"),
    "no UTF-8": (b'{"code": "\xff"}', "can't decode byte 0xff"),
    "no identity": (
        document(policy_rule_uri=None),
        "Missing required fields: name, version, release_tag (or policy_rule_uri",
    ),
    "no release tag": (
        document(policy_rule_uri=None, name="a", version="1"),
        "Missing required fields: release_tag (or policy_rule_uri",
    ),
    "a URI without a tag": (
        document(policy_rule_uri="broken:1"),
        "policy_rule_uri: expected `<name>:",
    ),
    "another name than in the URI": (
        document(name="whole"),
        "name: expected broken, as in policy_",
    ),
    "another version": (
        document(version="2"),
        "version: expected 1, as in policy_rule_uri broken:1-x",
    ),
    "another tag": (document(release_tag="y"), "release_tag: expected x, as in policy_rule_uri"),
    "a name that is no text": (document(name=7), "name: expected a text"),
    "a version that is no text": (document(version=1), "version: expected a text"),
    "a tag that is no text": (document(release_tag=[]), "release_tag: expected a text"),
    "no code": (document(code=None), "code: expected source text, an archive in base64"),
    "metadata in a list": (document(metadata=[]), "metadata: expected an object"),
    "tags as a number": (document(tags=7), "tags: expected a text with commas, or a list"),
    "a code_type that is none": (document(code_type=7), "code_type: expected a text"),
    "a type that is none": (document(type=7), "type: expected `policy` or `python_class_v1`"),
    "a description in a list": (document(description=[]), "description: expected a text"),
    "settings in a list": (document(policy_settings=[]), "policy_settings: expected an object"),
    "parameters as a text": (
        document(policy_parameters="x"),
        "policy_parameters: expected an object",
    ),
    "functionality in a list": (
        document(functionality_data=[]),
        "functionality_data: expected an object",
    ),
    "estimates as a number": (
        document(resource_estimates=7),
        "resource_estimates: expected an obj",
    ),
    "a number of more than 64 bits": (
        document(policy_parameters={"size": 10**30}),
        "policy_parameters: expected JSON with whole numbers of at most 64 bits",
    ),
    "too much of everything": (
        document(metadata={"pad": "x" * (17 << 20)}),
        "at most 16777216",
    ),
}

SOURCES: Broken = {
    "a path where none is read": (
        document(code="rules/function.py"),
        "has no `policy_code_root` from which paths are read",
    ),
    "this server itself": (document(code=f"{HTTP}/openapi.json"), "is not public"),
    "a host with credentials": (document(code="http://169.254.169.254/latest"), "is not public"),
    "a host that can be none": (document(code="http://xn--a.example./x"), "has no host: "),
    "a data URL without a comma": (document(code="data:text/plain"), "the data: URL has no comma"),
    "a data URL with damaged base64": (
        document(code="data:;base64,%%%"),
        "the base64 text is damaged",
    ),
    "bytes that are nothing": (
        document(code="data:;base64,gIGC"),
        "neither UTF-8 text nor a known",
    ),
    "a NUL in the source": (document(code=f"{GOOD}\0"), "it is empty or holds NUL characters"),
    "more source than fits": (document(code="#" * (9 << 20) + "\n"), "more than 8388608 bytes"),
}

SIZE = {"type": "number"}
SCHEMAS: Broken = {
    "a schema that is a text": (
        document(policy_input_schema="x"),
        "policy_input_schema: expected an object with one entry per field",
    ),
    "an output schema in a list": (
        document(policy_output_schema=[]),
        "policy_output_schema: expected an object with one entry",
    ),
    "a JSON Schema of a text": (
        document(policy_input_schema={"type": "string"}),
        "policy_input_schema.type: expected object, or array with items that are",
    ),
    "a JSON Schema with alternatives": (
        document(policy_input_schema={"type": "object", "oneOf": []}),
        "policy_input_schema.oneOf: expected a constraint that is known here",
    ),
    "an entry that is a text": (
        schema("number"),
        "policy_input_schema.size: expected an object that",
    ),
    "an entry without a type": (
        schema({}),
        "policy_input_schema.size.type: expected one of string",
    ),
    "a type of another language": (
        schema({"type": "int"}),
        '"int", which is `integer` here',
    ),
    "a misspelt constraint": (
        schema({**SIZE, "mim": 1}),
        "size.mim: expected a constraint that is known here; did you mean `min`?",
    ),
    "a pattern for a number": (
        schema({**SIZE, "pattern": "x"}),
        "no `pattern` where the type is num",
    ),
    "a pattern that is none": (
        schema({"type": "string", "pattern": "a{"}),
        "size.pattern: expected",
    ),
    "a pattern that looks ahead": (
        schema({"type": "string", "pattern": "(?=x)"}, "policy_settings_schema"),
        "policy_settings_schema.size.pattern: expected characters",
    ),
    "a pattern that explodes": (
        schema({"type": "string", "pattern": "(a|b)*a(a|b){20}$"}),
        "it takes too much work to follow",
    ),
    "limits the wrong way round": (
        schema({**SIZE, "min": 2, "max": 1}),
        "size.min: expected at most `",
    ),
    "no choice at all": (
        schema({**SIZE, "choices": []}),
        "size.choices: expected a list of 1 to 1000",
    ),
    "a length below zero": (
        schema({"type": "array", "length": -1}),
        "size.length: expected a whole",
    ),
    "a default that breaks its own rule": (
        schema({**SIZE, "min": 1, "default": 0}),
        "size.default: expected a number of at least 1; found 0",
    ),
    "required fields in a list": (
        schema({"type": "object", "required": [7]}),
        "expected true or false, or a list of names",
    ),
    "properties of a number": (
        schema({**SIZE, "properties": {}}),
        "no `properties` where the type",
    ),
    "parameters that break their schema": (
        document(policy_parameters_schema={"size": SIZE}, policy_parameters={"size": "x"}),
        'policy_parameters.size: expected a number; found "x"',
    ),
    "settings that break their schema": (
        document(policy_settings_schema={"zone": {"type": "boolean"}}, policy_settings={"zone": 1}),
        "policy_settings.zone: expected true or false; found 1",
    ),
    "a command without a name": (
        commands({"description": "x"}),
        "management_commands_schema[0].name: expected a text",
    ),
    "a command twice": (
        commands({"name": "a"}, {"name": "a"}),
        "management_commands_schema[1].name: expected a text that no other command has",
    ),
    "a command that is a text": (
        commands("reset"),
        "management_commands_schema[0]: expected an obj",
    ),
    "commands in a text": (
        document(management_commands_schema="reset"),
        "management_commands_schema: expected a list of at most 100 objects {name, description",
    ),
}

ONE = {"request": {"inputs": {"cluster_id": "lab"}}}
EXAMPLES: Broken = {
    "examples in an object": (
        document(metadata={"examples": {}}),
        "metadata.examples: expected a list of examples",
    ),
    "an example that asks nothing": (
        exampled({}),
        "expected either `request` or `input_data`; found nei",
    ),
    "an example with a wrong request": (
        exampled({"request": {"resources": {"gpus": "two"}}}),
        "metadata.examples[0].request: resources.gpus: expected a whole",
    ),
    "an example with a lease": (
        exampled({"request": {"lease": {}}}),
        "metadata.examples[0].request.lease: expected one of",
    ),
    "an example with a broken fleet": (
        exampled({**ONE, "fleet": [{"nodes": 7}]}),
        "metadata.examples[0].fleet[0]: id: expected 1 to 253 letters",
    ),
    "an example on a dead fleet": (
        exampled({**ONE, "fleet": [{"id": "lab", "status": "off"}]}),
        "metadata.examples[0].fleet: expected a cluster that is live",
    ),
    "an example that expects something else": (
        exampled({**ONE, "output": {"cluster_id": "lob"}}),
        'expected output.cluster_id to be "lob"; it is "lab"',
    ),
    "an example that is placed nowhere": (
        exampled({"request": {"inputs": {"cluster_id": "nowhere"}}}),
        "cluster_id: expected a live cluster; “nowhere” is none",
    ),
    "an example that breaks the output schema": (
        exampled(ONE, policy_output_schema={"node_id": {"type": "string", "required": True}}),
        "output.node_id: expected a text; it is missing",
    ),
    "an example that raises": (
        exampled({"input_data": []}),
        "list indices must be integers or slices, not str",
    ),
    "an example file that is no JSON": (
        files(examples_json="["),
        "examples.json: expected a list of",
    ),
}

BROKEN: Broken = {
    **DOCUMENTS,
    **SOURCES,
    **ARCHIVES,
    **POLICIES,
    **EXAMPLES,
}
WARNED: Broken = {**WARNED_CODE, **SCHEMAS}

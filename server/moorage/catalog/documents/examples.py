"""Reads a policy's own examples from its document and archive, and checks answers.

`daemon.publishing.vetting` reads them, and runs them in a cell before the policy is registered.
Examples are in `metadata.examples` of the document, or in `examples.json` beside `function.py`: a
list of objects

    {"name": "two GPUs of one node",
     "request": {"inputs": {}, "resources": {"gpus": 2}},
     "fleet": [<cluster documents>], "metrics": [<metrics documents>],
     "output": {"cluster_id": "lab", "gpus": ["0", "1"]}}

`request` has the fields of a client's request: `inputs`, `parameters`, `settings`, `resources`,
`clusters`. `fleet` has the clusters; by default, one cluster with two nodes of four GPUs each.
Instead of both, an example of a policy that ranks or places blocks has `input_data`, the argument
of `eval`, with `parameters` and `settings` beside it. `output` is optional: the answer must have
its fields with the same values, and may have more fields (`unlike`).
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from moorage.catalog.documents.clusters import CheckedCluster, read_cluster_document
from moorage.catalog.documents.encoding import PACKABLE, is_packable
from moorage.catalog.documents.metrics import read_metrics_document
from moorage.model import Code
from moorage.protocol.errors import BadMessage
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest, decode_allocation
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

EXAMPLES_FILE: Final = "examples.json"
EXAMPLES_MAX: Final = 20
"""Maximum examples of one policy; each may take as long as an evaluation."""
EXAMPLES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum bytes of all examples of one policy, as JSON."""
NO_OUTPUT: Final = object()
"""The `output` of an example that accepts any answer."""
SHOWN_CHARS_MAX: Final = 200

_DOCUMENT: Final = "metadata.examples"
_KEYS: Final = frozenset(
    {"name", "request", "fleet", "metrics", "input_data", "parameters", "settings", "output"}
)
_REQUEST_KEYS: Final = frozenset({"inputs", "parameters", "settings", "resources", "clusters"})
_GPU: Final = {"modelName": "A100", "memory": 40_960}
_NODE: Final = {"vcpus": {"count": 32}, "memory": 131_072, "gpus": {"count": 4, "gpus": [_GPU] * 4}}
_FLEET: Final = [
    {"id": "lab", "nodes": {"nodeData": [{"id": f"node-{n}", **_NODE} for n in (1, 2)]}}
]


@dataclass(frozen=True, slots=True)
class Example:
    """One call of a policy, and the expected answer.

    Args:
        place: The example's place, e.g. `metadata.examples[0]`.
        name: The author's name for the example; may be empty.
        request: The fields of a client's request; None if `input_data` is given.
        fleet: The cluster documents of the example's fleet.
        metrics: Metrics of these clusters, by cluster id.
        input_data: The argument of `eval`, if there is no request.
        parameters: The policy's parameters, with `input_data`.
        settings: The policy's settings, with `input_data`.
        output: Values that the answer must have, or `NO_OUTPUT`.
    """

    place: str
    name: str
    request: AllocationRequest | None
    fleet: Sequence[CheckedCluster]
    metrics: JsonMapping
    input_data: JsonValue
    parameters: JsonMapping
    settings: JsonMapping
    output: JsonValue

    @property
    def title(self) -> str:
        """The number and the name of the example, for messages."""
        return f"{self.place} “{self.name}”" if self.name else self.place


def read_examples(document: JsonMapping, files: Mapping[str, bytes]) -> tuple[Example, ...]:
    """Return the examples of a policy.

    Raises:
        ServiceError: `bad_policy`: an example is malformed; the error's field has its place.
    """
    metadata = document.get("metadata") or {}
    found: list[tuple[str, JsonValue]] = []
    if metadata.get("examples") is not None:
        found += _list(metadata["examples"], _DOCUMENT)
    if EXAMPLES_FILE in files:
        try:
            listed = msgspec.json.decode(files[EXAMPLES_FILE].removeprefix(codecs.BOM_UTF8))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _wrong(EXAMPLES_FILE, "a list of examples as JSON", str(error)) from error
        found += _list(listed, EXAMPLES_FILE)
    if len(found) > EXAMPLES_MAX:
        raise _wrong(found[EXAMPLES_MAX][0], f"at most {EXAMPLES_MAX} examples", "one too many")
    if found and len(msgspec.json.encode([each for _, each in found])) > EXAMPLES_BYTES_MAX:
        raise _wrong(
            found[0][0], f"at most {EXAMPLES_BYTES_MAX} bytes of examples", "here are more"
        )
    uri = document["policy_rule_uri"]
    return tuple(_example(given, place, uri) for place, given in found)


def _list(given: JsonValue, place: str) -> list[tuple[str, JsonValue]]:
    if not isinstance(given, list):
        raise _wrong(place, "a list of examples {request, fleet, output}", _show(given))
    return [(f"{place}[{number}]", each) for number, each in enumerate(given)]


def _example(given: JsonValue, place: str, uri: str) -> Example:
    if not isinstance(given, dict):
        raise _wrong(place, "an object {request, fleet, output}", _show(given))
    if not is_packable(given):
        raise _wrong(place, PACKABLE, "something else")
    for key in given.keys() - _KEYS:
        raise _wrong(f"{place}.{key}", f"one of {', '.join(sorted(_KEYS))}", "an unknown field")
    name = given.get("name", "")
    if not isinstance(name, str):
        raise _wrong(f"{place}.name", "a text", _show(name))
    if ("request" in given) == ("input_data" in given):
        found = "both" if "request" in given else "neither"
        raise _wrong(place, "either `request` or `input_data`", found)
    request = None
    if "request" in given:
        request = _request(given["request"], f"{place}.request", uri)
        for key in ("parameters", "settings"):
            if key in given:
                raise _wrong(f"{place}.{key}", f"{key} within `request`", f"{key} beside it")
    return Example(
        place,
        name,
        request,
        _fleet(given.get("fleet", _FLEET), f"{place}.fleet"),
        _metrics(given.get("metrics", []), f"{place}.metrics"),
        given.get("input_data"),
        _object(given, "parameters", place),
        _object(given, "settings", place),
        given.get("output", NO_OUTPUT),
    )


def _object(given: JsonMapping, key: str, place: str) -> JsonMapping:
    value = given.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(f"{place}.{key}", "an object", _show(value))
    return value


def _request(given: JsonValue, place: str, uri: str) -> AllocationRequest:
    if not isinstance(given, dict):
        raise _wrong(place, "an object {inputs, resources, parameters, settings}", _show(given))
    for key in given.keys() - _REQUEST_KEYS:
        expected = f"one of {', '.join(sorted(_REQUEST_KEYS))}"
        raise _wrong(f"{place}.{key}", expected, "a field that no example can have")
    message = {"adhoc": True, "policy_rule_uri": uri, "inputs": {}, **given}
    try:
        return decode_allocation(msgspec.json.encode(message))
    except BadMessage as error:
        field = f"{place}.{error.field}" if error.field else place
        raise _inside(place, error.reason, field, error.expected) from error


def _fleet(given: JsonValue, place: str) -> tuple[CheckedCluster, ...]:
    if not isinstance(given, list) or not given:
        raise _wrong(place, "a list of cluster documents, not empty", _show(given))
    fleet: list[CheckedCluster] = []
    for number, each in enumerate(given):
        try:
            fleet.append(read_cluster_document(each))
        except ServiceError as error:
            at = f"{place}[{number}]"
            raise _inside(at, error.reason, at, error.expected) from error
    if len({each.id for each in fleet}) < len(fleet):
        raise _wrong(place, "clusters with different ids", "one id twice")
    return tuple(fleet)


def _metrics(given: JsonValue, place: str) -> JsonMapping:
    if not isinstance(given, list):
        raise _wrong(place, "a list of metrics documents", _show(given))
    found: JsonObject = {}
    for number, each in enumerate(given):
        try:
            cluster_id, document = read_metrics_document(each)
        except ServiceError as error:
            at = f"{place}[{number}]"
            raise _inside(at, error.reason, at, error.expected) from error
        found[cluster_id] = document
    return found


# Comparing -------------------------------------------------------------------------------------


def unlike(expected: JsonValue, answer: JsonValue, path: str = "output") -> str:
    """Return in words how an answer differs from an example's expectation; empty if it does not.

    An object must have all fields of the expected one, and may have more; a list must be equal. GPU
    ids may be numbers or texts.
    """
    if isinstance(expected, dict) and isinstance(answer, dict):
        for key, value in expected.items():
            if key not in answer:
                return f"expected {path}.{key} to be {_show(value)}; it is missing"
            if different := unlike(value, answer[key], f"{path}.{key}"):
                return different
        return ""
    if isinstance(expected, list) and isinstance(answer, list) and len(expected) == len(answer):
        pairs = enumerate(zip(expected, answer, strict=True))
        return next((no for at, (e, a) in pairs if (no := unlike(e, a, f"{path}[{at}]"))), "")
    if _same(expected, answer, gpus=".gpus[" in path):
        return ""
    return f"expected {path} to be {_show(expected)}; it is {_show(answer)}"


def _same(expected: JsonValue, answer: JsonValue, *, gpus: bool) -> bool:
    if isinstance(expected, bool) or isinstance(answer, bool):
        return expected is answer
    return expected == answer or (gpus and str(expected) == str(answer))


def _show(value: JsonValue) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def _wrong(place: str, expected: str, found: str) -> ServiceError:
    reason = f"{place}: expected {expected}; found {found}"
    return ServiceError(Code.BAD_POLICY, reason, field=place, expected=expected)


def _inside(place: str, reason: str, field: str, expected: str) -> ServiceError:
    """Return the refusal of an example, with the reason for one of its parts."""
    return ServiceError(Code.BAD_POLICY, f"{place}: {reason}", field=field, expected=expected)

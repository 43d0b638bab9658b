"""PolicyRule documents: their identity, checks that run no code, and their digest.

The embedded catalog calls `complete_policy_document` and `make_prepared` to prepare such a
document. The code is not parsed, compiled or run here: only the jail does that.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from typing import Final

import msgspec

from moorage.catalog.documents.archives import ENTRY
from moorage.catalog.documents.encoding import PACKABLE, encode, is_packable
from moorage.catalog.documents.schemas import read_schemas
from moorage.catalog.documents.sources import without_credentials
from moorage.catalog.values import Document, PolicyRecord, PreparedPolicy
from moorage.model import Code, PolicyRef
from moorage.policy.requirements import REQUIREMENTS
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonValue

URI_CHARS_MAX: Final = 255
SERVER_FIELDS: Final = frozenset({"digest", "policy_rule_uri", "name", "version", "release_tag"})
"""Fields that the server computes from the other fields."""

_URI: Final = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*):(?P<version>[A-Za-z0-9_.+]+)"
    r"-(?P<release_tag>[A-Za-z0-9_.+-]+)"
)
_URI_EXPECTED: Final = "`<name>:<version>-<release tag>`, e.g. `ip_allowlist:1.0-beta`"
_URI_LETTERS: Final = f"at most {URI_CHARS_MAX} ASCII letters, digits and characters of `_.+-`"

_TYPE_EXPECTED: Final = "`policy` or `python_class_v1`: policies are written in Python"

_FILE_EXPECTED: Final = "the author's name of the code file, such as `my_rule.py`"
_FILE: Final = re.compile(r"[\w.-]{1,96}\.py")

_TYPES: Final[Mapping[str, tuple[type | tuple[type, ...], str]]] = {
    "name": (str, "a text"),
    "version": (str, "a text"),
    "release_tag": (str, "a text"),
    "metadata": (dict, "an object"),
    "tags": ((str, list), "a text with commas, or a list"),
    "code_type": (str, "a text"),
    "code_file": (str, _FILE_EXPECTED),
    "type": (str, _TYPE_EXPECTED),
    "policy_settings": (dict, "an object"),
    "policy_parameters": (dict, "an object"),
    "description": (str, "a text"),
    "functionality_data": (dict, "an object"),
    "resource_estimates": (dict, "an object"),
    "deadline_seconds": ((int, float), "a number of seconds above 0"),
}
_OBJECTS: Final = (
    *("metadata", "functionality_data", "resource_estimates"),
    *("policy_settings", "policy_parameters", "policy_input_schema", "policy_output_schema"),
    *("policy_settings_schema", "policy_parameters_schema"),
)
_EMPTY: Final[JsonMapping] = {
    **{field: {} for field in _OBJECTS},
    **dict.fromkeys(("tags", "code_type", "type", "description"), ""),
    "management_commands_schema": [],
}
"""Values of fields that a document omits, since existing clients expect all these fields."""
_POLICY_FIELDS: Final = (
    "policy_settings",
    "policy_parameters",
    "policy_input_schema",
    "policy_output_schema",
    "policy_settings_schema",
    "policy_parameters_schema",
    "management_commands_schema",
    "type",
)
_KNOWN: Final = frozenset({*_TYPES, *_POLICY_FIELDS, "policy_rule_uri", "code"})
_LONG_NAMES: Final = tuple(field for field in _POLICY_FIELDS if "_" in field)
REQUIREMENTS_SHOWN_MAX: Final = 20
"""Maximum lines of `requirements.txt` with a warning of their own."""
_NEARLY: Final = 0.85
"""Least similarity of an unknown field to a known one at which it counts as misspelt."""
_DIGESTED: Final = tuple(field for field in _POLICY_FIELDS if field.endswith("_schema"))


def complete_policy_document(given: JsonValue) -> Document:
    """Return a checked copy of a PolicyRule document, with all fields of its identity.

    Credentials in a URL in `code` are removed, since readers of documents would see them.

    Raises:
        ServiceError: `missing_fields` or `bad_message`, with the names of all wrong fields.
    """
    if not isinstance(given, dict):
        raise ServiceError.wrong_field("body", "a PolicyRule document (an object)")
    objections = list(_objections(given))
    try:
        identity = _identity(given)
    except ServiceError as error:
        objections.append(error)
    if objections:
        raise _all_of(objections)
    filled = {key: value for key, value in _EMPTY.items() if given.get(key) is None}
    return {**given, **deepcopy(filled), "code": without_credentials(given["code"]), **identity}


def _objections(given: Document) -> Iterator[ServiceError]:
    for field, (types, expected) in _TYPES.items():
        value = given.get(field)
        if value is not None and not isinstance(value, types):
            yield ServiceError.wrong_field(field, expected)
    deadline = given.get("deadline_seconds")
    if isinstance(deadline, int | float) and (deadline is True or not 0 < deadline < math.inf):
        yield ServiceError.wrong_field("deadline_seconds", _TYPES["deadline_seconds"][1])
    named = given.get("code_file")
    if named and isinstance(named, str) and _FILE.fullmatch(named) is None:
        yield ServiceError.wrong_field("code_file", _FILE_EXPECTED)
    for field in given:
        if field not in _KNOWN and (meant := _nearest_field(field, given)):
            expected = f"`{meant}`, or another name for a field of yours"
            yield ServiceError.wrong_field(field, expected)
    kind = given.get("type") or "policy"
    if isinstance(kind, str) and not kind.lower().startswith(("policy", "python")):
        yield ServiceError.wrong_field("type", _TYPE_EXPECTED)
    code = given.get("code")
    if not isinstance(code, str) or not code.strip():
        expected = "source text, an archive in base64, a data: or http(s) URL, or a path"
        yield ServiceError.wrong_field("code", expected)


def _all_of(objections: Sequence[ServiceError]) -> ServiceError:
    """Return one refusal that names all faults, so that a user need not fix them one by one."""
    first = objections[0]
    if len(objections) == 1:
        return first
    listed = [
        {"code": each.code.value, "field": each.field, "reason": each.reason, **each.details}
        for each in objections
    ]
    return ServiceError(
        first.code,
        "; ".join(each.reason for each in objections),
        field=first.field,
        expected=first.expected,
        details={**first.details, "objections": listed},
    )


def _nearest_field(field: str, given: Document) -> str:
    """Return the known field that `field` misspells, or "" if it misspells none.

    A misspelt schema would have no effect. Other unknown fields are allowed.
    """
    prefixed = f"policy_{field}"
    if prefixed in _POLICY_FIELDS and prefixed not in given:
        return prefixed
    return next(iter(get_close_matches(field, _LONG_NAMES, 1, _NEARLY)), "")


def is_policy_uri(uri: str) -> bool:
    """Return whether a text is a valid policy URI; only such a text may enter a store's URL."""
    return len(uri) <= URI_CHARS_MAX and _URI.fullmatch(uri) is not None


def _identity(given: Document) -> dict[str, str]:
    uri = given.get("policy_rule_uri")
    parts = {key: given.get(key) for key in ("name", "version", "release_tag")}
    if not uri:
        missing = [key for key, value in parts.items() if not value]
        if missing:
            raise ServiceError(
                Code.MISSING_FIELDS,
                f"Missing required fields: {', '.join(missing)} (or policy_rule_uri,"
                f" {_URI_EXPECTED})",
                field=missing[0],
                details={"missing": missing},
            )
        uri = f"{parts['name']}:{parts['version']}-{parts['release_tag']}"
    found = _URI.fullmatch(uri) if isinstance(uri, str) and len(uri) <= URI_CHARS_MAX else None
    if found is None:
        raise ServiceError.wrong_field("policy_rule_uri", f"{_URI_EXPECTED}; {_URI_LETTERS}")
    # A version may have a dash, so compare the parts as text, not by the pattern.
    composed = f"{parts['name']}:{parts['version']}-{parts['release_tag']}"
    for key, value in parts.items():
        if value and value != found[key] and uri != composed:
            raise ServiceError.wrong_field(key, f"{found[key]}, as in policy_rule_uri {uri}")
    return {"policy_rule_uri": uri, **{key: parts[key] or found[key] for key in parts}}


def make_prepared(document: Document, files: Mapping[str, bytes]) -> PreparedPolicy:
    """Return a policy ready to be registered.

    Args:
        document: The document, as `complete_policy_document` returned it.
        files: The files in the `code` of the document.

    Raises:
        ServiceError: `bad_message`: a field has a value that cannot be sent to a cell; `too_large`.
    """
    ref = PolicyRef(document["policy_rule_uri"], digest_of(files, document))
    for field, value in document.items():
        if not is_packable(value):
            raise ServiceError.wrong_field(field, PACKABLE)
    # Readers get the checked copy, even if the caller changes its own.
    stored = msgspec.json.decode(encode({**document, "digest": ref.digest}), type=Document)
    record, warnings = _read(ref, files, stored)
    return PreparedPolicy(record, (*warnings, *_requirement_warnings(files)))


def record_from(ref: PolicyRef, files: Mapping[str, bytes], document: Document) -> PolicyRecord:
    """Return the record of a document whose identity and digest are known."""
    return _read(ref, files, document)[0]


def _read(
    ref: PolicyRef, files: Mapping[str, bytes], document: Document
) -> tuple[PolicyRecord, tuple[str, ...]]:
    schemas, warnings = read_schemas(document)
    record = PolicyRecord(
        ref=ref,
        files=files,
        settings=schemas.settings_completed if schemas else document.get("policy_settings") or {},
        parameters=(
            schemas.parameters_completed if schemas else document.get("policy_parameters") or {}
        ),
        document=document,
        schemas=schemas,
    )
    return record, warnings


def entry_name(document: Document, files: Mapping[str, bytes]) -> str:
    """Return the author's name for the policy's entry file, for messages and tracebacks.

    Among several Python files, the entry file is `function.py`.
    """
    if any(path.endswith(".py") and path != ENTRY for path in files):
        return ENTRY
    code = document["code"]
    named = document.get("code_file") or ("" if "\n" in code else code.rpartition("/")[2])
    return named if _FILE.fullmatch(named) else ENTRY


def digest_of(files: Mapping[str, bytes], document: Document) -> str:
    """Return the SHA-256 of a policy's behaviour: its files, its defaults and its schemas."""
    content = {
        "files": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
        "settings": document.get("policy_settings") or {},
        "parameters": document.get("policy_parameters") or {},
        "schemas": {field: document[field] for field in _DIGESTED if document.get(field)},
    }
    try:
        canonical = msgspec.json.encode(content, order="sorted")
    except (TypeError, ValueError, RecursionError) as error:
        raise ServiceError.wrong_field(
            "policy_settings, policy_parameters", f"JSON values ({error})"
        ) from error
    return hashlib.sha256(canonical).hexdigest()


def differing_fields(old: Document, new: Document, *, policy_only: bool) -> list[str]:
    """Return the fields in which two documents of one URI differ, sorted.

    Args:
        old: The registered document.
        new: The new document.
        policy_only: Whether only the fields that decide the policy's behaviour are compared.
            `code` is compared by digest, not as text: a repacked archive, or a file with another
            name, is the same policy.
    """
    fields = set(_POLICY_FIELDS) if policy_only else (old.keys() | new.keys()) - SERVER_FIELDS
    fields -= {"code", "code_file"}
    differing = {field for field in fields if (old.get(field) or None) != (new.get(field) or None)}
    if old.get("digest") != new.get("digest") and not differing & set(_POLICY_FIELDS):
        differing.add("code")
    return sorted(differing)


def _requirement_warnings(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield warnings about requirements that are not available; the server installs none."""
    if REQUIREMENTS not in files:
        return
    from moorage.catalog.documents import requirements  # noqa: PLC0415  # Slow to import.

    wanted = list(requirements.unmet(files))
    for first in wanted[:REQUIREMENTS_SHOWN_MAX]:
        yield f"{REQUIREMENTS} line {first.line}: {first.text[:80]!r} {first.why}"
    if len(wanted) > REQUIREMENTS_SHOWN_MAX:
        yield f"{REQUIREMENTS}: {len(wanted) - REQUIREMENTS_SHOWN_MAX} more are not available"
    lines_max = requirements.LINES_MAX
    if files[REQUIREMENTS].count(b"\n") > lines_max:
        yield f"{REQUIREMENTS} has more than {lines_max} lines; the others were not read"


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return a policy's files in the format of the store."""
    return msgspec.msgpack.encode(files)


def unpack_files(packed: bytes) -> dict[str, bytes]:
    """Return the files that `pack_files` packed."""
    return msgspec.msgpack.decode(packed, type=dict[str, bytes])

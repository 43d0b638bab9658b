"""PolicyRule documents: identity, checks on paper, and the digest of what makes the policy.

The embedded catalog calls `complete_policy_document` and `prepared_policy` to prepare one. Nothing
of the code is parsed, compiled or run here: that is for the jail.
"""

import hashlib
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from moorage.catalog.documents.archives import bad_code
from moorage.catalog.documents.encoding import PACKABLE, encode, is_packable
from moorage.catalog.documents.requirements import LINES_MAX, unmet
from moorage.catalog.documents.schemas import read_schemas
from moorage.catalog.documents.sources import without_credentials
from moorage.catalog.values import Document, PolicyRecord, PreparedPolicy
from moorage.model import Code, PolicyRef
from moorage.policy.requirements import IMPORTABLE, REQUIREMENTS
from moorage.protocol.faults import ServiceError

__all__ = [
    "complete_policy_document",
    "differing_fields",
    "digest_of",
    "is_policy_uri",
    "pack_files",
    "prepared_policy",
    "record_from",
    "unpack_files",
]

URI_CHARS_MAX: Final = 255
SERVER_FIELDS: Final = frozenset({"digest", "policy_rule_uri", "name", "version", "release_tag"})
"""Fields that follow from the others."""

_URI: Final = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*):(?P<version>[A-Za-z0-9_.+]+)"
    r"-(?P<release_tag>[A-Za-z0-9_.+-]+)"
)
_URI_EXPECTED: Final = "`<name>:<version>-<release tag>`, e.g. `ip_allowlist:1.0-beta`"

_TYPE_EXPECTED: Final = "`python_class_v1`: policies are written in Python"

_TYPES: Final[Mapping[str, tuple[type | tuple[type, ...], str]]] = {
    "name": (str, "a text"),
    "version": (str, "a text"),
    "release_tag": (str, "a text"),
    "metadata": (dict, "an object"),
    "tags": ((str, list), "a text with commas, or a list"),
    "code_type": (str, "a text"),
    "type": (str, _TYPE_EXPECTED),
    "policy_input_schema": (dict, "an object with one entry per field"),
    "policy_output_schema": (dict, "an object with one entry per field"),
    "policy_settings_schema": (dict, "an object with one entry per field"),
    "policy_parameters_schema": (dict, "an object with one entry per field"),
    "policy_settings": (dict, "an object"),
    "policy_parameters": (dict, "an object"),
    "management_commands_schema": (list, "a list of {name, description, schema}"),
    "description": (str, "a text"),
    "functionality_data": (dict, "an object"),
    "resource_estimates": (dict, "an object"),
}
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
_LONG_NAMES: Final = tuple(field for field in _POLICY_FIELDS if "_" in field)
_NEARLY: Final = 0.85
"""Likeness from which on a field is taken for a misspelt one."""
_DIGESTED: Final = tuple(field for field in _POLICY_FIELDS if field.endswith("_schema"))


def complete_policy_document(given: Any) -> Document:
    """Return a checked copy of a PolicyRule document with its identity filled in.

    A URL in `code` loses its credentials: whoever may read documents would read them, too.

    Raises:
        ServiceError: `missing_fields` or `bad_message`, naming the field.

    """
    if not isinstance(given, dict):
        raise ServiceError.wrong_field("body", "a PolicyRule document (an object)")
    for field, (types, expected) in _TYPES.items():
        value = given.get(field)
        if value is not None and not isinstance(value, types):
            raise ServiceError.wrong_field(field, expected)
    for field in given.keys() - _TYPES.keys():
        if meant := _meant(field, given):
            raise ServiceError.wrong_field(
                field, f"`{meant}`, or another name for a field of yours"
            )
    if not (given.get("type") or "python").lower().startswith("python"):
        raise ServiceError.wrong_field("type", _TYPE_EXPECTED)
    code = given.get("code")
    if not isinstance(code, str) or not code.strip():
        raise ServiceError.wrong_field(
            "code", "source text, an archive in base64, a data: or http(s) URL, or a path"
        )
    return {**given, "code": without_credentials(code), **_identity(given)}


def _meant(field: str, given: Document) -> str:
    """Return the field that a misspelt one was meant to be; a schema so written protects nothing.

    Documents may have fields of their own, so only what is nearly one of ours counts.
    """
    prefixed = f"policy_{field}"
    if prefixed in _POLICY_FIELDS and prefixed not in given:
        return prefixed
    return next(iter(get_close_matches(field, _LONG_NAMES, 1, _NEARLY)), "")


def is_policy_uri(uri: str) -> bool:
    """Return whether a policy can have this URI; no other text may enter a store's URL."""
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
        raise ServiceError.wrong_field("policy_rule_uri", _URI_EXPECTED)
    for key, value in parts.items():
        # A version may itself have a dash, so the parts are compared as text, not by the pattern.
        if value and value != found[key] and not _composes(uri, parts):
            raise ServiceError.wrong_field(key, f"{found[key]}, as in policy_rule_uri {uri}")
    return {"policy_rule_uri": uri, **{key: parts[key] or found[key] for key in parts}}


def _composes(uri: str, parts: Mapping[str, Any]) -> bool:
    return uri == f"{parts['name']}:{parts['version']}-{parts['release_tag']}"


def prepared_policy(document: Document, files: Mapping[str, bytes]) -> PreparedPolicy:
    """Return a policy ready to be registered.

    Args:
        document: As `complete_policy_document` returned it.
        files: What its `code` stands for.

    Raises:
        ServiceError: `bad_policy` naming a line of `requirements.txt`; `bad_message` naming a field
            with a value that no cell can be sent; `too_large`.

    """
    _check_requirements(files)
    ref = PolicyRef(document["policy_rule_uri"], digest_of(files, document))
    for field, value in document.items():
        if not is_packable(value):
            raise ServiceError.wrong_field(field, PACKABLE)
    # The copy that readers see is the copy that was checked, whatever the caller does to its own.
    kept = msgspec.json.decode(encode({**document, "digest": ref.digest}), type=Document)
    return PreparedPolicy(record_from(ref, files, kept))


def record_from(ref: PolicyRef, files: Mapping[str, bytes], document: Document) -> PolicyRecord:
    """Return the record of a document whose identity and digest are known.

    Raises:
        ServiceError: `bad_message`: a schema is malformed, or the defaults do not keep to it.

    """
    schemas = read_schemas(document)
    return PolicyRecord(
        ref=ref,
        files=files,
        settings=schemas.settings_completed if schemas else document.get("policy_settings") or {},
        parameters=(
            schemas.parameters_completed if schemas else document.get("policy_parameters") or {}
        ),
        document=document,
        schemas=schemas,
    )


def digest_of(files: Mapping[str, bytes], document: Document) -> str:
    """Return the SHA-256 of what the policy does: its files, its defaults and its schemas."""
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
        old: Registered.
        new: Offered.
        policy_only: Only the fields that make another policy of it. The text of `code` is not
            compared but its digest is: an archive packed again is the same policy.

    """
    fields = set(_POLICY_FIELDS) if policy_only else (old.keys() | new.keys()) - SERVER_FIELDS
    fields.discard("code")
    differing = {field for field in fields if (old.get(field) or None) != (new.get(field) or None)}
    if old.get("digest") != new.get("digest") and not differing & set(_POLICY_FIELDS):
        differing.add("code")
    return sorted(differing)


def _check_requirements(files: Mapping[str, bytes]) -> None:
    """Refuse requirements that policies do not have; nothing is ever installed."""
    for first in unmet(files):
        raise bad_code(
            f"{REQUIREMENTS} line {first.line}: {first.text[:80]!r} {first.why}",
            f"one of {', '.join(IMPORTABLE)}; put others into the archive",
        )
    if files.get(REQUIREMENTS, b"").count(b"\n") > LINES_MAX:
        raise bad_code(f"{REQUIREMENTS} has more than {LINES_MAX} lines", f"at most {LINES_MAX}")


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return a policy's files as the store keeps them."""
    return msgspec.msgpack.encode(files)


def unpack_files(packed: bytes) -> dict[str, bytes]:
    """Return the files that `pack_files` packed."""
    return msgspec.msgpack.decode(packed, type=dict[str, bytes])

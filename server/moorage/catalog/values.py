"""Types of the catalog: documents, and policies in the form that the sandbox loads."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from moorage.catalog.documents.schemas import PolicySchemas
from moorage.model import PolicyRef
from moorage.protocol.registry import BlockKind, Document
from moorage.records.json_values import JsonMapping

__all__ = [
    "BlockKind",
    "Document",
    "DocumentKind",
    "Examine",
    "PolicyRecord",
    "PreparedPolicy",
    "SearchAction",
]

SearchAction = Literal["filter", "search"]
DocumentKind = Literal["cluster", "metrics"]
"""The kinds of documents that describe a cluster: its own document, and its metrics."""


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """One immutable version of a policy, in the form that the sandbox loads.

    Args:
        ref: URI and digest; the digest is over files, settings, parameters and schemas.
        files: Content by path; the entry is `function.py`, which can import its siblings.
        settings: Default settings: `policy_settings`, completed by the schema's defaults.
        parameters: Default parameters: `policy_parameters`, completed by the schema.
        document: The PolicyRule document with complete identity, for readers.
        schemas: The policy's schemas; None: it has none, as most policies.
    """

    ref: PolicyRef
    files: Mapping[str, bytes]
    settings: JsonMapping
    parameters: JsonMapping
    document: Document
    schemas: PolicySchemas | None = None


Examine = Callable[[PolicyRecord], Awaitable[str]]
"""Runs the examples of a policy; returns why they fail, or ""."""


@dataclass(frozen=True, slots=True)
class PreparedPolicy:
    """A policy whose document is checked, but which is not registered yet.

    The policy's code has not been compiled or run: the registration first loads it in a jail, and
    runs its examples.

    Args:
        warnings: Sentences for the author about faults that do not prevent the registration.
    """

    record: PolicyRecord
    warnings: tuple[str, ...] = ()

"""Types of a catalog: documents, and policies in the form that the sandbox loads."""

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
"""The two fields of a request that describe candidates instead of naming them."""


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """One immutable version of a policy, in the form that the sandbox loads.

    Args:
        ref: URI and digest; the digest covers files, settings, parameters and schemas.
        files: Content by path; the entry is `function.py`, siblings are importable from it.
        settings: Defaults: `policy_settings`, completed by those that its schema says.
        parameters: Defaults: `policy_parameters`, completed likewise.
        document: The PolicyRule document with its identity filled in, for readers.
        schemas: What its schemas say; None if it has none, as on most hot paths.
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

    Nothing of it has been compiled or run: its registration lets a jail load it first, and run
    its examples.

    Args:
        warnings: What is not as its author may think, and no reason to refuse it.
    """

    record: PolicyRecord
    warnings: tuple[str, ...] = ()

"""`change` of a what-if: the changes to assume. The daemon reads `change` with `read_change`.

In the type of the message, `change` is any object; this module has its schema.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from moorage.protocol.diagnosis import diagnose
from moorage.records import fields as f
from moorage.records.json_values import JsonObject
from moorage.records.requests import QuotaChange

CHANGES_MAX: Final = 100
"""At most this many changes of each kind in one what-if."""
_FEW = Meta(max_length=CHANGES_MAX, description=f"a list of at most {CHANGES_MAX} changes")
_FEW_POLICIES = Meta(
    max_length=CHANGES_MAX, description=f"an object of at most {CHANGES_MAX} policies' URIs"
)

CordonMode = Literal["uncordon", "cordon", "drain"]


class AddedNodes(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Nodes to add to a cluster: copies of the existing node `like`, or of the document `node`."""

    cluster: f.Name
    like: f.OptionalName = ""
    node: f.Document = {}
    count: f.Nodes = 1


class ChangedPlace(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node, or a whole cluster."""

    cluster: f.Name
    node: f.OptionalName = ""


class ChangedQuota(QuotaChange, frozen=True, kw_only=True):
    """A quota to set, with the fields of `set_quota`, or to remove."""

    tenant: f.Name
    project: f.OptionalIdentifier | None = None
    remove: f.Flag = False


class Change(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The changes to try, applied in this order. `policies`: replacements, by policy."""

    add_nodes: Annotated[tuple[AddedNodes, ...], _FEW] = ()
    quotas: Annotated[tuple[ChangedQuota, ...], _FEW] = ()
    policies: Annotated[dict[f.Uri, f.Uri], _FEW_POLICIES] = {}
    uncordon: Annotated[tuple[ChangedPlace, ...], _FEW] = ()
    cordon: Annotated[tuple[ChangedPlace, ...], _FEW] = ()
    drain: Annotated[tuple[ChangedPlace, ...], _FEW] = ()

    def places(self) -> Iterator[tuple[CordonMode, int, ChangedPlace]]:
        """Yield the places to cordon, drain or uncordon, each with its mode and its index."""
        modes: tuple[CordonMode, ...] = ("uncordon", "cordon", "drain")
        for mode in modes:
            for number, place in enumerate(getattr(self, mode)):
                yield mode, number, place


class _Part(Struct, frozen=True):
    change: Change


_decode: Final = msgspec.json.Decoder(_Part).decode


def read_change(document: JsonObject) -> Change:
    """Return the changes in `change` of a what-if.

    Raises:
        BadMessage: A field is wrong; the error names it, and the expected value.
    """
    text = msgspec.json.encode({"change": document})
    try:
        return _decode(text).change
    except (ValueError, RecursionError) as error:
        raise diagnose(text.decode(), _Part, error, ()) from None

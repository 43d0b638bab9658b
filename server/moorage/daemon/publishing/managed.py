"""Settings and parameters that `management` of a policy changed, as they are stored.

They lie beside the contexts, under names that no context has, and are durable before anybody is
informed. `management` writes them, `context_keeper` reads them at the start.
"""

from typing import Final

import msgspec

from moorage.catalog.embedded.contexts import ContextEntry
from moorage.model import Code, PolicyRef, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject

CHANGES_BYTES_MAX: Final = 256 << 10
"""Of one version and tenant, packed."""
_MARK: Final = "managed "
_read: Final = msgspec.json.Decoder(dict[str, JsonObject]).decode
_unpack: Final = msgspec.msgpack.Decoder(dict[str, JsonObject]).decode


def read_changes(packed: bytes) -> dict[str, JsonObject]:
    """Return the changes by a policy, from a cell's frame.

    Raises:
        ServiceError: `policy_bad_output`: it cannot be read.
    """
    try:
        changes = _read(packed)
    except msgspec.MsgspecError as error:
        reason = f"what the policy changed cannot be stored: {error}"
        raise ServiceError(Code.POLICY_BAD_OUTPUT, reason) from error
    return {name: changes[name] for name in ("settings", "parameters") if changes.get(name)}


def changes_entry(ref: PolicyRef, tenant: Tenant, changes: dict[str, JsonObject]) -> ContextEntry:
    """Return changes as the disk has them; empty bytes where there are none any more.

    Raises:
        ServiceError: `too_large`.
    """
    packed = msgspec.msgpack.encode(changes) if changes else b""
    if len(packed) > CHANGES_BYTES_MAX:
        reason = f"the policy's changes have {len(packed)} bytes, packed"
        raise ServiceError(Code.TOO_LARGE, reason, expected=f"at most {CHANGES_BYTES_MAX} bytes")
    return (f"{_MARK}{ref.uri} {ref.digest}", tenant), 0, packed


def read_changes_entry(entry: ContextEntry) -> tuple[str, str, str, dict[str, JsonObject]] | None:
    """Return URI, digest, tenant and changes; None for a context."""
    (version, tenant), _, packed = entry
    if not version.startswith(_MARK):
        return None
    uri, _, digest = version.removeprefix(_MARK).rpartition(" ")
    return uri, digest, tenant, _unpack(packed)

"""Operations of authors on their policies: `management` calls, and printed output."""

from typing import Final

import msgspec

from moorage.catalog.embedded.contexts import ContextEntry
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.daemon.answers import error_of
from moorage.daemon.policies.finder import code_of, fetch_policy
from moorage.model import Code, PolicyRef, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox

UNDO: Final = "moorage:undo"
"""An action that the server carries out itself: it undoes a tenant's changes by `management`."""


CHANGES_BYTES_MAX: Final = 256 << 10
"""Maximum bytes of the packed changes of one version and tenant."""
_MARK: Final = "managed "
_read: Final = msgspec.json.Decoder(dict[str, JsonObject]).decode
_unpack: Final = msgspec.msgpack.Decoder(dict[str, JsonObject]).decode


class Management:
    """Runs `management(action, data)` of policies, and shows their output.

    Args:
        elsewhere: Whether another server executes policies and stores their state.
    """

    def __init__(self, catalog: Catalog, sandbox: Sandbox, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._catalog = catalog
        self._sandbox = sandbox

    async def run(self, uri: str, tenant: Tenant, action: str, data: JsonObject) -> JsonValue:
        """Call a policy's `management`; store its changes, and return its value as plain JSON.

        Args:
            uri: A version, an alias, or a bare name.
            tenant: The tenant that the policy acts for.
            action: The first argument of `management`.
            data: The second argument of `management`.

        Raises:
            ServiceError: `unknown_policy`, `unavailable`, `unsupported` where the policy has no
                `management`, or the fault of the policy.
        """
        record = await fetch_policy(self._catalog, uri)
        if self._elsewhere:
            reason = f"another server executes {record.ref.uri} and does not support management"
            raise ServiceError(Code.UNSUPPORTED, reason, field="policy_rule_uri")
        if action == UNDO:
            return {"undone": await self._undo(record, tenant)}
        try:
            code = code_of(record)
            value, packed = await self._sandbox.manage_and_tell(code, tenant, action, data)
        except PolicyFault as fault:
            raise error_of(fault.refusal) from fault
        if packed:
            await self._keep(record, tenant, read_changes(packed))
        return value

    async def _keep(self, record: PolicyRecord, tenant: Tenant, new: dict[str, JsonObject]) -> None:
        """Store the changes by `management`, for later evaluations of this version and tenant."""
        old = self._sandbox.managed.of(record.ref, tenant)
        changes = {name: {**old.get(name, {}), **new.get(name, {})} for name in {*old, *new}}
        if record.schemas is not None:
            record.schemas.overrides(changes.get("parameters", {}), changes.get("settings", {}))
        entry = changes_entry(record.ref, tenant, changes)
        await self._catalog.contexts.save([entry], durable=True)
        self._sandbox.managed.put(record.ref.uri, record.ref.digest, tenant, changes)

    async def _undo(self, record: PolicyRecord, tenant: Tenant) -> JsonValue:
        """Undo a tenant's changes by `management`; return these changes."""
        ref, old = record.ref, self._sandbox.managed.of(record.ref, tenant)
        await self._catalog.contexts.save([changes_entry(ref, tenant, {})], durable=True)
        self._sandbox.managed.put(ref.uri, ref.digest, tenant, {})
        return old

    async def logs(self, uri: str, tenant: Tenant) -> JsonObject:
        """Return recent output and logs of a version, from requests of this tenant.

        If the policy's circuit is open for this tenant, the result has the remaining seconds.

        Raises:
            ServiceError: `unknown_policy`, `unavailable`.
        """
        ref = (await fetch_policy(self._catalog, uri)).ref
        circuit = self._sandbox.open_circuit(ref, tenant)
        entry = None
        if circuit is not None:
            entry = {"overruns": circuit.overruns, "retry_after_seconds": round(circuit.seconds, 1)}
        return {
            "policy_rule_uri": ref.uri,
            "printed": self._sandbox.output(ref, tenant),
            "rests": entry,
            "changed": self._sandbox.managed.of(ref, tenant),
        }


def read_changes(packed: bytes) -> dict[str, JsonObject]:
    """Decode a policy's changes from a cell's frame.

    Raises:
        ServiceError: `policy_bad_output`: the frame cannot be read.
    """
    try:
        changes = _read(packed)
    except msgspec.MsgspecError as error:
        reason = f"the policy's changes cannot be stored: {error}"
        raise ServiceError(Code.POLICY_BAD_OUTPUT, reason) from error
    return {name: changes[name] for name in ("settings", "parameters") if changes.get(name)}


def changes_entry(ref: PolicyRef, tenant: Tenant, changes: dict[str, JsonObject]) -> ContextEntry:
    """Encode a policy's changes for the store; empty bytes if there are no changes.

    Raises:
        ServiceError: `too_large`: the changes exceed `CHANGES_BYTES_MAX`.
    """
    packed = msgspec.msgpack.encode(changes) if changes else b""
    if len(packed) > CHANGES_BYTES_MAX:
        reason = f"the policy's changes have {len(packed)} bytes, packed"
        raise ServiceError(Code.TOO_LARGE, reason, expected=f"at most {CHANGES_BYTES_MAX} bytes")
    return (f"{_MARK}{ref.uri} {ref.digest}", tenant), 0, packed


def read_changes_entry(entry: ContextEntry) -> tuple[str, str, str, dict[str, JsonObject]] | None:
    """Return URI, digest, tenant and changes of a stored entry; None if it is a context."""
    (version, tenant), _, packed = entry
    if not version.startswith(_MARK):
        return None
    uri, _, digest = version.removeprefix(_MARK).rpartition(" ")
    return uri, digest, tenant, _unpack(packed)

"""An entry of the audit log: caller, action, address and outcome."""

import msgspec

from moorage.records.json_values import JsonObject, JsonValue


class AuditEntry(msgspec.Struct, gc=False, omit_defaults=True):
    """One entry; the log gives it a number and the hash of the chain.

    Args:
        at: When it happened, in seconds since the epoch.
        what: What was done, e.g. `lease.granted`.
        who: Tenant of the caller; `moored` for the server itself, empty if it is unknown.
        role: Role of the caller.
        token: Name of the caller's token, where it has one.
        remote: Address that the caller connects from.
        about: What it was done to, by name: lease, policy, cluster, tenant, …
        before: What held before, where that is known.
        after: What holds now.
        why: Reason, such as the version of the policy that decided.
        seq: Number of the fact in the ledger that it is about, known once that is durable. At a
            start: of the last fact.
        recovered: Noted at the next start, as a kill came before; the caller is unknown then.
    """

    at: float
    what: str
    who: str = ""
    role: str = ""
    token: str = ""
    remote: str = ""
    about: JsonObject = {}  # msgspec copies it.
    before: JsonValue = None
    after: JsonValue = None
    why: str = ""
    seq: int = 0
    recovered: bool = False

"""An entry of the audit log: caller, action, address and outcome."""

import msgspec

from moorage.records.json_values import JsonObject, JsonValue


class AuditEntry(msgspec.Struct, gc=False, omit_defaults=True):
    """An entry of the audit log; the log adds the number and the hash of the chain.

    Args:
        at: The time of the event, in seconds since the epoch.
        what: The action, e.g. `lease.granted`.
        who: Tenant of the caller; `moored` for the server itself, empty if it is unknown.
        role: Role of the caller.
        token: Name of the caller's token, if the token has a name.
        remote: The caller's network address.
        about: The objects of the action, by kind: lease, policy, cluster, tenant, …
        before: The values before the action, if known.
        after: The values after the action.
        why: Reason, such as the version of the policy that decided.
        seq: Number of the action's fact in the ledger, known once the fact is durable. At a start:
            the number of the last fact.
        recovered: Whether the next start recorded the action, since the server was killed before;
            the caller is unknown then.
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

"""Specifies the WebSocket for programs: JSON Schemas of all messages, and AsyncAPI.

The schemas are generated from the types in `messages` and `records.replies`. `web` serves the
schemas; the TypeScript client is generated from them.
"""

import inspect
import json
from functools import cache
from typing import Any, Final

import msgspec

from moorage.model import Share
from moorage.protocol import messages
from moorage.protocol import messages as m
from moorage.protocol.messages import AllocationRequest, BlockRequest, Status, Why
from moorage.records import replies
from moorage.records.fields import Sparse
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.leases import Lease as LeaseAnswer

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
MESSAGES: Final[dict[str, type[messages.Message]]] = {
    "allocate": AllocationRequest,
    "block": BlockRequest,
    **messages.OPERATIONS,
}
"""The messages that a client may send, by the name of the operation."""
_PLACEMENT: Final = (Share, list[Share])
ANSWERS: Final[dict[type[m.Message], tuple[JsonValue, ...]]] = {
    m.AllocationRequest: (Any,),
    m.BlockRequest: (Any,),
    m.Release: _PLACEMENT,
    m.Renew: _PLACEMENT,
    m.Flush: (replies.FlushedLeases,),
    m.Cordon: (replies.OutOfService,),
    m.Drain: (replies.OutOfService,),
    m.Uncordon: (replies.OutOfService,),
    m.ForgetMachine: (replies.OutOfService,),
    m.ReserveNodes: (replies.ReservationAnswer,),
    m.UnreserveNodes: (replies.ReservationAnswer,),
    m.ReservationListing: (replies.ReservationPage,),
    m.SetQuota: (replies.QuotaState,),
    m.RemoveQuota: (replies.QuotaState,),
    m.QuotaListing: (replies.QuotaPage,),
    m.Status: (*_PLACEMENT, replies.WaiterStatus),
    m.Why: (replies.Reasons,),
    m.Cancel: (replies.CancelledRequest,),
    m.QueueListing: (replies.QueuePage,),
    m.LeaseListing: (replies.LeasePage,),
    m.FleetListing: (replies.ClusterPage, replies.NodePage),
    m.DecisionListing: (replies.DecisionPage,),
    m.DecisionFleet: (replies.RecalledFleet,),
    m.PastFleet: (replies.PastFleetAnswer,),
    m.Manage: (Any,),
    m.Logs: (replies.OutputPart,),
    m.Exec: (replies.ExecutionAnswer,),
    m.Files: (replies.RunFileList, replies.FilePart),
    m.WhatIf: (replies.Consequences,),
    m.WatchTopics: (replies.WatchedTopics,),
    m.Resume: (replies.ResumedSession,),
}
"""The types of `data` in the reply to each message; `Any` is a policy's own answer."""
_TYPES: Final = tuple(
    dict.fromkeys(
        (
            *MESSAGES.values(),
            replies.FailureMessage,
            replies.NewsMessage,
            LeaseAnswer,
            *(kind for kinds in ANSWERS.values() for kind in kinds if kind is not Any),
        )
    )
)
_WIRE_NAMES: Final = {
    "Lease": "LeaseAnswer",
    "Notice": "NoticeAnswer",
    "Share": "ShareObject",
    "Workload": "WorkloadAnswer",
}
_SENT: Final = frozenset(kind.__name__ for kind in MESSAGES.values())
_DESCRIPTION: Final = """\
Each JSON text message gets one JSON reply, which carries the `id` of the message. The server
answers a socket's messages with ids concurrently, and the others in order. If the server has
tokens configured, open the socket with `Authorization: Bearer <token>`.
"""


_OF_OPERATIONS: Final = {
    "action": "The `action` argument of the policy's `management`.",
    "after": "The `next` of the previous page.",
    "at": "The moment of the fleet to show.",
    "attempt": "The number of the workload's start; 0: the last start.",
    "beside": "Other leases that the dry run assumes to end, too.",
    "borrow": "The unused quota of others that the tenant may hold as well; left out: nothing.",
    "change": "The changes to assume: nodes, cordons, drains, quotas, weights and policies.",
    "cluster": "The id of a cluster.",
    "clusters": "The clusters to choose nodes from; left out or empty: all.",
    "command": "The program and its arguments.",
    "data": "The `data` argument of the policy's `management`.",
    "dry_run": "Report the effects, and change nothing.",
    "encoding": "How the reply encodes the output.",
    "ends_at": "The end of the reservation.",
    "environment": "Environment variables to add to the workload's own.",
    "filters": "The values that each listed row must have, by field name.",
    "id": "Echoed in the reply; messages with ids are answered concurrently.",
    "input": "The block, and the policies that place it.",
    "lapse_seconds": "The reservation ends these seconds after its start if unused; 0: never.",
    "lease": "The id of the lease.",
    "lend": "The tenant's unused quota that others may hold; left out: all of it.",
    "limit": "The most objects on a page.",
    "min_revision": "The `revision` of an earlier answer; a standby waits for that fact.",
    "mode": "Whether to only select clusters, or also to place the block; neither holds anything.",
    "next": "Another name of `after`.",
    "node": "The id of a node of the cluster; left out: the whole cluster.",
    "nodes": "Also list what each candidate node lacks, in pages.",
    "nominal": "The tenant's own quota; left out: no limit.",
    "notice_seconds": "How long borrowed leases may stay once the tenant needs its quota.",
    "offset": "The first byte to return.",
    "path": "A file in the run's folder; left out: list all files.",
    "policy_rule_uri": "The policy, or an alias of it.",
    "project": "A project of the tenant; left out: the tenant as a whole.",
    "reason": "The reason that people are shown.",
    "request": "The id of the request; in `whatif`, the request itself.",
    "reservation": "The id of the reservation.",
    "resources": "The resources to reserve.",
    "seconds": "How long leases that do not move may stay; left out: until their own end.",
    "session": "The session's id: the header `Moorage-Session` of its handshake.",
    "sort": "The order of the leases over all pages; left out: by the time of the grant.",
    "starts_at": "The start of the reservation.",
    "state": "Only list leases in this state.",
    "strict": "Refuse unknown fields; operations also refuse them with `false`.",
    "tenant": "The tenant of the quota or of the reservation.",
    "timeout_seconds": "The time limit of the command, after which it is killed.",
    "token": "The lease's token, from the reply that granted the lease.",
    "topics": "The names of the topics to watch.",
    "ttl_seconds": "How long the lease lasts from now on.",
    "user": "The user that runs the command in a container.",
    "wait_seconds": "How long to wait for output at `offset`.",
    "weight": "A tenant with twice the weight may hold twice as much before others go first.",
    "workdir": "The command's working directory; left out: the workload's.",
}
_OF_REQUESTS: Final = {
    "alternatives": "Other acceptable `resources`, in the order of preference.",
    "clusters": "The clusters to choose from; left out or empty: all live ones.",
    "deadline_seconds": "The time limit of one evaluation of the policy.",
    "dry_run": "Decide, and hold nothing.",
    "explain": "Give the reasons for the answer in `reasons`.",
    "filter": "A filter that selects clusters if `clusters` names none.",
    "id": "Echoed in the reply; messages with ids are answered concurrently.",
    "inputs": "The input of the policy.",
    "lease": "Hold the placement as a lease; left out: the answer is advice.",
    "parameters": "Parameters in place of the policy's defaults.",
    "policy_rule_uri": "The policy that decides, or an alias of it.",
    "provision": "The workload to start on the placement.",
    "resources": "The resources that must fit; left out: the policy decides.",
    "search": "A search that selects clusters if there is no filter.",
    "settings": "Settings in place of the policy's defaults.",
    "stream": "Report the request's progress in separate messages.",
    "strict": "Refuse the message if a field has no meaning; otherwise the reply has a warning.",
    "traceparent": "The client's span in W3C Trace Context; the server continues its trace.",
}
"""Descriptions of the fields of messages. Types of message parts describe theirs in docstrings."""
_LISTED: Final = "\nAttributes:\n"


def explain(name: str, schema: JsonObject) -> None:
    """Copy the attribute descriptions of a type's docstring to the properties of its schema.

    Args:
        name: The name of the type.
        schema: The schema of the type; changed in place.
    """
    if "description" not in schema:
        return
    text, _, listed = inspect.cleandoc(schema["description"]).partition(_LISTED)
    schema["description"] = text.rstrip()
    meanings = dict(_OF_OPERATIONS) if name in _SENT else {}
    if name == AllocationRequest.__name__:
        meanings = dict(_OF_REQUESTS)
    for line in listed.splitlines():
        field, _, meaning = line.strip().partition(": ")
        meanings[field] = meaning
    for field, shown in schema.get("properties", {}).items():
        if field in meanings:
            expected = shown.get("description", "")
            shown["description"] = meanings[field] + (f" Expected: {expected}." if expected else "")


@cache
def schemas(reference: str = "#/$defs/{name}") -> dict[str, JsonObject]:
    """Return the schemas of all messages and of their parts, by name.

    Args:
        reference: How one schema refers to another.
    """
    _, found = msgspec.json.schema_components(_TYPES, ref_template=reference)
    for name, schema in found.items():
        explain(name, schema)
    for sparse in Sparse.__subclasses__():
        _sparse(found[sparse.__name__])
    placement = found["AllocationRequest"]
    adhoc = {"description": "true", "const": True}
    placement["properties"] = {"adhoc": adhoc, **placement["properties"]}
    placement["required"] = ["adhoc", *placement["required"]]
    for name in (Status.__name__, Why.__name__):
        found[name]["oneOf"] = [{"required": ["lease"]}, {"required": ["request"]}]
    for kind in MESSAGES.values():
        if kind is not BlockRequest:  # Its reply has no envelope.
            found[f"{kind.__name__}Reply"] = _reply(kind, reference)
    return dict(sorted(_with_wire_names(found, reference).items()))


def _with_wire_names(found: JsonObject, reference: str) -> JsonObject:
    """Rename schemas of records to the names that clients use in messages."""
    text = json.dumps(found)
    for name, wire_name in _WIRE_NAMES.items():
        old, new = (json.dumps(reference.format(name=each)) for each in (name, wire_name))
        text = text.replace(old, new).replace(f'"title": "{name}"', f'"title": "{wire_name}"')
    return {_WIRE_NAMES.get(name, name): schema for name, schema in json.loads(text).items()}


def _sparse(schema: JsonObject) -> None:
    """Describe a reply that omits fields at their defaults: such a field is never null."""
    for part in schema["properties"].values():
        if "default" in part and part.pop("default") is None:
            kinds = [kind for kind in part.pop("anyOf") if kind != {"type": "null"}]
            part |= kinds[0]


def _reply(kind: type[messages.Message], reference: str) -> JsonObject:
    """Return the schema of the successful reply to a message."""
    kinds = ANSWERS[kind]
    parts, _ = msgspec.json.schema_components(kinds, ref_template=reference)
    data = parts[0] if len(parts) == 1 else {"anyOf": list(parts)}
    failure = msgspec.json.schema_components((replies.FailureMessage,), ref_template=reference)[1]
    shared = {**failure["FailureMessage"]["properties"]}
    for name in ("success", "message", "error"):
        del shared[name]
    return {
        "title": f"{kind.__name__}Reply",
        "description": f"The successful reply to `{kind.__name__}`.",
        "type": "object",
        "properties": {"success": {"const": True}, "data": data, **shared},
        "required": ["success", "data"],
    }


@cache
def documents() -> dict[str, JsonObject]:
    """Return self-contained schemas, each with all schemas that it refers to."""
    known = schemas()
    return {
        name: {"$schema": DIALECT, **schema, "$defs": {each: known[each] for each in within}}
        if (within := _within(schema))
        else {"$schema": DIALECT, **schema}
        for name, schema in known.items()
    }


def _within(schema: JsonObject) -> list[str]:
    """Return the names of all schemas that a schema refers to, directly or indirectly."""
    known, found = schemas(), set[str]()
    todo: list[JsonValue] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo.extend(part)
        elif isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found.add(name)
                todo.append(known[name])
            todo.extend(part.values())
    return sorted(found)


def asyncapi(version: str) -> JsonObject:
    """Return the AsyncAPI 3 document of the socket."""
    made = schemas("#/components/schemas/{name}")
    pushed = (replies.FailureMessage, replies.NewsMessage)
    names = [
        *(kind.__name__ for kind in MESSAGES.values()),
        *(name for name in made if name.endswith("Reply")),
        *(kind.__name__ for kind in pushed),
        "BlockRequestReply",
    ]
    described = {name: _message(name, made.get(name)) for name in names}
    channel = {"$ref": "#/channels/socket"}
    operations: JsonObject = {
        name: {
            "action": "receive",
            "channel": channel,
            "summary": (inspect.getdoc(kind) or name).partition("\n")[0],
            "messages": [_on_channel(kind.__name__)],
            "reply": {
                "channel": channel,
                "messages": [_on_channel(f"{kind.__name__}Reply"), _on_channel("FailureMessage")],
            },
        }
        for name, kind in MESSAGES.items()
    }
    operations["news"] = {
        "action": "send",
        "channel": channel,
        "summary": "News of the topics that `watch` named.",
        "messages": [_on_channel("NewsMessage")],
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Moorage", "version": version, "description": _DESCRIPTION},
        "defaultContentType": "application/json",
        "servers": {"local": {"host": "127.0.0.1:8765", "protocol": "ws"}},
        "channels": {
            "socket": {
                "address": "/",
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
            }
        },
        "operations": operations,
        "components": {"messages": described, "schemas": made},
    }


def _message(name: str, schema: JsonObject | None) -> JsonObject:
    if schema is None:
        summary = "The decision of the policies in the block's document, without an envelope."
        return {"name": name, "summary": summary, "payload": {}}
    summary = schema["description"].partition("\n")[0]
    return {"name": name, "summary": summary, "payload": {"$ref": f"#/components/schemas/{name}"}}


def _on_channel(name: str) -> dict[str, str]:
    return {"$ref": f"#/channels/socket/messages/{name}"}

"""The fields of the records: their types, limits, and descriptions for people.

Messages and replies have these fields. A bound is written once: msgspec enforces it, and the
description beside it becomes the `expected` of the failure reply to a client.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from moorage.records.json_values import JsonObject

ID_CHARS_MAX: Final = 128
"""At most this many characters of a message's `id`, a lease or request id, a token, key or
cursor."""
URI_CHARS_MAX: Final = 512
"""At most this many characters of a policy's URI."""
NAME_CHARS_MAX: Final = 256
"""At most this many characters of a cluster id, a GPU model, a backend, action or topic."""
CLUSTERS_MAX: Final = 10_000
"""At most this many candidate clusters in a request; setting `candidates_max` may allow fewer."""
LEASES_MAX: Final = 100
"""At most this many leases that one dry run assumes to end together."""
MODELS_MAX: Final = 64
"""At most this many GPU models in one request."""
TOPICS_MAX: Final = 64
"""At most this many topics in one `watch`."""
REQUIREMENTS_MAX: Final = 64
"""At most this many label requirements in one request."""
ALTERNATIVES_MAX: Final = 7
"""At most this many alternatives in one request, in addition to `resources`."""
LABEL_VALUES_MAX: Final = 1024
"""At most this many values in one label requirement."""
GPUS_MAX: Final = 1024
"""At most this many GPUs per node in one request."""
NODES_MAX: Final = 1024
"""At most this many nodes in one gang."""
CPU_MILLI_MAX: Final = 1_000_000_000
MEMORY_MIB_MAX: Final = 1_000_000_000_000
DEADLINE_SECONDS_MAX: Final = 3600
"""At most this many seconds per evaluation; `policy_deadline_seconds_max` may allow less."""
PRIORITY_MAX: Final = 1_000_000
"""Largest priority; the smallest is its negative."""
MOMENT_MAX: Final = 253_402_300_799
"""The end of the year 9999, in seconds since the epoch."""
TTL_SECONDS: Final = 300.0
"""Default TTL of a lease, in the protocol, the library and the command line."""
TTL_SECONDS_MAX: Final = 604_800
"""A lease lasts at most seven days from its grant or last renewal."""
WAIT_SECONDS_MAX: Final = 604_800
"""A request waits at most seven days."""
COMMAND_PARTS_MAX: Final = 4096
"""At most this many parts of one command, and as many environment variables for it."""
COMMAND_CHARS_MAX: Final = 131_072
"""At most this many characters of one part or variable: the limit of Linux."""
LOG_WAIT_SECONDS_MAX: Final = 30
"""At most this many seconds that one `logs` waits for new output."""
ATTEMPTS_MAX: Final = 100
"""At most this many starts of one workload that a request may allow."""
EXEC_SECONDS_MAX: Final = 3600
"""At most this many seconds that one `exec` may run."""
PAGE_MAX: Final = 1000
"""At most this many objects on one page of a list."""
SHOWN_NAMES: Final = {
    "cpu_milli": "CPU (milli)",
    "gpu_memory_mib": "GPU memory (MiB)",
    "gpu_milli": "GPU share (milli)",
    "gpus": "GPUs",
    "memory_mib": "memory (MiB)",
    "models": "GPU models",
    "policy_rule_uri": "policy",
    "ttl_max_seconds": "longest lease (seconds)",
    "where": "`where`",
}
"""Names of fields in sentences for people; other fields use their names, with spaces."""
DEPTH_MAX: Final = 128
"""At most this many nested arrays and objects in one message."""

_UNSHOWN: Final = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
)
UNSHOWN: Final = f"[{_UNSHOWN}]"
"""Control, zero-width and bidirectional characters, as a regular expression. No text that other
people see, in a log, terminal, console or metric, may have any of them."""
_ALL_SHOWN: Final = rf"[^{_UNSHOWN}]*(?![\s\S])"
SHOWN: Final = f"^{_ALL_SHOWN}"
"""A text without the characters in `UNSHOWN`."""

_INT64_MAX: Final = 2**63 - 1
_NAMED = Annotated[str, Meta(pattern=rf"^(?=\s*\S){_ALL_SHOWN}", max_length=NAME_CHARS_MAX)]
_IDENTIFIER = f"a string of 1 to {ID_CHARS_MAX} characters"
_OBJECT = Meta(description="an object")


class Sparse(Struct, frozen=True, omit_defaults=True):
    """A reply that omits fields with their default values."""


ESSENTIAL: Final = Meta(extra={"essential": True})
"""Marks a field without which a record is invalid; a lenient reader fills in all others."""


def values(*known: str) -> Meta:
    """List the known values of a text in a reply; clients also accept values of newer servers."""
    return Meta(extra_json_schema={"enum": sorted(known)})


Seconds = Annotated[float, Meta(description="Seconds since the epoch.")]
StartNumber = Annotated[int, Meta(ge=0, le=ATTEMPTS_MAX)]
"""The number of the workload's start that a reply describes."""
ExitCode = Annotated[int, Meta(ge=-64, le=255)]
"""Exit code of a process that ended; negative: the signal that ended it."""
Next = Annotated[str | None, Meta(description="`after` of the next page; null: this is the last.")]
MessageId = Annotated[
    Annotated[str, Meta(max_length=ID_CHARS_MAX)]
    | Annotated[int, Meta(ge=-_INT64_MAX - 1, le=_INT64_MAX)]
    | None,
    Meta(description=f"a string of at most {ID_CHARS_MAX} characters, or a 64-bit whole number"),
]
Uri = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=URI_CHARS_MAX,
        pattern=SHOWN,
        description=f"a policy's URI, `name:version-tag`, of at most {URI_CHARS_MAX} characters",
    ),
]
Identifier = Annotated[
    str, Meta(min_length=1, max_length=ID_CHARS_MAX, pattern=SHOWN, description=_IDENTIFIER)
]
OptionalIdentifier = Annotated[
    str, Meta(max_length=ID_CHARS_MAX, pattern=SHOWN, description=_IDENTIFIER)
]
Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=NAME_CHARS_MAX,
        pattern=SHOWN,
        description=f"a string of 1 to {NAME_CHARS_MAX} characters",
    ),
]
OptionalName = Annotated[
    str,
    Meta(
        max_length=NAME_CHARS_MAX,
        pattern=SHOWN,
        description=f"a string of at most {NAME_CHARS_MAX} characters",
    ),
]
Document = Annotated[JsonObject, _OBJECT]
OptionalDocument = Annotated[JsonObject | None, _OBJECT]
Flag = Annotated[bool, Meta(description="true or false")]
TraceParent = Annotated[
    str,
    Meta(
        max_length=NAME_CHARS_MAX,
        description=f"a W3C traceparent, of at most {NAME_CHARS_MAX} characters",
    ),
]
"""An invalid traceparent starts a new trace, as W3C Trace Context says."""
Clusters = Annotated[
    Annotated[tuple[_NAMED | int, ...], Meta(max_length=CLUSTERS_MAX)] | None,
    Meta(description=f"a list of at most {CLUSTERS_MAX} cluster ids (strings or whole numbers)"),
]
Models = Annotated[
    tuple[_NAMED, ...],
    Meta(max_length=MODELS_MAX, description=f"a list of at most {MODELS_MAX} GPU models"),
]
Leases = Annotated[
    tuple[Identifier, ...],
    Meta(max_length=LEASES_MAX, description=f"a list of at most {LEASES_MAX} lease ids"),
]
Operator = Annotated[
    Literal["In", "NotIn", "Exists", "DoesNotExist"],
    Meta(description='"In", "NotIn", "Exists" or "DoesNotExist"'),
]
LabelValues = Annotated[
    tuple[Annotated[str, Meta(max_length=NAME_CHARS_MAX, pattern=SHOWN)], ...],
    Meta(max_length=LABEL_VALUES_MAX, description=f"a list of at most {LABEL_VALUES_MAX} strings"),
]
Topics = Annotated[
    tuple[_NAMED, ...],
    Meta(min_length=1, max_length=TOPICS_MAX, description=f"a list of 1 to {TOPICS_MAX} topics"),
]
Command = Annotated[
    tuple[Annotated[str, Meta(max_length=COMMAND_CHARS_MAX)], ...],
    Meta(
        min_length=1,
        max_length=COMMAND_PARTS_MAX,
        description=f"a list of 1 to {COMMAND_PARTS_MAX} strings, the program first",
    ),
]
Variables = Annotated[
    dict[str, str], Meta(max_length=COMMAND_PARTS_MAX, description="an object of strings")
]
RunPath = Annotated[
    str, Meta(max_length=1024, description="a path within the run's folder, of 1024 characters")
]
FileOffset = Annotated[
    int, Meta(ge=0, le=_INT64_MAX, description="a whole number of bytes, 0 or more")
]
Revision = Annotated[
    int, Meta(ge=0, le=_INT64_MAX, description="`revision` of an answer, a whole number")
]
Offset = Annotated[
    int,
    Meta(
        ge=-_INT64_MAX - 1,
        le=_INT64_MAX,
        description="a number of bytes, below 0 counted from the end",
    ),
]
LogWaitSeconds = Annotated[
    float,
    Meta(
        ge=0, le=LOG_WAIT_SECONDS_MAX, description=f"seconds between 0 and {LOG_WAIT_SECONDS_MAX}"
    ),
]
ExecSeconds = Annotated[
    float,
    Meta(gt=0, le=EXEC_SECONDS_MAX, description=f"seconds above 0, at most {EXEC_SECONDS_MAX}"),
]
Filters = Annotated[
    dict[str, str | int | float | bool],
    Meta(description="an object whose values are strings, numbers or booleans"),
]
Gpus = Annotated[
    int, Meta(ge=0, le=GPUS_MAX, description=f"a whole number of GPUs between 0 and {GPUS_MAX}")
]
GpuMilli = Annotated[
    int,
    Meta(ge=1, le=1000, description="a whole number between 1 and 1000 (thousandths of each GPU)"),
]
CpuMilli = Annotated[
    int,
    Meta(
        ge=0,
        le=CPU_MILLI_MAX,
        description=f"a whole number between 0 and {CPU_MILLI_MAX} (thousandths of a core)",
    ),
]
GPU_MILLI_MAX: Final = 1_000_000_000
QuotaMilli = Annotated[
    int,
    Meta(
        ge=0,
        le=GPU_MILLI_MAX,
        description=f"a whole number between 0 and {GPU_MILLI_MAX} (thousandths of a GPU)",
    ),
]
Weight = Annotated[
    float, Meta(ge=0.001, le=1_000_000, description="a number between 0.001 and 1000000")
]
MemoryMib = Annotated[
    int,
    Meta(
        ge=0, le=MEMORY_MIB_MAX, description=f"a whole number of MiB between 0 and {MEMORY_MIB_MAX}"
    ),
]
Nodes = Annotated[
    int, Meta(ge=1, le=NODES_MAX, description=f"a whole number of nodes between 1 and {NODES_MAX}")
]
OnFailure = Annotated[Literal["end", "requeue"], Meta(description='"end" or "requeue"')]
Attempts = Annotated[
    int, Meta(ge=1, le=ATTEMPTS_MAX, description=f"a whole number from 1 to {ATTEMPTS_MAX}")
]
AttemptNumber = Annotated[int, Meta(ge=0, description="a whole number, 0 or more")]
Encoding = Annotated[Literal["text", "base64"], Meta(description='"text" or "base64"')]
Topology = Annotated[
    Literal["", "nvlink", "numa", "rack", "zone"],
    Meta(description='"nvlink", "numa", "rack", "zone" or ""'),
]
ApartTopology = Annotated[
    Literal["node", "rack", "zone"], Meta(description='"node", "rack" or "zone"')
]
LeaseOrder = Annotated[
    Literal[
        "",
        "granted_at",
        "-granted_at",
        "expires_at",
        "-expires_at",
        "gpus",
        "-gpus",
        "state",
        "tenant",
        "project",
        "policy_rule_uri",
        "place",
        "node",
        "node_ends",
        "node_gpus",
    ],
    Meta(
        description="one of granted_at, expires_at and gpus, each also with - before it for the"
        " largest first, state, tenant, project, policy_rule_uri, place; node by node: node,"
        ' node_ends, node_gpus; or ""'
    ),
]
TtlSeconds = Annotated[
    float,
    Meta(
        ge=1, le=TTL_SECONDS_MAX, description=f"a number of seconds between 1 and {TTL_SECONDS_MAX}"
    ),
]
KeepSeconds = Annotated[
    float,
    Meta(
        ge=0, le=TTL_SECONDS_MAX, description=f"a number of seconds between 0 and {TTL_SECONDS_MAX}"
    ),
]
WaitSeconds = Annotated[
    float,
    Meta(
        ge=0,
        le=WAIT_SECONDS_MAX,
        description=f"a number of seconds between 0 and {WAIT_SECONDS_MAX}",
    ),
]
Moment = Annotated[
    float, Meta(ge=0, le=MOMENT_MAX, description="a time, in seconds since the epoch")
]
DeadlineSeconds = Annotated[
    float,
    Meta(
        gt=0,
        le=DEADLINE_SECONDS_MAX,
        description=f"a number of seconds above 0, at most {DEADLINE_SECONDS_MAX}",
    ),
]
Priority = Annotated[
    int,
    Meta(
        ge=-PRIORITY_MAX,
        le=PRIORITY_MAX,
        description=f"a whole number between {-PRIORITY_MAX} and {PRIORITY_MAX}",
    ),
]
Mode = Annotated[
    Literal["dry_run", "select_clusters"], Meta(description='"dry_run" or "select_clusters"')
]
PageLimit = Annotated[
    int, Meta(ge=1, le=PAGE_MAX, description=f"a whole number between 1 and {PAGE_MAX}")
]


def field_title(path: str) -> str:
    """Return the name of a field in sentences for people, by its name or dotted path."""
    name = path.rpartition(".")[2]
    return SHOWN_NAMES.get(name) or name.replace("_", " ")

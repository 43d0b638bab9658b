"""All limits of the sandbox: those that settings can change (`Limits`), and fixed ones.

The host enforces the limits. The zygote and the cells get the limits, too, and apply them first, so
that an honest policy gets a clear error instead of a killed process.
"""

from dataclasses import dataclass
from typing import Final

ANSWER_BYTES_MAX: Final = 1 << 20
"""Bytes of JSON of one returned value; a longer one is answered POLICY_BAD_OUTPUT."""
CONTEXT_BYTES_MAX: Final = 256 << 10
"""Bytes of packed `context` of a policy version and tenant; more is answered POLICY_ERROR."""
CONTEXTS_MAX: Final = 4096
"""Contexts in the host process; beyond this number it drops the least recently used one."""
CONTEXTS_PER_CELL_MAX: Final = 256
"""Tenants whose context a cell stores; beyond this number it drops all and gets them again."""
CELL_FRAME_BYTES_MAX: Final = 2 << 20
"""Bytes of one frame from a cell; a longer one violates the protocol."""
INPUT_BYTES_MAX: Final = 16 << 20
"""Bytes of packed plain input of one evaluation; more is refused with TOO_LARGE."""
HOST_FRAME_BYTES_MAX: Final = 64 << 20
"""Bytes of one frame to a cell, such as a fleet snapshot; longer ones are refused."""
SNAPSHOT_BYTES_PER_SECOND: Final = 4 << 20
"""An evaluation gets the extra time that its snapshot takes at this speed, a tenth of the usual."""
PARTS_MAX: Final = 32
"""Changed clusters that a cell gets one by one; if more changed, it gets a whole snapshot."""
CALL_ANSWER_BYTES_MAX: Final = 8 << 20
"""Bytes of a packed answer to an injected client's call; a longer one is an error."""
DOCUMENTS_BYTES_MAX: Final = 32 << 20
"""Bytes of packed documents in one frame; the rest of a batch follows in further frames."""
MESSAGE_CHARACTERS_MAX: Final = 900
"""Characters of a policy's or cell's text in a refusal; the list of importable modules fits."""
NAME_CHARACTERS_MAX: Final = 100
"""Characters of an exception's or file's name in a refusal."""
CALLS_SHOWN_MAX: Final = 8
"""Calls of a policy's traceback that a refusal shows: the innermost ones."""
CALL_CHARACTERS_MAX: Final = 300
"""Characters of one call of a policy's traceback, with its line of source."""
INSTANCES_MAX: Final = 8
"""Instances of a policy per cell, one per set of overrides; the least recently used is dropped."""
OUTSTANDING_MAX: Final = 4096
"""Unsettled lease proposals stored per cell; beyond this number the oldest counts as settled."""
OUTPUT_RING_BYTES_MAX: Final = 64 << 10
"""Bytes of printed and logged text stored per policy version and tenant; the oldest is dropped."""
OUTPUT_RINGS_MAX: Final = 256
"""Pairs of policy version and tenant with stored text; the least recently written is dropped."""
FINDINGS_MAX: Final = 20
"""Maximum findings that one check of a policy reports."""
FETCH_BYTES_MAX: Final = 128 << 20
"""Bytes of packed documents fetched at once; beyond them the policy gets an error."""
PIPELINE_BYTES_MAX: Final = 16 << 20
"""Unanswered bytes sent to a cell; a single evaluation may exceed this."""
KEPT_BYTES_MAX: Final = 64 << 20
"""Packed bytes of documents and answers in a cell's cache, with `KEPT_ENTRY_BYTES` for each."""
KEPT_ENTRY_BYTES: Final = 200
"""Bytes that the cache of a cell needs per entry, beside the entry's own bytes."""
KEPT_SHARE_MAX: Final = 0.25
"""Largest share of a cell's memory that its cache of documents and answers may use."""
DECODED_SHARE_MAX: Final = 1 / 64
"""Largest share of a cell's memory for documents decoded at one time, in packed bytes.

As Python's objects, documents take up to ten times as much."""
AHEAD_MIN, AHEAD_MAX = 16, 1024
"""Documents that a cell prefetches with one that it needs: first number, and maximum."""
AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 16 << 10, 1 << 20
"""Packed bytes that a cell prefetches with a document: first number, and maximum."""
NEWS_MAX: Final = 16
"""Changed documents that are sent together with the notice of their change."""
CALLS_SPENT: Final = -1
"""Status of the answer to a call beyond a limit; it is the evaluation's last answer."""
STALE_MAX: Final = 256
"""Changed documents that are named to a cell; if more changed, it drops all cached ones."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one evaluation, of one cell and of all cells together.

    Args:
        evaluation_seconds: Wall time of one evaluation, without its wait in the cell's pipe and the
            host's own answer time, unless the policy or request sets another; beyond that time the
            cell is killed.
        evaluation_seconds_max: The longest such time that a policy or a request may set.
        load_seconds: Wall time to compile, import and construct a policy.
        calls_seconds: Total time of the host to answer the calls of one evaluation; the
            evaluation's deadline, if that is longer.
        calls_max: Injected-client calls and document fetches of one evaluation that the host
            answers; cached answers do not count. Beyond it the clients report an error.
        calls_per_candidate_max: The same limit per candidate, if that is more.
        memory_mib: Address space that a cell may use on top of its initial address space.
        output_bytes_max: Printed and logged bytes stored of one evaluation.
        cells_max: Living cells; the least recently used idle one makes room.
        cells_per_policy_max: Cells one policy may have while some of them are slow.
        pipeline_max: Consultations in flight to one cell.
        queue_max: Consultations waiting on the host per policy; beyond it the answer is BUSY.
        queue_seconds: How long a consultation may wait on the host; then the answer is BUSY, too.
        demote_seconds: CPU time of one evaluation after which its cell runs at idle priority. On a
            saturated machine the cell then gets next to nothing, so honest policies must stay below
            this time.
        circuit_overruns: Number of evaluations of a policy for one tenant, stopped at their
            deadline and not forgiven yet, at which its circuit opens for that tenant; 0: never. By
            default as many as the failures at which an alias falls back; refusals do not count.
        evaluations_per_cell_max: Evaluations until a cell is replaced (RLIMIT_CPU is cumulative).
        cpu_seconds_per_cell_max: RLIMIT_CPU of a cell, in case the host's timer fails.
        hash_seed: The hash seed of all cells, 1 to 4294967295, for repeatable runs, as it
            decides the order of sets. None: each zygote draws its own.
        spares: Jailed, empty cells in reserve, so that a respawn does not wait for a fork.
    """

    evaluation_seconds: float = 10.0
    evaluation_seconds_max: float = 60.0
    load_seconds: float = 5.0
    calls_seconds: float = 5.0
    calls_max: int = 1000
    calls_per_candidate_max: int = 10
    memory_mib: int = 256
    output_bytes_max: int = 16 << 10
    cells_max: int = 64
    cells_per_policy_max: int = 8
    pipeline_max: int = 32
    queue_max: int = 4096
    queue_seconds: float = 30.0
    demote_seconds: float = 0.1
    circuit_overruns: int = 5
    evaluations_per_cell_max: int = 1_000_000
    cpu_seconds_per_cell_max: int = 3600
    hash_seed: int | None = None
    spares: int = 1

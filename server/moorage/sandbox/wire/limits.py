"""Every bound of the sandbox in one frozen record, and the bounds that are not for tuning.

Read by the host (which enforces), passed on to the zygote and the cells (which obey first, so
that an honest policy gets a clear error instead of a killed process).
"""

from dataclasses import dataclass
from typing import Final

ANSWER_BYTES_MAX: Final = 1 << 20
"""JSON of one returned value; beyond it the answer is POLICY_BAD_OUTPUT."""
CONTEXT_BYTES_MAX: Final = 256 << 10
"""Packed `context` of one policy version and tenant; beyond it the answer is POLICY_ERROR."""
CONTEXTS_MAX: Final = 4096
"""Contexts on the host; the least recently used one is forgotten."""
CONTEXTS_PER_CELL_MAX: Final = 256
"""Tenants whose context a cell remembers; beyond it the cell forgets all and gets them again."""
CELL_FRAME_BYTES_MAX: Final = 2 << 20
"""One frame from a cell; longer ones break the protocol."""
INPUT_BYTES_MAX: Final = 16 << 20
"""Packed plain input of one evaluation (documents to rank); more is refused, with TOO_LARGE."""
HOST_FRAME_BYTES_MAX: Final = 64 << 20
"""One frame to a cell (a snapshot of the fleet is the largest); longer work is refused."""
SNAPSHOT_BYTES_PER_SECOND: Final = 4 << 20
"""How slowly a cell may read a snapshot, on top of the policy's own time: a tenth of the usual."""
PARTS_MAX: Final = 32
"""Changed clusters that a cell gets one by one; of more, it gets a whole snapshot."""
CALL_ANSWER_BYTES_MAX: Final = 8 << 20
"""Packed answer to one injected-client call; beyond it the client reports an error."""
DOCUMENTS_BYTES_MAX: Final = 32 << 20
"""Packed documents sent in one frame; the rest of a batch follows in further frames."""
MESSAGE_CHARACTERS_MAX: Final = 900
"""Text of a policy or its cell in a refusal; the list of importable modules fits."""
NAME_CHARACTERS_MAX: Final = 100
"""Name of an exception or a file of a policy in a refusal."""
CALLS_SHOWN_MAX: Final = 8
"""Innermost calls of a policy that a refusal names."""
CALL_CHARACTERS_MAX: Final = 300
"""Of one such call, with its line of source."""
INSTANCES_MAX: Final = 8
"""Warm instances of a policy per cell, one per combination of overrides; LRU."""
OUTSTANDING_MAX: Final = 4096
"""Unsettled lease proposals remembered per cell; beyond it the oldest counts as settled."""
OUTPUT_RING_BYTES_MAX: Final = 64 << 10
"""Printed and logged text per policy version and tenant; the oldest goes first."""
OUTPUT_RINGS_MAX: Final = 256
"""Policy versions and tenants with stored text; the least recently written goes first."""
FINDINGS_MAX: Final = 20
"""Findings of one check."""
FETCH_BYTES_MAX: Final = 128 << 20
"""Packed documents fetched at once; beyond it the policy gets an error: touch fewer clusters."""
PIPELINE_BYTES_MAX: Final = 16 << 20
"""Bytes sent to a cell and not yet answered, unless it is one single consultation."""
KEPT_BYTES_MAX: Final = 64 << 20
"""Documents and answers that a cell keeps, packed, with `KEPT_ENTRY_BYTES` for each."""
KEPT_ENTRY_BYTES: Final = 200
"""What keeping one takes beside its own bytes, in a dict under its id."""
KEPT_SHARE_MAX: Final = 0.25
"""What that is at most of the memory of a cell."""
DECODED_SHARE_MAX: Final = 1 / 64
"""Packed bytes of the documents that `cluster_data` has decoded at one time, of that memory.

As Python's objects they take up to ten times as much."""
AHEAD_MIN, AHEAD_MAX = 16, 1024
"""Documents that a cell requests with one that it needs: the first time, and at most."""
AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 16 << 10, 1 << 20
"""Their packed bytes together, likewise: they must not delay the first one."""
NEWS_MAX: Final = 16
"""Changed documents that are sent along with the news that they have changed."""
CALLS_SPENT: Final = -1
"""Status of the answer to a call beyond a bound: it is the last one of that evaluation."""
STALE_MAX: Final = 256
"""Changed documents that a cell gets one by one; of more, it forgets all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one evaluation, of one cell and of all cells together.

    Args:
        evaluation_seconds: Wall time of one evaluation at the head of its cell, without the
            host's own answer time, where none names another; beyond it the cell is killed.
        evaluation_seconds_max: The longest that a policy or a request may name.
        load_seconds: Wall time to compile, import and construct a policy.
        calls_seconds: Total time the host spends answering the calls of one evaluation; its own
            deadline, where that is longer.
        calls_max: Injected-client calls and document fetches of one evaluation that the host has
            to answer: what the cell was sent before costs none. Beyond it the clients report an
            error.
        calls_per_candidate_max: As many of them are allowed for each candidate, where that is more.
        memory_mib: Address space a cell may use on top of what it starts with.
        output_bytes_max: Printed and logged bytes stored of one evaluation.
        cells_max: Living cells; the least recently used idle one makes room.
        cells_per_policy_max: Cells one policy may have while some of them are slow.
        pipeline_max: Consultations in flight to one cell.
        queue_max: Consultations waiting on the host per policy; beyond it the answer is BUSY.
        queue_seconds: How long a consultation may wait there; then the answer is BUSY too.
        demote_seconds: CPU time of one evaluation after which its cell runs at idle priority. On a
            saturated machine it then gets next to nothing, so honest policies must stay below it.
        circuit_overruns: Evaluations of a policy that were stopped at their deadline, all at
            requests of one tenant and not forgiven yet, after which it rests for that tenant; 0: it
            never does. By default as many as the failures after which an alias falls back: refusals
            are none.
        evaluations_per_cell_max: Evaluations until a cell is replaced (RLIMIT_CPU is cumulative).
        cpu_seconds_per_cell_max: RLIMIT_CPU of a cell, the last line behind the host's timer.
        hash_seed: The hash seed of all cells, 1 to 4294967295, for repeatable runs, as it
            decides the order of sets. None: each zygote draws its own.
        spares: Jailed, empty cells in reserve, so that a respawn does not wait for a fork.
    """

    evaluation_seconds: float = 1.0
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

"""The host's end of one cell: the pipe, the work in it, and the time of the first work.

`pool` makes cells and gives them work; a cell reports the outcome to its owner. On uvloop the
Protocol interface over a connected socket is nearly twice as fast as `add_reader`, hence this
shape. Nothing here trusts the other end: the first byte that does not fit kills the cell.
"""

import asyncio
import time
from collections import Counter, deque
from typing import Final, Protocol, cast

import msgspec

from moorage.core.state.facts import Refusal
from moorage.model import Code, Tenant
from moorage.records.json_values import JsonValue
from moorage.sandbox.host import answers, priority
from moorage.sandbox.host.cell_sync import CellSync, World
from moorage.sandbox.host.contexts import Contexts
from moorage.sandbox.host.contract import HostServices, Meter, PolicyCode
from moorage.sandbox.host.processes import CellProcess
from moorage.sandbox.host.work import Work, nonces
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import (
    ANSWER_BYTES_MAX,
    CALLS_SPENT,
    CELL_FRAME_BYTES_MAX,
    HOST_FRAME_BYTES_MAX,
    PIPELINE_BYTES_MAX,
    Limits,
)

CALLS_BEYOND_MAX: Final = 16
"""Calls beyond the limit that are refused before the cell is killed: an honest cell makes none."""
LOAD_UNDISTURBED: Final = 0.1
"""Share of the time limit of a load after which the loading cell may be demoted."""
TRACEBACK_SECONDS: Final = 0.005
"""How long a cell may take to write its traceback, once it began."""
TRACEBACK_SECONDS_MAX: Final = 0.1
"""How long a cell at its deadline may take to begin its traceback: the processor may be busy."""
REMOTE_TRACEBACK_SECONDS: Final = (0.1, 1.0)
"""Replaces `TRACEBACK_SECONDS` and `TRACEBACK_SECONDS_MAX` for a cell on another machine."""
TRACEBACK_BYTES_MAX: Final = 16 << 10
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_json: Final = msgspec.json.Decoder().decode
_AboutTheHead = frames.Result | frames.Failed | frames.Call | frames.Want


class Owner(Protocol):
    """The functions of the pool that a cell calls."""

    world: World
    services: HostServices
    limits: Limits
    contexts: Contexts
    counters: Counter[str]
    meter: Meter | None

    def note_jail(self, cell: "Cell", frame: frames.CellJailed) -> None:
        """Handle the report of a new cell on whether its jail is complete."""

    def note_probe(self, cell: "Cell", outcome: str) -> None:
        """Handle the report of a cell that survived the attack that the self-test ordered."""

    def note_load(self, cell: "Cell", work: Work, frame: frames.PolicyLoaded) -> None:
        """Handle the report that a policy was loaded, or has faults."""

    def take_answer(self, cell: "Cell", work: Work, frame: frames.Result, value: JsonValue) -> None:
        """Handle the result of the first work in the cell's pipe."""

    def fail_work(self, cell: "Cell", work: Work, frame: frames.Failed) -> None:
        """Handle the failure of the first work in the cell's pipe."""

    def drop_cell(self, cell: "Cell", cause: str) -> None:
        """Handle the end of a cell; `cause` is `exit`, or how the cell broke the protocol."""


class Cell(asyncio.Protocol):
    """The host's end of one cell.

    Args:
        process: A new process, with its channel; `destroy` kills the process.

    Attributes:
        sent: Work in the pipe; the cell evaluates the first one, which is called the head.
        head_since: The time at which the present head became the head, by the monotonic clock.
        slow: Whether the head has run for longer than some milliseconds; new work goes elsewhere.
        demoted: Whether the cell runs at idle priority.
        retired: Whether the cell gets no new work.
        alive: Whether the cell was neither lost nor killed.
        worker: The worker that the cell runs on; empty: this machine.
    """

    def __init__(self, process: CellProcess, owner: Owner) -> None:
        self.pid, self.worker = process.pid, process.worker
        self.sent: deque[Work] = deque()
        self.head_since = 0.0
        self.slow = self.demoted = self.retired = False
        self.alive = True
        self.code: PolicyCode | None = None
        self.evaluations = 0
        self._process = process
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._reader = frames.FrameReader(CELL_FRAME_BYTES_MAX)
        self._sent_bytes = 0
        self._outgoing: list[bytes] = []
        self._niceness = 0
        self._cpu_mark = -1.0
        self._cpu_counted = 0.0
        self._sync: CellSync | None = None
        self._traceback: bytearray | None = None
        self._where_sent_at = 0.0

    # Methods for the pool ------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether one more consultation may go into the pipe."""
        return (
            self.alive
            and not self.retired
            and len(self.sent) < self._owner.limits.pipeline_max
            and (not self.sent or self._sent_bytes < PIPELINE_BYTES_MAX)
        )

    def probe(self, attack: str) -> None:
        """Order a blank cell to attack its jail."""
        self._write(frames.pack(frames.Probe(attack)))
        self.flush()

    def load(self, work: Work, output_bytes_max: int, *, check: bool) -> None:
        """Make a blank, jailed cell the worker of a policy."""
        code = work.code
        frame = frames.LoadPolicy(
            code.ref.uri,
            dict(code.files),
            code.entry,
            _encode(dict(code.settings)),
            _encode(dict(code.parameters)),
            output_bytes_max,
            check,
        )
        self.code = code
        contexts = Contexts() if check else self._owner.contexts  # A trial stores no context.
        self._sync = CellSync(self._owner.world, contexts, code)
        self._push(work, frames.pack(frame))

    def put(self, work: Work) -> Refusal | None:
        """Put work into the pipe; return the reason if it cannot be sent.

        The frame is built now, so its fleet is that of this moment.
        """
        assert self._sync is not None  # `load` has set it.
        work.nonce = nonces.draw()
        try:
            data = frames.pack(self._sync.frame(work))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Refusal(Code.BAD_MESSAGE, f"the request cannot be packed: {error}", "inputs")
        if len(data) > HOST_FRAME_BYTES_MAX:
            return Refusal(
                Code.TOO_LARGE,
                f"the evaluation needs {len(data)} bytes; at most {HOST_FRAME_BYTES_MAX} fit",
            )
        self._sync.note_sent(work)
        if self._sync.behind:
            data = self._sync.news(self._services(work)) + data
        self._push(work, data)
        return None

    def take_back(self) -> list[Work]:
        """Return the work behind the head; later answers of the cell to it are ignored.

        The cell gets no more work, since it will still begin this work: its owner ends it once the
        head is answered.
        """
        head, *behind = self.sent
        self.sent = deque([head])
        self._sent_bytes = head.size
        self.retired = True
        return behind

    def settle(self, request: str) -> None:
        """Inform the cell, with its next consultation, that a proposal is no longer outstanding."""
        if self._sync is not None and not self._sync.settle(request):
            self.retired = True  # This cell gets no more work, it seems; a new cell starts clean.

    def drop_document(self, cluster_id: str) -> None:
        """Inform the cell, with its next consultation, that its copy of a document is outdated."""
        if self._sync is not None:
            self._sync.drop_document(cluster_id)

    def flush(self) -> None:
        """Write all work put since the last flush, in one piece."""
        if self._outgoing and self._transport is not None and self.alive:
            self._transport.write(
                self._outgoing[0] if len(self._outgoing) == 1 else b"".join(self._outgoing)
            )
            self._outgoing.clear()

    def remaining_seconds(self, now: float) -> float:
        """Return the seconds that the first work may still run; calls of clients do not count."""
        head, limits = self.sent[0], self._owner.limits
        limit = head.seconds_max(limits)
        return limit if head.call is not None else self.head_since + limit - now

    def watch(self, now: float) -> str:
        """Check the time of the first work in the pipe.

        Returns:
            `overrun` if the work is out of time, `hog` if it has used so much processor time that
            its cell is to be demoted.
        """
        head = self.sent[0]
        limits = self._owner.limits
        if head.call is not None:
            if head.calls_seconds + now - head.called_at > self._calls_seconds_max(head):
                head.call.cancel()
            return ""
        if self.remaining_seconds(now) < 0:
            return "overrun" if self._has_traceback(now) else ""
        age, loading = now - self.head_since, head.kind == "load"
        if age < (limits.load_seconds * LOAD_UNDISTURBED if loading else limits.demote_seconds):
            return ""
        self.slow = not loading
        if self.demoted:
            return ""
        burnt = self._process.cpu_seconds()
        if self._cpu_mark < 0:
            self._cpu_mark = burnt
        elif burnt - self._cpu_mark >= limits.demote_seconds:
            return "hog"
        return ""

    def count_burnt(self, *, dead: bool = False) -> None:
        """Report the processor time of the ended work to the meter, if there is a meter.

        For a dead cell, or a cell on a worker, that time is unknown; instead, the time counts for
        which the work was first in the pipe.
        """
        meter = self._owner.meter
        if meter is None or not self.sent:
            return
        head, burnt = self.sent[0], time.monotonic() - self.head_since
        if not (self.worker or dead):
            now = self._process.cpu_seconds()
            burnt, self._cpu_counted = now - self._cpu_counted, now
        if head.kind != "load" and head.sample is None:
            meter.burnt(Tenant(head.tenant), max(0.0, burnt))

    @property
    def traceback(self) -> str:
        """The cell's traceback at its deadline, as the cell wrote it."""
        return bytes(self._traceback or b"").decode(errors="replace")

    def _has_traceback(self, now: float) -> bool:
        """Request the line that the cell executes; return whether it came or is overdue."""
        if self._traceback is None:
            self._traceback, self._where_sent_at = bytearray(), now
            self._process.ask_where()
        if not self._process.in_touch:
            return False  # The cell's worker will answer, or count as lost.
        waited = now - self._where_sent_at
        if self.worker:
            return waited > REMOTE_TRACEBACK_SECONDS[not self._traceback]
        return waited > (TRACEBACK_SECONDS if self._traceback else TRACEBACK_SECONDS_MAX)

    def step_aside(self) -> None:
        """Give this cell a tenth of the processor time of others, for good."""
        self._niceness = priority.ASIDE_NICENESS
        self._process.step_aside()

    def demote(self) -> bool:
        """Lower this cell's priority below all other processes; return whether that worked."""
        self.demoted = True
        return self._process.demote()

    def restore(self) -> bool:
        """Undo a demotion; unprivileged hosts cannot, and replace the cell instead."""
        self.demoted = not self._process.restore(self._niceness)
        return not self.demoted

    def destroy(self) -> None:
        """Kill the cell now without a report; work in the pipe stays in `sent` for the caller."""
        if not self.alive:
            return
        self.alive = False
        self._process.kill()
        for work in self.sent:
            if work.call is not None:
                work.call.cancel()
                work.call = None
        if self._transport is not None:
            self._transport.abort()

    # Building frames -----------------------------------------------------------------------

    def _push(self, work: Work, data: bytes) -> None:
        if not self.sent:
            self._begin_head()
        work.size = len(data)
        self._sent_bytes += work.size
        self.sent.append(work)
        self._write(data)

    def _write(self, data: bytes) -> None:
        self._outgoing.append(data)

    # Messages of the cell ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport to the cell; see asyncio.Protocol."""
        # uvloop's transports do not inherit from asyncio's, so this cannot be asserted.
        self._transport = cast("asyncio.Transport", transport)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the channel. A killed cell may reset it."""
        del exc
        late = self._traceback is not None  # Past the deadline, however the cell ended.
        if self.alive and not (late and self._process.in_touch):
            self._owner.drop_cell(self, "exit")

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the cell; see asyncio.Protocol."""
        if self._traceback is not None:
            if self.worker and not self._traceback:
                self._where_sent_at = time.monotonic()
            self._traceback += data[: TRACEBACK_BYTES_MAX - len(self._traceback)]
            return
        try:
            for body in self._reader.feed(data):
                if not self.alive:
                    return
                self._take(frames.decode_from_cell(body))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            self._owner.drop_cell(self, f"it broke the protocol: {error}"[:200])
        except answers.BreachError as error:
            self._owner.drop_cell(self, f"it broke the protocol: {error}")
        if self._reader.error and self.alive:
            self._owner.drop_cell(self, f"it broke the protocol: {self._reader.error}")

    def _take(self, frame: frames.FromCell) -> None:
        # The first two are frequent, the others rare.
        if isinstance(frame, frames.Result):
            self._result(self._head(frame, closes=True), frame)
        elif isinstance(frame, frames.Call):
            self._call(self._head(frame), frame)
        elif isinstance(frame, frames.Want):
            self._want(self._head(frame), frame)
        elif isinstance(frame, frames.Failed):
            head = self._head(frame, closes=True)
            self._pop()
            self._owner.fail_work(self, head, frame)
        elif isinstance(frame, frames.PolicyLoaded) and self.sent and self.sent[0].kind == "load":
            head = self.sent[0]
            self._pop()
            self._owner.note_load(self, head, frame)
        elif isinstance(frame, frames.CellJailed) and self.code is None:
            self._owner.note_jail(self, frame)
        elif isinstance(frame, frames.Probed) and self.code is None:
            self._owner.note_probe(self, frame.outcome)
        else:
            raise _out_of_turn(frame)

    def _head(self, frame: _AboutTheHead, *, closes: bool = False) -> Work:
        """Return the work that a frame answers; only the first work may be answered."""
        if not self.sent:
            raise _out_of_turn(frame)
        head = self.sent[0]
        if frame.nonce != head.nonce:
            raise answers.BreachError("it answered a question that the server never sent")
        if closes and head.kind == "load":
            raise answers.BreachError("it answered before it was loaded")
        return head

    def _result(self, head: Work, frame: frames.Result) -> None:
        if max(len(frame.value), len(frame.changes)) > ANSWER_BYTES_MAX:
            raise answers.BreachError("its answer is longer than the limit")
        value = _decode_json(frame.value)
        head.changes = frame.changes
        if frame.context is not None and head.chain is not None and self._sync is not None:
            self._sync.contexts.accept(head.tenant, head.chain, frame.context)
        self._pop()
        self._owner.take_answer(self, head, frame, value)

    def _pop(self) -> None:
        self.count_burnt()
        head = self.sent.popleft()
        head.slow = self.slow
        self._sent_bytes -= head.size
        self.evaluations += 1
        if head.call is not None:
            head.call.cancel()
            head.call = None
        self._begin_head()

    def _begin_head(self) -> None:
        self.head_since = time.monotonic()
        self.slow = False
        self._cpu_mark = -1.0

    # Answering calls -----------------------------------------------------------------------

    def _call(self, head: Work, frame: frames.Call) -> None:
        """Answer an injected client: from memory at once, else in a task, at twice the cost."""
        refused = self._admit(head)
        assert self._sync is not None  # `load` has set it.
        services = self._services(head)
        answer: frames.CallAnswer | None = None
        more: bytes = b""
        if frame.client == "context_client":
            if not refused:
                answer = self._sync.contexts.answer(head.tenant, head.chain, frame)
        else:
            arguments = answers.read_call(frame)
            if isinstance(arguments, str):
                refused = refused or arguments
            elif not refused:
                answer = answers.answer_at_once(services, frame, arguments)
                if answer is None:
                    self._answer_later(head, services, frame, arguments)
                    return
                if head.consult is not None and not answer.message:
                    # Only frames of consultations name stale documents.
                    answer.lasts = True
                    self._sync.keeps(frame.method, arguments)
                    ahead = answers.read_ahead(frame)
                    more = self._sync.ahead(services, head, frame.method, ahead)
        if refused:
            answer = frames.CallAnswer(frame.nonce, b"", refused, CALLS_SPENT * head.spent)
        assert answer is not None  # Otherwise the call is refused.
        self._reply(head, answer, more)

    def _want(self, head: Work, frame: frames.Want) -> None:
        """Send a part of the input at its first read; the policy's deadline pauses meanwhile."""
        began = time.monotonic()
        refused = self._admit(head)
        candidates = head.consult.ask.candidates if head.consult else None
        fleet = self._owner.world.fleet if head.sample is None else head.sample.fleet
        services = self._services(head)
        wanted = answers.read_want(frame, candidates, fleet)
        ahead = answers.read_ahead(frame)
        if refused:
            self._reply(head, frames.CallAnswer(frame.nonce, b"", refused, CALLS_SPENT))
            return
        assert self._sync is not None  # `load` has set it.
        self._sync.keeps(frames.DOCUMENTS, wanted)
        *before, last = answers.answer_want(services, frame, wanted)
        more = self._sync.ahead(services, head, frames.DOCUMENTS, ahead)
        for answer in before:
            self._reply(head, answer)
        self._reply(head, last, more)
        elapsed = time.monotonic() - began
        head.calls_seconds += elapsed
        self.head_since += elapsed

    def _services(self, head: Work) -> HostServices:
        return self._owner.services if head.sample is None else head.sample.services

    def _admit(self, head: Work) -> str:
        """Count one more call; return why it is refused, if it is."""
        if head.call is not None:
            raise answers.BreachError("it sent a second question before the answer to the first")
        assert self._transport is not None  # Bytes were just read from it.
        # An honest cell has at most the pipe's frames left to read; `_sent_bytes` is their size.
        if self._transport.get_write_buffer_size() > self._sent_bytes:
            raise answers.BreachError("it sent a second question before it read the answer")
        head.calls += 1
        self._owner.counters["calls"] += 1
        limits = self._owner.limits
        calls_max = max(limits.calls_max, limits.calls_per_candidate_max * self._candidates(head))
        if head.calls > calls_max:
            if head.calls > calls_max + CALLS_BEYOND_MAX:
                raise answers.BreachError(f"it made {head.calls} calls, more than {calls_max}")
            head.spent = True
            return f"more than {calls_max} calls in one evaluation"
        seconds = self._calls_seconds_max(head)
        if head.calls_seconds >= seconds:
            head.spent = True
            return f"the calls of one evaluation may take {seconds:g} s together"
        return ""

    def _candidates(self, head: Work) -> int:
        candidates = head.consult.ask.candidates if head.consult else None
        fleet = self._owner.world.fleet if head.sample is None else head.sample.fleet
        return len(fleet.cluster_ids if candidates is None else candidates)

    def _calls_seconds_max(self, head: Work) -> float:
        limits = self._owner.limits
        return max(limits.calls_seconds, head.deadline_seconds(limits))

    def _answer_later(
        self,
        head: Work,
        services: HostServices,
        frame: frames.Call,
        arguments: tuple[JsonValue, ...],
    ) -> None:
        head.called_at = time.monotonic()
        head.call = asyncio.get_running_loop().create_task(
            self._serve(head, services, frame, arguments)
        )

    async def _serve(
        self,
        head: Work,
        services: HostServices,
        frame: frames.Call,
        arguments: tuple[JsonValue, ...],
    ) -> None:
        """Answer a call of the cell with the services' result; stop the head's clock until then."""
        try:
            answer = await answers.answer_call(services, frame, arguments)
        except asyncio.CancelledError:
            if head.call is None or not self.alive:
                raise  # No cell waits for the answer any more.
            answer = frames.CallAnswer(frame.nonce, b"", "the service took too long", 0)
        elapsed = time.monotonic() - head.called_at
        head.calls_seconds += elapsed
        self.head_since += elapsed
        head.call = None
        if self.alive:
            self._reply(head, answer)

    def _reply(
        self, head: Work, answer: frames.CallAnswer | frames.Documents, more: bytes = b""
    ) -> None:
        assert self._sync is not None  # `load` has set it.
        data = more + frames.pack(answer)
        if self._sync.behind:
            data = self._sync.news(self._services(head)) + data
        self._outgoing.append(data)
        self.flush()


def _out_of_turn(frame: frames.FromCell) -> answers.BreachError:
    return answers.BreachError(f"it sent {type(frame).__name__} at the wrong moment")

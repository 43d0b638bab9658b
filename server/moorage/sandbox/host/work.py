"""One task of a cell, and the texts of its failures, for `channel` and `pool`."""

import asyncio
import os
import re
from typing import Final, Literal, cast

import msgspec
from msgspec.structs import astuple

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.model import Code, Demand, PolicyRef, Share
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.host.contexts import Chain
from moorage.sandbox.host.contract import PolicyCode, PolicyFault, Sample
from moorage.sandbox.host.zygote import ORPHANED, WORKER_LOST, Death
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.frames import ENTRY
from moorage.sandbox.wire.limits import (
    CALL_CHARACTERS_MAX,
    CALLS_SHOWN_MAX,
    CONTEXT_BYTES_MAX,
    MESSAGE_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    SNAPSHOT_BYTES_PER_SECOND,
    Limits,
)

KILLS_MAX: Final = 2
"""Cells that may be killed from outside under one piece of work before it is refused."""
RETRY_SECONDS: Final = 1.0
"""Seconds after which a client may repeat a request whose cells were killed from outside."""
_HUNGRY: Final = 0.75
"""Share of a cell's memory from which its policy is at fault if the machine runs out of memory."""
_NONCE_BYTES: Final = 8
_NONCES_PER_DRAW: Final = 512
_overrides_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_CODES: Final[dict[frames.FailureKind, Code]] = {
    "error": Code.POLICY_ERROR,
    "memory": Code.POLICY_MEMORY,
    "output": Code.POLICY_BAD_OUTPUT,
    "context": Code.POLICY_ERROR,
    "unsupported": Code.UNSUPPORTED,
}
_PLACE: Final = re.compile(r'File "/policy/([^"\n]{1,100})", line (\d{1,6})\b')
_EXPECTED: Final[dict[frames.FailureKind, str]] = {
    "memory": "a policy that needs less memory, or a higher policy_memory_mib",
    "output": "a value made of JSON types: dict, list, str, finite numbers, true, false, null",
    "context": f"plain JSON types, at most {CONTEXT_BYTES_MAX} bytes packed",
}


class _Nonces:
    """Unpredictable 64-bit numbers, of which the kernel makes hundreds at a time."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def draw(self) -> int:
        if not self._left:
            data = os.urandom(_NONCE_BYTES * _NONCES_PER_DRAW)
            self._left = [
                int.from_bytes(data[start : start + _NONCE_BYTES], "little")
                for start in range(0, len(data), _NONCE_BYTES)
            ]
        return self._left.pop()


nonces: Final = _Nonces()


class Work(msgspec.Struct, eq=False):
    """A consultation, another call of a policy, or a load, until its outcome.

    Args:
        consult: The consultation, for `evaluate`.
        action: The action of `manage`.
        data: The data of `manage`.
        input_data: The packed input of `apply`.
        overrides: The overrides of `apply`, as in `Evaluate`.
        ids_only: Whether `apply` returns documents as their ids, as in `Apply`.
        sample: The fleet and services of a trial; None: the server's own.
        fleet: The fleet of `apply`, as in `Apply`.
        proxied: Whether the tenant stands for many unknown tenants.
        alone: Whether no other work may wait after it in its cell's pipe, since it is expected to
            take long.
        changes: The settings and parameters that `manage` changed, as JSON.
        kills: How often a cell was killed from outside while it evaluated the work.
        hungry: How often such a killed cell held nearly all memory that it may use.
        here: Whether the work must run on this machine, since a worker failed at it.
        avoided: The worker that must not get the work, since that worker's proposal failed.
        lost_workers: How often a worker was lost while a cell on it evaluated the work.
        snapshot_bytes: Bytes of the snapshot that the cell reads first, which does not count as the
            policy's time.
        spent: Whether a limit on the work's calls was reached.
        future: The future that gets the outcome; live consultations have none, since they are
            delivered.
    """

    kind: Literal["evaluate", "manage", "apply", "load"]
    code: PolicyCode
    tenant: str
    consult: Consult | None = None
    action: str = ""
    data: JsonValue = None
    input_data: bytes = b""
    overrides: bytes = b""
    ids_only: bool = False
    sample: Sample | None = None
    fleet: bytes | None = None
    proxied: bool = False
    alone: bool = False
    kills: int = 0
    hungry: int = 0
    here: bool = False
    avoided: str = ""
    lost_workers: int = 0
    snapshot_bytes: int = 0
    future: asyncio.Future[JsonValue] | None = None
    submitted_at: float = 0.0
    fleet_version: int = 0
    nonce: int = 0
    chain: Chain | None = None
    size: int = 0
    forgotten: bool = False
    slow: bool = False
    changes: bytes = b""
    calls: int = 0
    calls_seconds: float = 0.0
    spent: bool = False
    call: asyncio.Task[None] | None = None
    called_at: float = 0.0

    @property
    def provisional(self) -> bool:
        """Whether the cell's replica subtracts the proposal until the core has decided."""
        ask = self.consult.ask if self.consult else None
        return ask is not None and ask.terms is not None and not ask.dry_run

    @property
    def repeatable(self) -> bool:
        """Whether the work has no effects before its answer, so that a cell may repeat it."""
        return self.kind in {"evaluate", "apply"} and self.sample is None

    def may_go_to(self, worker: str) -> bool:
        """Return whether this work may run on a worker; an empty name means this machine."""
        return not worker or not (self.here or worker == self.avoided)

    @property
    def judged(self) -> bool:
        """Whether the outcome is the whole value that `eval` returned."""
        return self.kind in {"evaluate", "apply"} and not self.ids_only

    def seconds_max(self, limits: Limits) -> float:
        """Return the seconds that this work may be the first in its cell."""
        if self.kind == "load":
            return limits.load_seconds
        return self.deadline_seconds(limits) + self.snapshot_bytes / SNAPSHOT_BYTES_PER_SECOND

    def deadline_seconds(self, limits: Limits) -> float:
        """Return the seconds for the evaluation, set by the request, the policy or the server."""
        wanted = self.consult.ask.deadline_seconds if self.consult is not None else 0.0
        named = wanted or self.code.deadline_seconds
        most = max(limits.evaluation_seconds, limits.evaluation_seconds_max)
        return min(named, most) if named else limits.evaluation_seconds

    def fail(self, refusal: Refusal) -> ConsultFailed | None:
        """Return the event of a failure; if the work has a future, fail it and return None."""
        if self.consult is not None and self.future is None:
            return ConsultFailed(self.consult.ask.id, self.consult.consultation, refusal)
        if self.future is not None and not self.future.done():
            self.future.set_exception(PolicyFault(refusal))
        return None

    def succeed(self, value: JsonValue) -> Proposed | None:
        """Return the event of a success; if the work has a future, resolve it and return None."""
        if self.consult is not None and self.future is None:
            return Proposed(self.consult.ask.id, self.consult.consultation, value)
        if self.future is not None and not self.future.done():
            self.future.set_result(value)
        return None


def refusal_of(frame: frames.Failed, ref: PolicyRef, memory_mib: int) -> Refusal:
    """Return the refusal for the client of a `Failed` frame.

    Thousands of refusals are stored, so texts are cut here, too: a policy that writes to the
    channel itself ignores its cell's limits.
    """
    exception, file = frame.exception[:NAME_CHARACTERS_MAX], frame.file[:NAME_CHARACTERS_MAX]
    message = frame.message[:MESSAGE_CHARACTERS_MAX]
    details: JsonObject = {"policy_rule_uri": ref.uri}
    if exception:
        details["exception"] = exception
    if file:
        details |= {"file": file, "line": frame.line}
    if len(frame.traceback) > 1:  # File and line already show a single call.
        shown = frame.traceback[-CALLS_SHOWN_MAX:]
        details["traceback"] = [each[:CALL_CHARACTERS_MAX] for each in shown]
    where = f" ({file}, line {frame.line})" if file else ""
    if frame.kind == "output":
        reason = f"the policy's answer cannot be sent: {message}"
    elif frame.kind in {"context", "unsupported"}:
        reason = message
    elif frame.kind == "memory":
        reason = (
            f"the policy raised MemoryError: it may take {memory_mib} MiB, as the setting"
            f" policy_memory_mib says{where}"
        )
    else:
        reason = f"the policy raised {exception}: {message}{where}"
    return Refusal(
        _CODES[frame.kind], reason, expected=_EXPECTED.get(frame.kind, ""), details=details
    )


def refusal_of_faults(loaded: frames.PolicyLoaded, ref: PolicyRef) -> Refusal:
    """Return the refusal for the client of a policy that cannot be loaded."""
    first = loaded.faults[0]
    file, message = first.file[:NAME_CHARACTERS_MAX], first.message[:MESSAGE_CHARACTERS_MAX]
    where = f" ({file}, line {first.line})" if file else ""
    return Refusal(
        Code.BAD_POLICY,
        f"the policy cannot be loaded: {message}{where}",
        details={"policy_rule_uri": ref.uri, "file": file, "line": first.line},
    )


def death_refusal(death: Death, ref: PolicyRef, limits: Limits, doing: str = "") -> Refusal:
    """Return the refusal for a cell that died by itself: for lack of memory, or otherwise.

    Args:
        death: The end of the cell.
        ref: The policy.
        limits: All limits of the sandbox.
        doing: The activity of the cell, if it was not an evaluation.
    """
    cause = death.cause + doing
    if death.held_mib < limits.memory_mib * _HUNGRY:
        return crash_refusal(cause, ref)
    return Refusal(
        Code.POLICY_MEMORY,
        f"the policy's process ended ({cause}) while it held {death.held_mib} MiB, of the"
        f" {limits.memory_mib} that the setting policy_memory_mib allows",
        expected="a policy that needs less memory, or a higher policy_memory_mib",
        details={"policy_rule_uri": ref.uri, "cause": cause},
    )


def crash_refusal(reason: str, ref: PolicyRef) -> Refusal:
    """Return the refusal for a cell that died under an evaluation."""
    return Refusal(
        Code.POLICY_CRASHED,
        f"the policy's process ended: {reason}",
        details={"policy_rule_uri": ref.uri, "cause": reason},
    )


def kill_refusal(death: Death, work: Work, limits: Limits) -> Refusal | None:
    """Record that a cell was killed from outside; return why its work is not repeated, or None.

    A single kill proves nothing: the machine may lack free memory. So work without effects is
    repeated once in another cell. If both cells held nearly all their memory, the policy is at
    fault.
    """
    repeatable = work.repeatable
    work.calls, work.calls_seconds, work.spent = 0, 0.0, False
    if repeatable and death is ORPHANED:
        return None  # All cells died at once: this work is not at fault.
    if repeatable and death is WORKER_LOST:
        work.lost_workers += 1
        work.here = work.lost_workers > 1  # Repeat once elsewhere, then on this machine.
        return None
    work.kills += 1
    work.hungry += death.held_mib >= limits.memory_mib * _HUNGRY
    details = {"policy_rule_uri": work.code.ref.uri, "cause": death.cause}
    if repeatable and work.kills < KILLS_MAX:
        return None
    if work.hungry >= KILLS_MAX:
        return Refusal(
            Code.POLICY_MEMORY,
            f"the policy's process was {death.cause} {work.kills} times while it held"
            f" {death.held_mib} MiB, of the {limits.memory_mib} that it may use: this machine has "
            "less memory",
            expected="a policy that needs less memory, or a machine with more",
            details=details,
        )
    return Refusal(
        Code.UNAVAILABLE,
        f"the policy's process ended through no fault of its own: {death.cause}; try again",
        expected="the same request, in a second; and more memory on the server's machine",
        details={**details, "retry_after_seconds": RETRY_SECONDS},
    )


def too_many(ref: PolicyRef, limits: Limits) -> Refusal:
    """Return the refusal of a consultation if too many wait already."""
    expected = f"fewer than {limits.queue_max}; try again shortly"
    reason = f"{limits.queue_max} consultations already wait for {ref.uri}"
    return Refusal(Code.BUSY, reason, expected=expected)


def too_slow(ref: PolicyRef, seconds: float, shortage: str) -> Refusal:
    """Return the refusal of work that waited too long behind other work, or for a cell."""
    if shortage:
        return Refusal(Code.BUSY, f"{ref.uri} got no cell in {seconds:g} s: {shortage}")
    reason = f"{ref.uri} is too slow for so many requests: this request waited {seconds:g} s for it"
    return Refusal(Code.BUSY, reason)


def late_refusal(ref: PolicyRef) -> Refusal:
    """Return the refusal of shadow work that came too late."""
    return Refusal(Code.BUSY, f"{ref.uri} was busy, and the fleet has changed since")


def overran(seconds: float, code: PolicyCode, doing: str, traceback: str) -> Refusal:
    """Return the refusal for an evaluation that was killed at its deadline.

    Args:
        seconds: The deadline.
        code: The policy.
        doing: The activity that the policy did not end.
        traceback: The cell's traceback, which the policy may have forged.
    """
    reason = f"the policy did not {doing} within {seconds:g} s and was stopped"
    details: JsonObject = {"policy_rule_uri": code.ref.uri, "seconds": seconds}
    for file, line in _PLACE.findall(traceback):
        content = code.files.get(ENTRY if file == code.entry else file)
        if content is not None and int(line) <= content.count(b"\n") + 1:
            reason += f" ({file}, line {line})"
            details |= {"file": file, "line": int(line)}
            break
    return Refusal(Code.POLICY_TIMEOUT, reason, details=details)


def share_fields(share: Share) -> frames.ShareFields:
    """Return a share in the form for frames."""
    return cast("frames.ShareFields", astuple(share))


def demand_fields(demand: Demand) -> frames.DemandFields:
    """Return a demand in the form for frames."""
    return cast("frames.DemandFields", astuple(demand)[:-1])  # All fields but `where`.


def overrides(settings: JsonMapping, parameters: JsonMapping) -> bytes:
    """Return a caller's overrides of a policy's defaults, packed; empty if there are none."""
    if not parameters and not settings:
        return b""
    return _overrides_encoder.encode([dict(settings), dict(parameters)])


def work_of(sample: Sample, code: PolicyCode) -> Work:
    """Return a sample as work for the cell that holds the policy."""
    if sample.consult is not None:
        return Work("evaluate", code, sample.tenant, sample.consult, sample=sample)
    packed = msgspec.msgpack.encode(sample.input_data)
    overriding = overrides(sample.settings, sample.parameters)
    return Work(
        "apply", code, sample.tenant, input_data=packed, overrides=overriding, sample=sample
    )

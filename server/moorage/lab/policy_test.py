"""`moorage policy test`: tests a policy with example requests, in the same jail as a server.

The policy is uploaded as to a server, and every request goes through the allocator's core, which
verifies the proposal. The test then repeats the requests in new cells under other hash seeds, and
requires the same values. Requests for the built-in clusters are also repeated without metrics, as
on a new server.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Final, assert_never

import msgspec

from moorage.catalog.documents.examples import read_examples
from moorage.catalog.documents.schemas import NO_ANSWER
from moorage.catalog.values import PolicyRecord
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Advice, Information, LeaseNews, Response
from moorage.daemon.policies.finder import code_of
from moorage.daemon.publishing.version_statistics import FAULTS
from moorage.lab import examples
from moorage.lab.errors import CommandError
from moorage.lab.progress import Progress
from moorage.lab.rehearsal import Rehearsal
from moorage.model import Ask, Code, RequestId, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.errors import BadMessage
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.host.sandbox import PolicyFault
from moorage.sandbox.wire.frames import ENTRY

TENANT: Final = Tenant("author")
SLOW_SECONDS: Final = 0.01
"""If the median evaluation takes longer than this, the report shows the time per line."""
PROFILE_SECONDS: Final = 3.0
"""Deadline in seconds of a profiled evaluation; the profiler tries to end it after 1 second."""
PROFILE_REQUESTS: Final = 12
"""Number of first requests that the profiler evaluates: these have all kinds of demand."""
BARE_REQUESTS: Final = 12
"""Maximum requests that are repeated without any metrics."""
TIMEOUTS_MAX: Final = 3
"""Number of timeouts after which no further request is tried."""
VALUE_CHARACTERS_MAX: Final = 300
"""Maximum characters of a returned value that a finding shows."""
PRINTS_SHOWN: Final = 5
"""Maximum requests whose printed output a report shows."""
PRINT_CHARACTERS_MAX: Final = 600
"""Maximum characters of one request's printed output that a report shows."""
HASH_SEEDS: Final = (1, 2, 3, 4, 5, 6, 7, 8)
"""Seeds of text hashes, which determine the order of sets. A policy that depends on the order of
two elements is overlooked in one of 128 tests; with only two seeds, in every second test."""
QUICK_SECONDS: Final = 1.0
"""A policy that answers all requests within these seconds is tested with more than two seeds, two
at a time: it stays far from its deadlines even on a busy machine."""
_PROFILER: Final = "line_profile.py"
_SUBJECT: Final = "rule_under_test.py"


@dataclass(frozen=True, slots=True)
class PolicyTestJob:
    """A test of a policy with a fleet and requests.

    Args:
        requests: Messages as clients send them, without the URI; or `{"input_data": …}` for a
            policy that ranks or places blocks. Empty: the built-in requests.
        clusters: Cluster documents; empty: the built-in clusters.
        seed: The seeds of all requests are derived from it.
        profile: Whether to measure the time per line even if the policy is fast.
        mode: The isolation of policies, as in `moored serve --sandbox`.
        examples_suffice: Whether a policy that has examples is tested on these examples alone.
    """

    policy: JsonObject
    requests: list[JsonObject] = field(default_factory=list[JsonObject])
    clusters: list[JsonObject] = field(default_factory=list[JsonObject])
    seed: int = 1
    profile: bool = False
    mode: Mode = "jail"
    examples_suffice: bool = False
    progress: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of one request of a test.

    Args:
        outcome: `granted`, `advice`, `answered`, `waiting`, `not asked`, or a code.
        detail: The placement, or the reason why the request got none.
        values: The values that the policy returned, one per consultation.
        seconds: Duration of the policy's evaluation.
        traceback: The policy's calls that led to its exception.
    """

    request: JsonObject
    outcome: str
    detail: str
    values: tuple[JsonValue, ...]
    seconds: float
    traceback: tuple[str, ...] = ()
    printed: str = ""


@dataclass(slots=True)
class PolicyTestReport:
    """The result of a test.

    Attributes:
        passed: Whether there are no findings.
        findings: Faults, each with the request that showed it, if there is one.
        notes: Remarks that are not faults.
        outcomes: Number of requests by outcome.
        p50_seconds, max_seconds: Durations of evaluations, including transfer to the cell and back.
        profile: Time per line; None if it was not measured.
        printed: The policy's output and logs, by request, failed requests first.
        hash_seeds: The hash seeds under which the policy ran.
    """

    uri: str
    passed: bool = True
    findings: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    requests: list[Tried] = field(default_factory=list[Tried])
    p50_seconds: float = 0.0
    max_seconds: float = 0.0
    profile: JsonObject | None = None
    printed: str = ""
    hash_seeds: list[int] = field(default_factory=lambda: [HASH_SEEDS[0]])

    def find(self, finding: str) -> None:
        """Add a fault to the findings."""
        self.passed = False
        self.findings.append(finding)


async def try_policy(job: PolicyTestJob) -> PolicyTestReport:
    """Test a policy.

    Raises:
        CommandError: The requests or clusters cannot be read; the policy may be sound.
        JailError: This machine has no jail.
    """
    wanted = job.requests or examples.requests()
    report = PolicyTestReport(
        str(job.policy.get("policy_rule_uri") or job.policy.get("name") or "the policy")
    )
    async with Rehearsal(job.mode, hash_seed=HASH_SEEDS[0]) as rehearsal:
        try:
            record = await rehearsal.upload(job.policy)
        except ServiceError as error:
            report.find(error.reason)
            return report
        report.uri = record.ref.uri
        report.notes += rehearsal.warnings
        if job.examples_suffice and read_examples(record.document, record.files):
            return report  # The upload ran the examples.
        began = time.monotonic()
        report.requests = await _play(rehearsal, record, job, wanted)
        seconds = time.monotonic() - began
        report.printed = _collect_output(report.requests)
    stuck = any(tried.outcome == Code.POLICY_TIMEOUT for tried in report.requests)
    if stuck:
        _verdict(report, report.requests, builtin=not job.requests)
    else:
        again = await _again(job, report, wanted, seconds)
        _verdict(report, again, builtin=not job.requests)
        if not job.clusters:  # A job's own clusters have no metrics.
            await _without_metrics(job, report, wanted[:BARE_REQUESTS])
    report.notes += _collect_warnings(job.requests)
    if job.profile or stuck or report.p50_seconds > SLOW_SECONDS:
        stopped = [each.request for each in report.requests if each.outcome == Code.POLICY_TIMEOUT]
        report.profile = await profile(job, record, stopped or wanted)
    return report


async def _again(
    job: PolicyTestJob, report: PolicyTestReport, wanted: Sequence[JsonObject], seconds: float
) -> Sequence[Tried]:
    """Repeat the test under other hash seeds until an answer differs; return the last run.

    Under another hash seed, sets have another order. `seconds` is the duration of the first run.
    """

    async def under(hash_seed: int) -> list[Tried]:
        async with Rehearsal(job.mode, hash_seed=hash_seed, attacked=True) as rehearsal:
            try:
                record = await rehearsal.upload(job.policy)
            except ServiceError as error:
                report.find(f"under hash seed {hash_seed}, and not under all: {error.reason}")
                return report.requests
            return await _play(rehearsal, record, job, wanted)

    second, *more = HASH_SEEDS[1:]
    report.hash_seeds.append(second)
    again = await under(second)
    faulty = any(tried.outcome in FAULTS for tried in report.requests)
    if faulty or seconds > QUICK_SECONDS:
        return again
    for start in range(0, len(more), 2):
        if not report.passed or _differing(report, again):
            break
        pair = more[start : start + 2]
        runs = await asyncio.gather(*map(under, pair))
        for hash_seed, again in zip(pair, runs, strict=True):
            report.hash_seeds.append(hash_seed)
            if _differing(report, again):
                break
    return again


async def _without_metrics(
    job: PolicyTestJob, report: PolicyTestReport, wanted: Sequence[JsonObject]
) -> None:
    """Repeat requests without metrics of clusters, as on every new server."""
    known = {_fault(tried) for tried in report.requests}
    async with Rehearsal(job.mode, hash_seed=HASH_SEEDS[0], attacked=True) as rehearsal:
        record = await rehearsal.upload(job.policy)
        played = await _play(rehearsal, record, job, wanted, metrics=False)
    faults = [each for each in enumerate(played) if _fault(each[1]) not in {*known, ""}]
    if faults:
        number, tried = faults[0]
        report.find(
            f"request {number}, where no cluster has metrics: {_fault(tried)}{_likewise(faults)}."
            " There `cluster_metrics` is None, and `get_cluster` raises"
        )


def _fault(tried: Tried) -> str:
    return f"{tried.outcome}: {tried.detail}" if tried.outcome in FAULTS else ""


def _likewise(numbers: Sequence[object]) -> str:
    more = len(numbers) - 1
    return f" ({more} more request{'s' * (more > 1)} likewise)" if more else ""


async def _play(
    rehearsal: Rehearsal,
    record: PolicyRecord,
    job: PolicyTestJob,
    wanted: Sequence[JsonObject],
    *,
    metrics: bool = True,
    timeouts_max: int = TIMEOUTS_MAX,
) -> list[Tried]:
    measured = {each["clusterId"]: each for each in examples.metrics()} if metrics else {}
    try:
        if job.clusters:
            for document in job.clusters:
                await rehearsal.add_cluster(document)
        else:
            for document in examples.clusters():
                await rehearsal.add_cluster(document, measured.get(document["id"]))
    except ServiceError as error:
        raise CommandError(f"a cluster document is invalid: {error.reason}") from error
    # Load the policy first, so that loading is not part of the first evaluation's time.
    if timeouts_max > 1:
        await rehearsal.ask(ask_of(record, {"inputs": {}, "dry_run": True}, -1, job.seed))
    tried: list[Tried] = []
    shown = Progress(job.progress, f"asking {record.ref.uri}", len(wanted))
    rehearsal.output(record.ref.uri, TENANT)
    for number, request in enumerate(wanted):
        one = await _one(rehearsal, record, number, request, job.seed)
        tried.append(replace(one, printed=rehearsal.output(record.ref.uri, TENANT)))
        hung = one.outcome == Code.POLICY_TIMEOUT
        shown.step(f"request {number} hung: {one.detail}" if hung else "")
        if sum(each.outcome == Code.POLICY_TIMEOUT for each in tried) >= timeouts_max:
            break
    shown.end()
    return tried


async def _one(
    rehearsal: Rehearsal, record: PolicyRecord, number: int, request: JsonObject, seed: int
) -> Tried:
    if "input_data" in request:
        try:
            value = await rehearsal.evaluate(record.ref.uri, TENANT, request["input_data"])
        except PolicyFault as fault:
            code = fault.refusal.code
            outcome = "not asked" if code is Code.BAD_MESSAGE else code.value
            calls = _calls(fault.refusal)
            return Tried(request, outcome, fault.refusal.reason, (), 0.0, calls)
        return Tried(request, "answered", "", (value,), 0.0)
    try:
        decision = await rehearsal.ask(ask_of(record, request, number, seed))
    except ServiceError as error:
        return Tried(request, "not asked", error.reason, (), 0.0)
    outcome, detail = _outcome(decision.answer)
    calls = _calls(decision.answer) if isinstance(decision.answer, Refusal) else ()
    return Tried(request, outcome, detail, decision.values, decision.seconds, calls)


def _calls(refusal: Refusal) -> tuple[str, ...]:
    return tuple(refusal.details.get("traceback", ()))


def _collect_output(tried: Sequence[Tried]) -> str:
    """Return the printed output of requests, failed requests first, up to a limit."""
    said = [(number, each) for number, each in enumerate(tried) if each.printed]
    said.sort(key=lambda pair: (pair[1].outcome not in FAULTS, pair[0]))
    parts = [
        f"request {number} ({each.outcome}):\n{_cut(each.printed)}"
        for number, each in said[:PRINTS_SHOWN]
    ]
    if len(said) > PRINTS_SHOWN:
        parts.append(f"… and at {len(said) - PRINTS_SHOWN} more requests (--json has all)")
    return "\n".join(parts)


def _cut(text: str) -> str:
    text = text.rstrip("\n")
    if len(text) > PRINT_CHARACTERS_MAX:
        text = f"{text[:PRINT_CHARACTERS_MAX]}…"
    return "\n".join(f"  {line}" for line in text.splitlines())


def ask_of(record: PolicyRecord, request: JsonObject, number: int, seed: int) -> Ask:
    """Return the `Ask` for a client's message, as a server would make it.

    Raises:
        ServiceError: The policy's schemas do not allow its inputs or overrides.
        CommandError: The message is malformed, or has a filter or a search.
    """
    body = msgspec.json.encode({"inputs": {}, **request, "policy_rule_uri": record.ref.uri})
    try:
        message = wire.decode_allocation(body)
        wire.ignored_fields(body, message)
    except BadMessage as error:
        raise CommandError(f"request {number}: {error.reason}") from error
    if message.filter is not None or message.search is not None:
        raise CommandError(f"request {number}: name `clusters`; filters and searches need a server")
    inputs = message.inputs
    parameters: JsonMapping = message.parameters or {}
    settings: JsonMapping = message.settings or {}
    if record.schemas is not None and number >= 0:
        inputs = record.schemas.complete(inputs)
        parameters, settings = record.schemas.overrides(parameters, settings)
    return Ask(
        id=RequestId(f"request-{number}"),
        tenant=TENANT,
        policy=record.ref,
        candidates=message.candidates(),
        demand=message.demand(),
        alternatives=message.demands(),
        terms=message.terms(),
        inputs=inputs,
        parameters=parameters,
        settings=settings,
        seed=(seed << 32) + number + 1,
        explain=message.explain,
        dry_run=message.dry_run,
    )


def _collect_warnings(requests: Sequence[JsonObject]) -> list[str]:
    """Return warnings that a server would send for accepted requests, one of each kind."""
    warned: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        if "input_data" in request:
            beside = [f"{name}: it was ignored, since input_data was given." for name in request]
            warnings = [each for each in beside if not each.startswith("input_data:")]
        else:
            body = msgspec.json.encode({"inputs": {}, **request, "policy_rule_uri": "a:1-b"})
            warnings = wire.ignored_fields(body, wire.decode_allocation(body))
        for warning in warnings:
            warned.setdefault(warning, []).append(number)
    return [f"request {of[0]}: {warning}{_likewise(of)}" for warning, of in warned.items()]


def _outcome(answer: Response | None) -> tuple[str, str]:
    match answer:
        case LeaseNews(lease):
            shares = (
                f"{share.cluster_id}/{share.node_id} {','.join(share.gpus)}"
                for share in lease.placement
            )
            return "granted", "; ".join(shares)
        case Advice(data):
            return "advice", _short(data)
        case Refusal(code=code, reason=reason, details=details):
            said = details.get("data")
            return code.value, reason if said is None else _short(said)
        case Information() | None:
            return "waiting", ""
        case _:
            assert_never(answer)


def _differing(report: PolicyTestReport, again: Sequence[Tried]) -> list[tuple[int, Tried, Tried]]:
    """Return the requests with different outcomes in two runs; one run may be shorter."""
    return [
        (number, first, second)
        for number, (first, second) in enumerate(zip(report.requests, again, strict=False))
        if first.values != second.values and first.outcome not in FAULTS
    ]


def _verdict(report: PolicyTestReport, again: Sequence[Tried], *, builtin: bool) -> None:
    """Compare the first and the last run, and record faults."""
    report.outcomes = dict(Counter(tried.outcome for tried in report.requests).most_common())
    faults: dict[str, list[int]] = {}
    for number, tried in enumerate(report.requests):
        if fault := _fault(tried):
            faults.setdefault(fault, []).append(number)
    for fault, numbers in faults.items():
        calls = "".join(f"\n  {call}" for call in report.requests[numbers[0]].traceback)
        report.find(f"request {numbers[0]}: {fault}{_likewise(numbers)}{calls}")
    differing = _differing(report, again)
    if differing:
        number, first, second = differing[0]
        report.find(
            f"request {number}: the same request, fleet and seed gave {_short(first.values)} once "
            f"and {_short(second.values)} another time ({len(differing)} such requests; hash seeds "
            f"{report.hash_seeds[0]} and {report.hash_seeds[-1]}). "
            'Draw from input_data["seed"] alone, and sort what comes out of a set'
        )
    sent = [each for each in report.requests if each.outcome != "not asked"]
    if not sent:
        report.find(f"no request could be sent: {report.requests[0].detail}. Give --requests")
    elif len(sent) < len(report.requests):
        left = len(report.requests) - len(sent)
        report.notes.append(f"{left} requests do not match the policy's schemas and were not sent")
    _check_declines(report, sent, builtin=builtin)
    seconds = [each.seconds for each in sent if each.seconds]
    if seconds:
        report.p50_seconds, report.max_seconds = statistics.median(seconds), max(seconds)
    if report.p50_seconds > SLOW_SECONDS:
        report.notes.append(
            f"the policy is slow: half of its evaluations take over {1e3 * SLOW_SECONDS:g} ms, and "
            "a server lets such policies run only when no other process wants to"
        )


def _check_declines(report: PolicyTestReport, tried: Sequence[Tried], *, builtin: bool) -> None:
    """Record a fault if the policy declined most of the built-in requests."""
    silent = [number for number, tried in enumerate(report.requests) if _is_unexplained(tried)]
    if silent:
        value = _short(report.requests[silent[0]].values[-1])
        report.find(
            f"request {silent[0]}: it fits, and {value} says neither where it goes nor why it goes"
            f" nowhere{_likewise(silent)}."
            ' A placement is {"cluster_id": …, "node_id": …, "gpus": […]}, and a no'
            ' {"declined": "…"} with the reason'
        )
        return
    declined = report.outcomes.get(Code.POLICY_DECLINED.value, 0)
    if builtin and declined > len(tried) / 2:
        first = next(each for each in tried if each.outcome == Code.POLICY_DECLINED)
        report.find(
            f"the policy declined {declined} of {len(tried)} requests, all of which fit:"
            f" {first.detail.rstrip('.')}."
            ' A placement is {"cluster_id": …, "node_id": …, "gpus": […]}.'
            " If the policy is right to decline, give --requests and --clusters that it is made for"
        )
    elif declined:
        report.notes.append(f"the policy declined {declined} requests that would fit")


def _is_unexplained(tried: Tried) -> bool:
    """Return whether a request that fits got neither a placement nor a reason."""
    if not tried.values:
        return False
    value = tried.values[-1]
    if tried.outcome == Code.POLICY_DECLINED:
        reasons = (value.get(name) for name in NO_ANSWER) if isinstance(value, dict) else ()
        return not any(isinstance(each, str) and each.strip() for each in reasons)
    return tried.outcome == "advice" and "resources" in tried.request and not value


async def profile(
    job: PolicyTestJob, record: PolicyRecord, wanted: Sequence[JsonObject]
) -> JsonObject | None:
    """Evaluate requests under the profiler; return the time per line, None if the policy fails."""
    source = (resources.files("moorage.lab") / _PROFILER).read_bytes()
    code = code_of(record)
    files = {**code.files, ENTRY: source, _SUBJECT: code.files[ENTRY]}
    ref = msgspec.structs.replace(code.ref, digest=f"{code.ref.digest} traced")
    traced = replace(code, files=files, ref=ref, entry=ENTRY, deadline_seconds=PROFILE_SECONDS)
    async with Rehearsal(job.mode, attacked=True) as rehearsal:
        await rehearsal.upload(job.policy)
        rehearsal.use(traced)
        await _play(rehearsal, record, job, wanted[:PROFILE_REQUESTS], timeouts_max=1)
        try:
            found = await rehearsal.manage(record.ref.uri, TENANT, "profile")
        except PolicyFault:
            return None
    for line in found["lines"]:
        line["file"] = code.entry if line["file"] == ENTRY else line["file"]
    return found if found["lines"] else None


def _short(value: JsonValue) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"

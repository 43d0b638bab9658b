"""Checks a policy before registration: first its document, then its code and examples in a cell.

`services` calls this module for uploads, the daemon for the examples of policies from other stores.
Nothing of a policy is compiled or run outside its cell. Each fault is reported with its place: the
field, the line and the caret, or the example.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import msgspec

from moorage.catalog.documents.examples import read_examples
from moorage.catalog.documents.policies import complete_policy_document
from moorage.catalog.documents.sources import is_url
from moorage.catalog.documents.updates import apply_change
from moorage.catalog.ports import Catalog
from moorage.catalog.values import Document, PolicyRecord, PreparedPolicy
from moorage.core.state.facts import Refusal
from moorage.daemon.policies.finder import code_of
from moorage.daemon.publishing.examples import ExampleRehearsal
from moorage.model import Code
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import CheckResult, PolicyFault, Sandbox

NO_TENANT: Final = ""
"""The tenant that is named when a policy of another store is checked."""


async def vet(
    catalog: Catalog, sandbox: Sandbox, document: Document, tenant: str
) -> PreparedPolicy:
    """Check a PolicyRule document; return its policy, which may then be registered.

    Raises:
        ServiceError: `bad_message` naming a field of the document; `bad_policy` with the place in
            the code, or the example that fails; `too_large`; `busy`, `unavailable`.
    """
    async with _turn(sandbox.uploads, tenant):  # Unpacking the code also occupies a thread.
        prepared = await catalog.policies.prepare(document)
        _refuse_deadline(sandbox, prepared.record.document)
        warnings = await _rehearse(sandbox, prepared.record)
    return replace(prepared, warnings=(*prepared.warnings, *warnings))


def _refuse_deadline(sandbox: Sandbox, document: Document) -> None:
    longest = sandbox.deadline_seconds_max
    if (document.get("deadline_seconds") or 0) > longest:
        expected = f"at most {longest:g}, as the setting policy_deadline_seconds_max says"
        raise ServiceError.wrong_field("deadline_seconds", expected)


async def vet_change(
    catalog: Catalog, sandbox: Sandbox, uri: str, change: Document, tenant: str
) -> None:
    """Run the examples in a change to a policy's document, before the change is stored.

    Raises:
        ServiceError: The errors of `vet`; `not_found`: no such policy is registered.
    """
    old = await catalog.policies.get(uri)
    new = complete_policy_document({**old, **apply_change(old, change)})
    _refuse_deadline(sandbox, new)
    record = catalog.memory.policy(uri)
    if record is not None and new.get("metadata") != old.get("metadata"):
        async with _turn(sandbox.uploads, tenant):
            await _rehearse(sandbox, replace(record, document=new))


async def examine(sandbox: Sandbox, record: PolicyRecord) -> str:
    """Run the examples of a policy from another store; return why they fail, or "".

    Raises:
        ServiceError: `busy` or `unavailable`: the examples could not be run.
    """
    try:
        rehearsals = await asyncio.to_thread(_rehearsals, record)
    except ServiceError:
        return ""  # Another store may use the field `examples` otherwise.
    if not rehearsals:
        return ""
    try:
        async with _turn(sandbox.rechecks, NO_TENANT):
            await _run(sandbox, record, rehearsals)
    except ServiceError as error:
        if error.code is not Code.BAD_POLICY:
            raise
        return error.reason
    return ""


@asynccontextmanager
async def _turn(semaphore: FairSemaphore, tenant: str) -> AsyncIterator[None]:
    """Wait for the tenant's turn, and hold it; raise the sandbox's refusals as service errors."""
    try:
        async with semaphore.turn(tenant):
            yield
    except PolicyFault as fault:
        raise ServiceError(fault.refusal.code, fault.refusal.reason) from fault


async def _rehearse(sandbox: Sandbox, record: PolicyRecord) -> tuple[str, ...]:
    # Examples may have documents of whole fleets, which take a while to read.
    return await _run(sandbox, record, await asyncio.to_thread(_rehearsals, record))


async def _run(
    sandbox: Sandbox, record: PolicyRecord, rehearsals: Sequence[ExampleRehearsal]
) -> tuple[str, ...]:
    """Load a policy and run its examples; return warnings for its author."""
    for each in rehearsals:
        if each.refusal is not None:
            raise _failure(each, each.refusal)
    samples = [each.sample for each in rehearsals if each.sample is not None]
    result = await sandbox.check(code_of(record), samples)
    if not result.ok:
        raise _unloadable(record, result)
    for rehearsal, outcome in zip(rehearsals, result.outcomes, strict=True):
        refusal = outcome.refusal or rehearsal.feasibility(outcome.value)
        if refusal is not None:
            raise _failure(rehearsal, refusal, _line(refusal, record))
    return result.warnings


def _rehearsals(record: PolicyRecord) -> list[ExampleRehearsal]:
    examples = read_examples(record.document, record.files)
    return [ExampleRehearsal(record, example, number) for number, example in enumerate(examples, 1)]


def _unloadable(record: PolicyRecord, result: CheckResult) -> ServiceError:
    findings = result.findings
    if is_url(record.document["code"]):
        findings = tuple(msgspec.structs.replace(each, text="") for each in findings)
    first = findings[0]
    line = f", line {first.line}" if first.line else ""
    where = f"{first.file}{line}: " if first.file else ""
    text = f"\n{first.text}" if first.text else ""
    return ServiceError(
        Code.BAD_POLICY,
        f"code: {where}{first.message}{text}",
        field="code",
        expected="a policy that loads: a class AIOSv1PolicyRule with eval",
        details={"findings": [msgspec.to_builtins(each) for each in findings]},
    )


def _failure(rehearsal: ExampleRehearsal, refusal: Refusal, line: str = "") -> ServiceError:
    example = rehearsal.example
    return ServiceError(
        Code.BAD_POLICY,
        f"{example.title} fails: {refusal.reason}{line}",
        field=example.place,
        expected="an example that the policy passes; correct the example or the policy",
        details={"example": example.place, "failure": refusal.code.value, **refusal.details},
    )


def _line(refusal: Refusal, record: PolicyRecord) -> str:
    """Return the source line of an exception, after a line break; "" if there is none."""
    if is_url(record.document["code"]):
        return ""
    name, number = refusal.details.get("file", ""), refusal.details.get("line", 0)
    lines = record.files.get(name, b"").decode("utf-8", "replace").splitlines()
    return f"\n{lines[number - 1][:200]}" if 0 < number <= len(lines) else ""

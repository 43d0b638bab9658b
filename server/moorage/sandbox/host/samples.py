"""Loads a policy in a fresh cell and runs samples of it there; `check` calls this."""

import asyncio
from collections.abc import Callable, Sequence

from moorage.core.state.facts import Refusal
from moorage.model import Code
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.contract import (
    CheckResult,
    CodeFinding,
    JailError,
    PolicyCode,
    PolicyFault,
    Sample,
    SampleOutcome,
)
from moorage.sandbox.host.pool import CellPool
from moorage.sandbox.host.work import Work, crash_refusal, work_of
from moorage.sandbox.host.zygote import SpawnError
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import FINDINGS_MAX, MESSAGE_CHARACTERS_MAX


async def check_once(pool: CellPool, code: PolicyCode, samples: Sequence[Sample]) -> CheckResult:
    """Check a policy once; see `sandbox.host.sandbox.Sandbox.check`.

    Raises:
        PolicyFault: No cell could be started, or it was killed from outside (UNAVAILABLE).
    """
    try:
        cell = await pool.spawner.blank()
    except (SpawnError, JailError) as error:
        refusal = Refusal(Code.UNAVAILABLE, f"no cell can be started: {error}")
        raise PolicyFault(refusal) from error
    future: asyncio.Future[frames.PolicyLoaded] = asyncio.get_running_loop().create_future()
    try:
        cell.load(Work("load", code, "", future=future), pool.limits.output_bytes_max, check=True)
        cell.flush()
        pool.watch_soon()
        loaded = await future
        outcomes = await _try(cell, code, () if loaded.faults else samples, pool.watch_soon)
    except PolicyFault as fault:
        if fault.refusal.code in {Code.UNAVAILABLE, Code.SHUTTING_DOWN}:
            raise
        return CheckResult((CodeFinding(fault.refusal.reason, code.entry),))
    finally:
        pool.spawner.destroy(cell)
    # The cell obeys these bounds too, but a policy may have spoken in its place.
    findings = tuple(
        CodeFinding(
            fault.message[:MESSAGE_CHARACTERS_MAX],
            fault.file[:MESSAGE_CHARACTERS_MAX],
            fault.line,
            fault.column,
            fault.text[:MESSAGE_CHARACTERS_MAX],
        )
        for fault in loaded.faults[:FINDINGS_MAX]
    )
    warnings = tuple(each[:MESSAGE_CHARACTERS_MAX] for each in loaded.warnings[:FINDINGS_MAX])
    return CheckResult(findings, loaded.management, loaded.output, tuple(outcomes), warnings)


async def _try(
    cell: Cell, code: PolicyCode, samples: Sequence[Sample], watch_soon: Callable[[], None]
) -> Sequence[SampleOutcome]:
    """Run samples in a loaded cell, one after the other, until the cell does not outlive one."""
    outcomes: list[SampleOutcome] = []
    for sample in samples:
        if not cell.alive:
            lost = SampleOutcome(refusal=crash_refusal("it ended once it was loaded", code.ref))
            outcomes.append(outcomes[-1] if outcomes else lost)
            continue
        work = work_of(sample, code)
        work.future = asyncio.get_running_loop().create_future()
        refusal = cell.put(work)
        if refusal is None:
            cell.flush()
            watch_soon()
            try:
                outcomes.append(SampleOutcome(await work.future))
                continue
            except PolicyFault as fault:
                refusal = fault.refusal
                if refusal.code is Code.UNAVAILABLE:
                    raise
        outcomes.append(SampleOutcome(refusal=refusal))
    return outcomes

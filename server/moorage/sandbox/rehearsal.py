"""A policy in a fresh cell that looks at it, and trials there; `host.Sandbox.check` calls this."""

import asyncio
from collections.abc import Callable, Sequence

from moorage.core.words import Refusal
from moorage.model import Code
from moorage.sandbox import frames
from moorage.sandbox.channel import Cell
from moorage.sandbox.contract import (
    CheckResult,
    Finding,
    JailError,
    Outcome,
    PolicyCode,
    PolicyFault,
    Trial,
)
from moorage.sandbox.control import SpawnError
from moorage.sandbox.limits import FINDINGS_MAX, MESSAGE_CHARACTERS_MAX
from moorage.sandbox.pool import Pool
from moorage.sandbox.work import Work, crashed, work_of


async def looked_at(pool: Pool, code: PolicyCode, trials: Sequence[Trial]) -> CheckResult:
    """Look at a policy once; see `host.Sandbox.check`.

    Raises:
        PolicyFault: No cell could be started, or it was killed from outside (UNAVAILABLE).

    """
    try:
        cell = await pool.nursery.blank()
    except (SpawnError, JailError) as error:
        refusal = Refusal(Code.UNAVAILABLE, f"no cell can be started: {error}")
        raise PolicyFault(refusal) from error
    future: asyncio.Future[frames.Loaded] = asyncio.get_running_loop().create_future()
    try:
        cell.load(Work("load", code, "", future=future), pool.limits.output_bytes_max, check=True)
        cell.flush()
        pool.watch_soon()
        loaded = await future
        outcomes = await _tried(cell, code, () if loaded.faults else trials, pool.watch_soon)
    except PolicyFault as fault:
        if fault.refusal.code in {Code.UNAVAILABLE, Code.SHUTTING_DOWN}:
            raise
        return CheckResult((Finding(fault.refusal.reason, "function.py"),))
    finally:
        pool.nursery.destroy(cell)
    # The cell obeys these bounds too, but a rule may have spoken in its place.
    findings = tuple(
        Finding(
            fault.message[:MESSAGE_CHARACTERS_MAX],
            fault.file[:MESSAGE_CHARACTERS_MAX],
            fault.line,
            fault.column,
            fault.text[:MESSAGE_CHARACTERS_MAX],
        )
        for fault in loaded.faults[:FINDINGS_MAX]
    )
    return CheckResult(findings, loaded.management, loaded.output, tuple(outcomes))


async def _tried(
    cell: Cell, code: PolicyCode, trials: Sequence[Trial], watch_soon: Callable[[], None]
) -> Sequence[Outcome]:
    """Make trials in a loaded cell, one after the other.

    Args:
        cell: Holds the policy and nobody else's work.
        code: The policy.
        trials: What to try.
        watch_soon: Has the clock of the cell looked at.

    Returns:
        What became of each; after one that the cell did not outlive, the others have its refusal.

    Raises:
        PolicyFault: The cell was killed from outside (UNAVAILABLE).

    """
    outcomes: list[Outcome] = []
    for trial in trials:
        if not cell.alive:
            lost = Outcome(refusal=crashed("it ended once it was loaded", code.ref))
            outcomes.append(outcomes[-1] if outcomes else lost)
            continue
        work = work_of(trial, code)
        work.future = asyncio.get_running_loop().create_future()
        refusal = cell.put(work)
        if refusal is None:
            cell.flush()
            watch_soon()
            try:
                outcomes.append(Outcome(await work.future))
                continue
            except PolicyFault as fault:
                refusal = fault.refusal
                if refusal.code is Code.UNAVAILABLE:
                    raise
        outcomes.append(Outcome(refusal=refusal))
    return outcomes

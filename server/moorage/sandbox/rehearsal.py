"""Trials of a policy in the cell that looks at it; `host.Sandbox.check` calls this."""

import asyncio
from collections.abc import Callable, Sequence

from moorage.sandbox.channel import Cell
from moorage.sandbox.contract import Outcome, PolicyCode, PolicyFault, Trial
from moorage.sandbox.work import crashed, work_of


async def tried(
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
        outcomes.append(Outcome(refusal=refusal))
    return outcomes

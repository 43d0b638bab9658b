"""Requests with several alternative demands: "8 GPUs, else 4", "one H100, else two A100".

Such a request has all its demands in `alternatives`, the preferred one first; `demand` is the
alternative that is being decided. The request waits in a class with a demand looser than all
alternatives: on a node where that does not fit, no alternative fits.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from moorage.core.state.facts import Refusal
from moorage.model import GPU_MILLI, Ask, Demand


def each(ask: Ask) -> Iterator[Ask]:
    """Yield a request with each of its demands, the preferred one first."""
    if not ask.alternatives:
        yield ask
        return
    for demand in ask.alternatives:
        yield replace(ask, demand=demand)


def following(ask: Ask) -> Iterator[Ask]:
    """Yield copies of a request, one per later alternative demand."""
    index = choice(ask)
    if index is not None:
        for demand in ask.alternatives[index + 1 :]:
            yield replace(ask, demand=demand)


def choice(ask: Ask) -> int | None:
    """Return the index of the request's current alternative, from 0; None without alternatives."""
    assert ask.demand is not None or not ask.alternatives
    return ask.alternatives.index(ask.demand) if ask.alternatives and ask.demand else None


def waits_for(refused: Sequence[tuple[Ask, Refusal]]) -> tuple[Ask, Refusal]:
    """Return the last alternative that may fit later, else the last of all; and its refusal.

    Args:
        refused: All alternatives, each with the reason why it does not fit.
    """
    later = [(ask, why) for ask, why in refused if not _is_final(why)]
    ask, why = (later or refused)[-1]
    if len(refused) > 1:
        why = replace(why, reason=f"None of {len(refused)} alternatives will do: {why.reason}")
    return ask, why


def _is_final(refusal: Refusal) -> bool:
    return refusal.details.get("verdict") == "never" or bool(refusal.details.get("never"))


def loosest(ask: Ask) -> Demand | None:
    """Return a demand that fits wherever one of the request's alternatives fits."""
    some = ask.alternatives
    if not some:
        return ask.demand
    topologies = {demand.topology for demand in some}
    models = {model for demand in some for model in demand.models}
    # Some devices are only granted whole, so neither a part nor a whole device is looser.
    mixed = len({demand.gpu_milli == GPU_MILLI for demand in some}) > 1
    return Demand(
        gpus=0 if mixed else min(demand.gpus for demand in some),
        gpu_milli=min(demand.gpu_milli for demand in some),
        models=tuple(sorted(models)) if all(demand.models for demand in some) else (),
        gpu_memory_mib=min(demand.gpu_memory_mib for demand in some),
        cpu_milli=min(demand.cpu_milli for demand in some),
        memory_mib=min(demand.memory_mib for demand in some),
        nodes=min(demand.nodes for demand in some),
        topology=topologies.pop() if len(topologies) == 1 else "",
        where=tuple(w for w in some[0].where if all(w in demand.where for demand in some)),
    )

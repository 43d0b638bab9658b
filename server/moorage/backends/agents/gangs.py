"""Gangs: one workload with a member on each of several machines, which start and end together.

`backend` starts and stops members. This module makes each member's order, which names the other
members, and joins the members' reports into that of the gang. It does no I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from moorage.backends.agents.wire import Meeting
from moorage.backends.base import Order, Phase, WorkloadReport

_ORDER: Final = (
    *(Phase.FAILED, Phase.STOPPED, Phase.PENDING, Phase.PULLING, Phase.STARTING, Phase.READY),
)
"""The phase of a gang is the first of these that any member has, or else SUCCEEDED."""


def member_orders(order: Order, meetings: Sequence[Meeting]) -> list[Order]:
    """Return the order of each member, with its share of the lease and the rank-0 address.

    Args:
        order: The gang's order.
        meetings: Address of each machine, in the order of the placement; members meet at the port
            of the first.
    """
    common = {
        "MOORAGE_ADDRESSES": ",".join(each.address for each in meetings),
        "MASTER_ADDR": meetings[0].address,
        "MASTER_PORT": str(meetings[0].port),
        "WORLD_SIZE": str(len(meetings)),
    }
    # `torchrun` reads its options from these.
    common |= {f"PET_{name}": common[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    common["PET_NNODES"] = common["WORLD_SIZE"]
    return [
        replace(
            order,
            placement=(share,),
            devices=order.devices[rank : rank + 1],
            environment={**order.environment, **common, **_own(share.node_id, str(rank))},
        )
        for rank, share in enumerate(order.placement)
    ]


def _own(node: str, rank: str) -> dict[str, str]:
    return {
        "MOORAGE_NODE_ID": node,
        **dict.fromkeys(("MOORAGE_RANK", "RANK", "PET_NODE_RANK"), rank),
    }


def join_reports(members: Mapping[str, WorkloadReport]) -> WorkloadReport:
    """Return the report of a gang.

    Args:
        members: The report of each member, by node, in the order of ranks.
    """
    first = next(iter(members.values()))
    if len(members) == 1:
        return first
    for phase in _ORDER:
        for node, report in members.items():
            if report.phase is phase:
                detail = f"node {node}: {report.detail}" if report.detail else f"on node {node}"
                return replace(report, endpoint=first.endpoint, detail=detail)
    return first

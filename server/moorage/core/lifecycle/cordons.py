"""Takes clusters and nodes out of service for operators, and moves or ends the leases there.

A cordon keeps new leases away, and ends the warm leases. A drain also empties the place: a workload
with `on_failure: requeue` is stopped, and starts elsewhere under the same lease; every other lease
lasts until its release or the end of the drain's time, and is not renewed beyond that. The
allocator is the only caller.
"""

from moorage.core.fit.room import leaves_by
from moorage.core.lifecycle.leases import LeaseLifecycle
from moorage.core.lifecycle.warm_reuse import WarmReuse
from moorage.core.state import refusals
from moorage.core.state.facts import Cordoned, Refusal, Renewed, Uncordoned
from moorage.core.turns.effects import Information
from moorage.core.turns.events import CordonAsked
from moorage.core.turns.turn import TurnWriter
from moorage.model import Lease


class Cordons:
    """Cordons, drains and uncordons clusters and nodes.

    Args:
        writer: Writer of the turn's facts and effects.
        leases: Ends and moves leases.
        warm: Ends warm leases in a place.
    """

    def __init__(self, writer: TurnWriter, leases: LeaseLifecycle, warm: WarmReuse) -> None:
        self._turn = writer
        self._leases = leases
        self._warm = warm

    def apply(self, event: CordonAsked) -> None:
        """Cordon, drain or uncordon a place; answer with the remaining leases there."""
        refusal = self.refusal(event)
        if refusal is not None:
            self._turn.respond(event.to, refusal)
            return
        place, now = (event.cluster, event.node), self._turn.now
        before = self._turn.state.cordons.get(place)
        if event.mode == "uncordon":
            if before is not None:
                self._turn.record(Uncordoned(*place, now, event.tenant))
        else:
            until = 0.0 if event.seconds is None else now + event.seconds
            cordon = Cordoned(*place, now, event.tenant, event.reason, event.mode == "drain", until)
            self._turn.record(cordon)
        self._warm.end_vanished()
        if event.mode != "uncordon":
            self._clear(event)
        self._turn.wakes = True
        left = [each.id for each in self.there(event)]
        answer = {"cluster_id": event.cluster, "node_id": event.node or None, "leases": left}
        after = self._turn.state.cordons.get(place)
        self._turn.respond(
            event.to, Information(answer | {"unavailable": after.why if after else None})
        )

    def refusal(self, event: CordonAsked) -> Refusal | None:
        """Return the refusal of an unknown cluster or node, or None."""
        cluster = self._turn.state.clusters.get(event.cluster)
        places = self._turn.state.fleet.node_ids
        if cluster is None:
            return refusals.no_such_cluster(event.cluster, self._turn.state.clusters, places)
        known = (event.cluster, event.node) in self._turn.state.cordons
        if event.node and not known and all(node.id != event.node for node in cluster.nodes):
            return refusals.no_such_node(
                event.cluster, event.node, (node.id for node in cluster.nodes), places
            )
        return None

    def _clear(self, event: CordonAsked) -> None:
        why = self._turn.state.cordons[event.cluster, event.node].why
        for lease in self.there(event):
            if lease.state == "warm" or lease.id in self._turn.state.resetting:
                self._leases.end(lease, why)
            elif event.mode == "cordon":
                continue
            elif lease.state in {"starting", "active"} and lease.may_start_again:
                self._leases.move(lease, f"its node was {why}")
            elif (
                not lease.over and (until := leaves_by(self._turn.state, lease)) < lease.expires_at
            ):
                self._turn.record(Renewed(lease.id, until))

    def there(self, event: CordonAsked) -> list[Lease]:
        """Return the leases that hold capacity in a cluster or on a node."""
        return [
            lease
            for lease in self._turn.state.leases.values()
            if any(
                share.cluster_id == event.cluster and event.node in {"", share.node_id}
                for share in lease.placement
            )
        ]

"""Records where capacity grew, so that the queue checks only those places.

`State` adds places as it applies facts. The queue reads these places to find waiters that may be
served now.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from moorage.model import ClusterId, Lease

PLACES_MAX: Final = 64
"""Maximum places that are stored one by one; with more, all places count as grown."""

GrownPlace = tuple[str, str]
"""A cluster and one of its nodes; an empty node means the whole cluster."""


class Growth:
    """The nodes whose capacity grew, or is about to grow, since the last `take`."""

    def __init__(self) -> None:
        self._places: dict[GrownPlace, None] = {}
        self._everywhere = False

    def note(self, places: Iterable[GrownPlace]) -> None:
        """Add places whose capacity grew or is about to grow."""
        if self._everywhere:
            return
        self._places.update(dict.fromkeys(places))
        if len(self._places) > PLACES_MAX:
            self._everywhere = True

    def note_everywhere(self) -> None:
        """Record that capacity may have grown on all nodes."""
        self._everywhere = True

    def note_cluster(self, cluster: ClusterId) -> None:
        """Add all nodes of a cluster."""
        self.note([(cluster, "")])

    def take(self) -> list[GrownPlace] | None:
        """Return and forget the places with grown capacity; None means everywhere."""
        places = None if self._everywhere else list(self._places)
        self._places, self._everywhere = {}, False
        return places


def places_left_by(lease: Lease) -> Iterator[GrownPlace]:
    """Yield the places that a lease frees when it ends."""
    apart = lease.terms.anti_affinity is not None
    for share in lease.placement:
        # The lease may free its rack or zone for its group: check all nodes of the cluster.
        yield share.cluster_id, "" if apart else share.node_id

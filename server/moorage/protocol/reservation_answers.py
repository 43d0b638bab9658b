"""What is answered about reservations, and what other answers are made of, too."""

from typing import Annotated

from msgspec import Meta, Struct

from moorage.protocol import parts

Seconds = Annotated[float, Meta(description="Seconds since the epoch.")]
Next = Annotated[str | None, Meta(description="`after` of the next page; null: this is the last.")]


class NodeName(Struct):
    """A node by name."""

    cluster_id: str
    node_id: str


class ReservationAnswer(Struct):
    """Nodes that only one tenant gets for a time. `used`: it has had a lease there in that time."""

    reservation: str
    tenant: str
    nodes: list[NodeName]
    resources: parts.Resources
    starts_at: Seconds
    ends_at: Seconds
    lapse_seconds: float
    used: bool


class ReservationPage(Struct):
    """One page of reservations."""

    reservations: list[ReservationAnswer]
    next: Next

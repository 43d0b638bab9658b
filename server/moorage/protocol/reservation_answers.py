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


class ReservedNode(Struct):
    """What is reserved of a node: all of it if `whole`, else devices and a part of the rest."""

    cluster_id: str
    node_id: str
    whole: bool
    gpus: list[str] | None = None
    gpu_milli: int | None = None
    cpu_milli: int | None = None
    memory_mib: int | None = None


class ReservationAnswer(Struct):
    """What only one tenant gets for a time. `used`: it has had a lease on a node of it since."""

    reservation: str
    tenant: str
    nodes: list[ReservedNode]
    resources: parts.Resources
    starts_at: Seconds
    ends_at: Seconds
    lapse_seconds: float
    used: bool


class ReservationPage(Struct):
    """One page of reservations."""

    reservations: list[ReservationAnswer]
    next: Next

"""What is answered about the fleet as it was."""

from typing import Any

from msgspec import Struct

from moorage.protocol.reservation_answers import Seconds


class RecalledFleet(Struct):
    """The fleet before a decision, as topic `map` packs it, and the message to ask again."""

    at: Seconds
    seq: int
    request: dict[str, Any]
    packed: str


class PastFleetAnswer(Struct):
    """The fleet at a time, as topic `map` packs it, after the fact `seq`; 0: before the first."""

    at: Seconds
    seq: int
    packed: str

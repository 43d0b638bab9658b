"""An ask between its consultation and its answer. The allocator keeps one for each."""

from dataclasses import dataclass, field

from moorage.core.judge import Nodes
from moorage.core.words import Address
from moorage.model import Ask


@dataclass(slots=True)
class Pending:
    """An ask that its rule is being consulted about."""

    ask: Ask
    to: list[Address]
    since: float
    consultation: int = 0
    consultations: int = 0
    version: int = 0
    """`Fleet.version` when the rule was asked."""
    layout: int = 0
    """`Fleet.layout` then: what it names may have existed."""
    gains: int = 0
    """`State.gains` when the rule was asked: what it declines, it declines as of then."""
    reserved: Nodes = field(default=())

"""The parameters that describe the requests of a trace to policies."""

from collections.abc import Sequence
from typing import Final

from moorage.lab import trace
from moorage.records.json_values import JsonObject

TYPICAL_SHARES: Final = {"fgd": trace.TYPICAL_SHARE, "expected_fill": 1.0}
"""Policies that take the typical requests of the trace as a parameter, and how many of all."""


def typical_of(policy: str, pods: Sequence[trace.TracePod]) -> JsonObject:
    """Return the parameters that describe the requests of a trace to a policy."""
    share = TYPICAL_SHARES.get(policy)
    return {} if share is None else {"typical": trace.typical_classes(pods, share)}

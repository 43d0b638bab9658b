"""Caches which devices of a node each waiting demand accepts; used when a lease is released.

A filter is the part of a demand that cannot be compared as a number. The cache holds the answers of
all filters about a node until the inventory changes, so a release evaluates only new filters.
`ranking` calls this module.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from moorage.core.state.growth import PLACES_MAX
from moorage.core.state.state import State
from moorage.core.state.waiters import Shape
from moorage.model import ClusterId, Requirement
from moorage.policy.inventory import Bools

NEWS_MAX: Final = 65_536
"""Maximum filters added since the oldest cached answer; one more empties the cache."""

DeviceFilter = tuple[tuple[str, ...], tuple[Requirement, ...], tuple[ClusterId, ...] | None]
"""A filter: GPU models (empty: any), labels of the node, and clusters (None: any)."""


def device_filter(shape: Shape) -> DeviceFilter:
    """Return the filter of a demand."""
    demand, candidates, _ = shape
    return demand.models, demand.where, candidates


class _Answers:
    """The cached answers for one node, by filter number.

    Attributes:
        is_candidate: Whether the node is a candidate for the filter: bool `[filters]`.
        accepted: Which devices of the node the filter accepts: bool `[filters, devices]`.
        seen: Number of filters at the time of the answers.
    """

    def __init__(self, width: int) -> None:
        self.is_candidate = np.zeros(16, np.bool_)
        self.accepted = np.zeros((16, width), np.bool_)
        self.seen = 0


class DeviceFilters:
    """The filters of all waiters, by number; a new filter may get the number of a dropped one.

    Args:
        state: The present state, which is only read.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._numbers: dict[DeviceFilter, int] = {}
        self._users: dict[DeviceFilter, int] = {}
        self._unused: list[int] = []
        self._came: list[tuple[DeviceFilter, int]] = []
        self._answers: dict[int, _Answers] = {}
        self._layout = -1

    def add(self, accepts: DeviceFilter) -> int:
        """Count one more user of a filter; return the filter's number."""
        users = self._users[accepts] = self._users.get(accepts, 0) + 1
        if users > 1:
            return self._numbers[accepts]
        number = self._unused.pop() if self._unused else len(self._numbers)
        self._numbers[accepts] = number
        if len(self._came) >= NEWS_MAX:
            self._answers.clear()
            self._came.clear()
        self._came.append((accepts, number))
        return number

    def drop(self, accepts: DeviceFilter) -> None:
        """Count one user less of a filter."""
        self._users[accepts] -= 1
        if not self._users[accepts]:
            del self._users[accepts]
            self._unused.append(self._numbers.pop(accepts))

    def accepted(self, row: int) -> tuple[Bools, Bools]:
        """Return which filters accept a node, and which of its devices each of them accepts.

        Returns:
            Two read-only arrays: bool `[filters]`, and bool `[filters, devices]`.
        """
        fleet = self._state.fleet
        if self._layout != fleet.layout:
            self._layout = fleet.layout
            self._answers.clear()
        answers = self._answers.get(row)
        news: Iterable[tuple[DeviceFilter, int]]
        if answers is None:
            if len(self._answers) >= PLACES_MAX:
                self._answers.clear()
            answers = self._answers[row] = _Answers(fleet.gpu_total.shape[1])
            news = self._numbers.items()
        else:
            news = self._came[answers.seen :]
        rows = len(self._numbers) + len(self._unused)
        missing = rows - len(answers.is_candidate)
        if missing > 0:
            more = max(missing, rows)
            answers.is_candidate = np.pad(answers.is_candidate, (0, more))
            answers.accepted = np.pad(answers.accepted, ((0, more), (0, 0)))
        answers.seen = len(self._came)
        there = fleet.gpu_total[row] > 0
        models = [fleet.models[code] for code in fleet.gpu_model[row].tolist()]
        cluster, _ = fleet.node_ids[row]
        for (wanted, where, candidates), number in news:
            is_candidate = candidates is None or cluster in candidates
            accepts = is_candidate and (not where or fleet.has_labels(row, where))
            answers.is_candidate[number] = is_candidate
            answers.accepted[number] = there & accepts
            if wanted and accepts:
                known = [model in wanted for model in models]
                answers.accepted[number] &= np.array(known, np.bool_)  # The list may be empty.
        return answers.is_candidate, answers.accepted

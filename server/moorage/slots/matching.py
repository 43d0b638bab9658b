"""Assign nodes to node requests so that each request gets a different acceptable node."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Wish = TypeVar("Wish", bound=Hashable)


def matched(wishes: Sequence[Wish], able: Callable[[Wish], Iterable[str]]) -> list[str] | None:
    """Assign a different acceptable thing to each request, if that is possible.

    Wishes are served in order; one that finds nothing left has those before it move on, along the
    shortest chain that ends at something free (augmenting paths; Berge, 1957). Equal wishes are
    interchangeable, so each kind of them is looked at once per chain.

    Args:
        wishes: What is wanted, one by one.
        able: Returns the ids of all that would do for a wish, the preferred ones first.

    Returns:
        One id for each wish; None: they cannot all have one.
    """
    choices = {request: list(able(request)) for request in dict.fromkeys(wishes)}
    holder: dict[str, int] = {}
    given: dict[int, str] = {}
    for first in range(len(wishes)):
        movers: dict[str, int] = {}  # Id → the wish that would take it over.
        looked_at: set[Wish] = set()
        waiting = deque([first])
        free: str | None = None
        while waiting and free is None:
            number = waiting.popleft()
            if wishes[number] in looked_at:
                continue
            looked_at.add(wishes[number])
            for each in choices[wishes[number]]:
                if each in movers:
                    continue
                movers[each] = number
                if each not in holder:
                    free = each
                    break
                waiting.append(holder[each])
        while free is not None:
            number = movers[free]
            holder[free] = number
            left = given.get(number)
            given[number] = free
            free = left
        if first not in given:
            return None
    return [given[number] for number in range(len(wishes))]

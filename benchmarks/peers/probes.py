"""The order in which a client without a view of the fleet tries GPUs."""

import math
import random
from collections.abc import Iterator
from typing import Final

TRIES: Final = 16
"""GPUs that are tried blindly; after those, a client reads which are free."""


class Probes:
    """Random places among `count`, each once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._random = random.Random(7)

    def __call__(self) -> Iterator[int]:
        """Yield the first few of them, in an order of chance."""
        place = self._random.randrange(self._count)
        step = self._random.randrange(1, self._count)
        while math.gcd(step, self._count) != 1:
            step = self._random.randrange(1, self._count)
        for number in range(min(TRIES, self._count)):
            yield (place + number * step) % self._count

    def shuffled(self, places: list[int]) -> list[int]:
        """Return places in an order of chance."""
        return self._random.sample(places, len(places))

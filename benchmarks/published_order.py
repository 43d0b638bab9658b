"""The order of requests and nodes in the published runs, with the same random numbers.

The figures of "Beware of Fragmentation" (USENIX ATC'23) are means of ten runs, each with its own
random order. Other orders can change such a mean by half a point. So this module computes the
orders of the paper. Its simulator is a Go program, and draws with Go's `math/rand`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moorage.lab.trace import TraceNode, TracePod

_LENGTH: Final = 607
_TAP: Final = 273
_WARM_UP: Final = 7_800_000_000_000
"""Number of steps from seed 1 to a state of the generator; each seed is mixed with that state."""
_MERSENNE: Final = (1 << 31) - 1
_MASK: Final = (1 << 64) - 1
_MULTIPLIER: Final = 48_271
_DEFAULT_SEED: Final = 89_482_311
"""The seed that replaces 0, as multiples of 0 would all be 0."""
_THROWN_AWAY: Final = 20
_DRAWS_OF_WATCHES: Final = 10
"""Number of draws of the paper's simulator before it numbers the nodes: timeouts of its watches."""


class GoRandom:
    """Go's generator `rand.New(rand.NewSource(seed))`, with the methods needed here.

    This is an additive lagged Fibonacci generator of Mitchell and Reeds: draw n is the sum of
    draws n - 273 and n - 607, modulo 2**64 (Knuth, TAOCP vol. 2, 3.2.2).

    Args:
        seed: Seed as in Go: 64 bits, signed.
    """

    def __init__(self, seed: int) -> None:
        self._state = [
            a ^ b for a, b in zip(_warm_state(), _seed_state(seed, shift=20), strict=True)
        ]
        self._tap, self._feed = 0, _LENGTH - _TAP

    def int63(self) -> int:
        """Return an integer below 2**63."""
        self._tap, self._feed = (self._tap - 1) % _LENGTH, (self._feed - 1) % _LENGTH
        drawn = (self._state[self._feed] + self._state[self._tap]) & _MASK
        self._state[self._feed] = drawn
        return drawn & (_MASK >> 1)

    def intn(self, bound: int) -> int:
        """Return an integer below `bound`, which is at most 2**31 - 1."""
        if bound & (bound - 1) == 0:
            return (self.int63() >> 32) & (bound - 1)
        highest = _MERSENNE - (1 << 31) % bound
        while (drawn := self.int63() >> 32) > highest:
            pass
        return drawn % bound

    def shuffle(self, items: list[Any]) -> None:
        """Shuffle in place, as `rand.Shuffle` does: Fisher and Yates, from the end."""
        for last in range(len(items) - 1, 0, -1):
            chosen = self._below(last + 1)
            items[last], items[chosen] = items[chosen], items[last]

    def permutation(self, length: int) -> list[int]:
        """Return the numbers below `length` in random order, as `rand.Perm` does."""
        numbers = [0] * length
        for place in range(length):
            chosen = self.intn(place + 1)
            numbers[place] = numbers[chosen]
            numbers[chosen] = place
        return numbers

    def _below(self, bound: int) -> int:
        """Return an integer below `bound`, as `rand.Shuffle` draws it (Lemire, 2019)."""
        product = (self.int63() >> 31) * bound
        if product & 0xFFFFFFFF < bound:
            threshold = (1 << 32) % bound
            while product & 0xFFFFFFFF < threshold:
                product = (self.int63() >> 31) * bound
        return product >> 32


def read_published_order(
    pods: Sequence[TracePod],
    nodes: Sequence[TraceNode],
    capacity_milli: int,
    arrive: float,
    seed: int,
) -> tuple[list[TracePod], dict[str, str]]:
    """Return the requests in the order of a published run, and that run's names of the nodes.

    This draws like `lab.trace.arrivals` and `lab.trace.permute_names`, but in the order of the
    paper's simulator. The simulator's watches draw in threads, so their number of draws is a guess:
    ten draws reproduce all 30 published means within 0.1 points, except those of `random`.

    Args:
        pods: The trace.
        nodes: The cluster.
        capacity_milli: GPUs of all nodes together, in thousandths.
        arrive: GPUs that the requests want in total, as a multiple of the capacity.
        seed: Seed of the run; the published runs have the seeds 42 to 51.
    """
    draws = GoRandom(seed)
    draws.int63()  # The simulator logs the first.
    trace = sorted(pods, key=lambda pod: pod.name)
    order = trace.copy()
    draws.shuffle(order)
    limit = arrive * capacity_milli
    total = sum(pod.demand_milli for pod in order)
    if total > limit:
        while total > limit:
            total -= order.pop(draws.intn(len(order))).demand_milli
    elif total:
        while True:
            pod = trace[draws.intn(len(trace))]
            if total + pod.gpu_milli > limit:  # One GPU's share, even for several GPUs.
                break
            total += pod.demand_milli
            order.append(pod)
    for _ in range(_DRAWS_OF_WATCHES):
        draws.int63()
    names = sorted(node.name for node in nodes)
    ranks = draws.permutation(len(names))
    return order, {name: f"{rank:04d}-{name}" for name, rank in zip(names, ranks, strict=True)}


def _seed_state(seed: int, shift: int) -> list[int]:
    """Return a state, each number of which is mixed from three linear congruential draws."""
    value = seed % _MERSENNE or _DEFAULT_SEED
    drawn: list[int] = []
    for _ in range(_THROWN_AWAY + 3 * _LENGTH):
        value = value * _MULTIPLIER % _MERSENNE
        drawn.append(value)
    return [
        first << 2 * shift ^ second << shift ^ third
        for first, second, third in zip(*[iter(drawn[_THROWN_AWAY:])] * 3, strict=True)
    ]


@cache
def _warm_state() -> list[int]:
    """Return the state after `_WARM_UP` steps from seed 1, without computing each step.

    Go's source lists the 607 numbers of that state.

    Draw n is the sum of draws n - 273 and n - 607. So the coefficients of x**n modulo
    x**607 - x**334 - 1 weigh 607 draws in a row, whose sum is the draw n places after the first
    of them (Haramoto et al., 2008).
    """
    filled = _seed_state(1, shift=10)
    # Draw n is at index 334 - n, modulo 607; the draws up to number 0 are the initial state.
    draws = [filled[(_LENGTH - _TAP - number) % _LENGTH] for number in range(1 - _LENGTH, 1)]
    for _ in range(_LENGTH - 1):
        draws.append((draws[-_LENGTH] + draws[-_TAP]) & _MASK)
    power, known = _power_of_x(_WARM_UP), np.array(draws, np.uint64)
    state = [0] * _LENGTH
    for number in range(_LENGTH):
        place = (_LENGTH - _TAP - (_WARM_UP + 1 - _LENGTH + number)) % _LENGTH
        state[place] = int((power * known[number : number + _LENGTH]).sum())
    return state


def _power_of_x(exponent: int) -> NDArray[np.uint64]:
    """Return the coefficients of x**exponent modulo x**607 - x**334 - 1, lowest first."""
    result = np.zeros(_LENGTH, np.uint64)
    result[0] = 1
    for bit in f"{exponent:b}":
        result = _reduce(np.convolve(result, result))
        if bit == "1":
            result = _reduce(np.concatenate([np.zeros(1, np.uint64), result]))
    return result


def _reduce(polynomial: NDArray[np.uint64]) -> NDArray[np.uint64]:
    rest = polynomial.copy()
    for degree in range(len(rest) - 1, _LENGTH - 1, -1):
        top = rest[degree : degree + 1]  # A slice: numpy warns of scalars that wrap around.
        rest[degree - _LENGTH : degree - _LENGTH + 1] += top
        rest[degree - _TAP : degree - _TAP + 1] += top
    return rest[:_LENGTH]

"""Simulates a fleet in steady state: requests of a trace arrive at random and end.

Requests are drawn from a trace with replacement and arrive at random moments (Poisson). Each
request stays for a random time, whose mean over all requests is `MEAN_STAY_SECONDS`. At a load of 1
the requests ask on average for as many GPUs as the fleet has. The start is warm: the leases that a
fleet without limits would hold arrive first, each with the rest of its stay.

`timeline` calls this module for backtests, as does the benchmark `churn`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from moorage.lab.errors import CommandError
from moorage.lab.trace import TracePod
from moorage.model import GPU_MILLI

Stays = Literal["memoryless", "lognormal", "sized"]
"""Distribution of durations: exponential; lognormal, with a few very long durations; or
exponential, and longer for requests with more GPUs."""
STAYS: Final[tuple[Stays, ...]] = get_args(Stays)
MEAN_STAY_SECONDS: Final = 3600.0
SIZES: Final = ("CPU only", "share", "1 GPU")
"""Names of request sizes, up to one GPU."""
LOGNORMAL_SIGMA: Final = 1.75
WARM_UP_STAYS: Final = 2.0
"""Length of the warm-up in mean durations: after it, most leases were placed in steady state."""


class Arrival(NamedTuple):
    """One request, with its arrival and the duration of its lease.

    Args:
        at: Arrival, in seconds from the start.
        stay: Duration of its lease, in seconds.
    """

    at: float
    pod: TracePod
    stay: float


@dataclass(frozen=True, slots=True)
class Churn:
    """The parameters of arrivals and ends of requests.

    Args:
        load: Mean number of GPUs that leases would hold if all requests fitted, as a multiple of
            the fleet's GPUs.
        stays: The distribution of durations.
        length: Length of the measurement after the warm-up, in mean durations.
    """

    load: float
    stays: Stays = "memoryless"
    length: float = 2.0

    @property
    def measured_from(self) -> float:
        """The end of the warm-up, in seconds."""
        return WARM_UP_STAYS * MEAN_STAY_SECONDS

    @property
    def end(self) -> float:
        """The time of the last arrival, in seconds."""
        return (WARM_UP_STAYS + self.length) * MEAN_STAY_SECONDS


def arrivals(
    pods: Sequence[TracePod],
    capacity_milli: int,
    churn: Churn,
    seed: int,
    later: Sequence[TracePod] = (),
) -> list[Arrival]:
    """Return requests in the order of their arrival.

    Args:
        pods: The trace from which requests are drawn.
        capacity_milli: Number of GPUs of the fleet, in thousandths.
        churn: Load and durations of the requests.
        seed: Seed of all random choices.
        later: A trace from which requests are drawn in the second half of the measured time, at the
            same load.

    Raises:
        CommandError: No request of the trace asks for GPUs.
    """
    chance = np.random.default_rng(seed)
    change = (churn.measured_from + churn.end) / 2 if later else churn.end
    came = _warm(pods, capacity_milli, churn, chance)
    came += _coming(pods, capacity_milli, churn, chance, (0.0, change))
    if later:
        came += _coming(later, capacity_milli, churn, chance, (change, churn.end))
    return came


def _coming(
    pods: Sequence[TracePod],
    capacity_milli: int,
    churn: Churn,
    chance: np.random.Generator,
    span: tuple[float, float],
) -> list[Arrival]:
    means = _means(pods, churn)
    rate = _mean_leases(pods, means, capacity_milli, churn) / means.mean()
    count = int(chance.poisson(rate * (span[1] - span[0])))
    times = np.sort(chance.uniform(*span, count))
    drawn = chance.integers(len(pods), size=count)
    if churn.stays == "lognormal":
        factors = chance.lognormal(-(LOGNORMAL_SIGMA**2) / 2, LOGNORMAL_SIGMA, count)
    else:
        factors = chance.exponential(1.0, count)
    return _arrivals(times, pods, drawn, means[drawn] * factors)


def _warm(
    pods: Sequence[TracePod], capacity_milli: int, churn: Churn, chance: np.random.Generator
) -> list[Arrival]:
    """Return the leases of an unlimited fleet at a random moment, with their remaining times."""
    means = _means(pods, churn)
    count = int(chance.poisson(_mean_leases(pods, means, capacity_milli, churn)))
    # At a random moment, long leases are more frequent than among arrivals.
    drawn = chance.choice(len(pods), count, p=means / means.sum())
    if churn.stays == "lognormal":
        sigma = LOGNORMAL_SIGMA
        factors = chance.lognormal(sigma**2 / 2, sigma, count) * chance.random(count)
    else:
        factors = chance.exponential(1.0, count)
    return _arrivals(np.zeros(count), pods, drawn, means[drawn] * factors)


def _means(pods: Sequence[TracePod], churn: Churn) -> npt.NDArray[np.float64]:
    """Return the mean stay of each request, in seconds; `MEAN_STAY_SECONDS` on average."""
    if churn.stays != "sized":
        return np.full(len(pods), MEAN_STAY_SECONDS)
    sizes = np.array([sqrt(max(pod.demand_milli / GPU_MILLI, 1.0)) for pod in pods])
    longer: npt.NDArray[np.float64] = sizes * (MEAN_STAY_SECONDS / sizes.mean())
    return longer


def _mean_leases(
    pods: Sequence[TracePod], means: npt.NDArray[np.float64], capacity_milli: int, churn: Churn
) -> float:
    """Return the mean number of simultaneous leases if all requests fitted."""
    demand = np.array([pod.demand_milli for pod in pods], np.float64)
    held_milli = float((demand * means).sum() / means.sum())
    if not held_milli:
        raise CommandError("the trace has no requests for GPUs, so no load can be drawn from it")
    return churn.load * capacity_milli / held_milli


def _arrivals(
    times: npt.NDArray[np.float64],
    pods: Sequence[TracePod],
    drawn: npt.NDArray[np.int64],
    stays: npt.NDArray[np.float64],
) -> list[Arrival]:
    return [
        Arrival(at, pods[number], stay)
        for at, number, stay in zip(times.tolist(), drawn.tolist(), stays.tolist(), strict=True)
    ]


def size_of(gpus: int, gpu_milli: int) -> str:
    """Return the name of a request's size."""
    if not gpus:
        return "CPU only"
    if gpu_milli < GPU_MILLI:
        return "share"
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def by_size(size: str) -> int:
    """Return the sort key of a size: first the order of `SIZES`, then the number of GPUs."""
    return SIZES.index(size) - len(SIZES) if size in SIZES else int(size.split(maxsplit=1)[0])

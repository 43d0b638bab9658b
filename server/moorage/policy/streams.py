"""Estimates the requests that nodes can still host, by random streams of typical requests.

`expected_fill`, a policy that rates a node by expected requests, calls this module.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI
from moorage.policy.typical import RequestKind

STREAMS: Final = 32
"""Streams per kind of node; more streams make the result more exact, at proportional cost."""
STREAM_LENGTH: Final = 40
"""Requests in a stream: enough to fill a node of eight GPUs."""
LEVELS_MAX: Final = 16
"""At most this many levels of free CPU, and of free GPUs, in the search for the next fitting
request. With more different needs, several share a level, and some tried requests do not fit."""
COMPRESSED_MIN: Final = 1024
"""Number of states below which it is cheaper to process finished ones, too, than to remove them."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class RequestStreams:
    """Computes the expected fill of nodes, called A in `expected_fill`.

    A node's GPUs are sized on one scale: the milli of its freest GPU, and one more for every
    whole free GPU beyond the first. So `size >= size_of(kind)` says whether a kind's GPUs fit, for
    shares and for several whole GPUs alike.

    `_next[type, stream, position, size level, cpu level]` is the position of the first request,
    from `position` on, that might fit a node with this room. Position `length` is the end: a
    request of nothing.

    Args:
        kinds: The kinds of request in the streams.
        weights: How frequent each kind is on each type of node: `[types, kinds]`.
        width: Number of GPUs of the largest node.
        seed: Seed of the streams, the same for every type of node.
    """

    def __init__(
        self, kinds: Sequence[RequestKind], weights: Floats, width: int, seed: int
    ) -> None:
        self._length = length = max(STREAM_LENGTH, 5 * width)
        self._width = width
        # One number has a GPU's free milli and its index, so no two GPUs are equal. A number
        # below zero wraps around to one above all others.
        self._type = np.dtype(np.uint16 if GPU_MILLI * width + width < 1 << 15 else np.uint32)
        drawn = np.stack([self._draw(each, length, seed) for each in weights])
        # The end of every stream is a request of nothing.
        drawn = np.concatenate([drawn, np.full((*drawn.shape[:2], 1), len(kinds))], 2)
        needs = [(k.cpu_milli, size_of(k), k.gpu_milli, k.gpus) for k in kinds]
        cpu, size, milli, gpus = np.array([*needs, (0, 0, 0, 0)], np.int64).T
        self._cpu = cpu[drawn].ravel()
        self._share = (milli * (gpus == 1) * width).astype(self._type)[drawn].ravel()
        self._several = (gpus * (gpus > 1))[drawn].ravel() if gpus.max() > 1 else None
        self._cpu_steps, cpu_level = levels(cpu)
        size_steps, size_level = levels(size)
        self._exact = len(np.unique(cpu)) <= LEVELS_MAX >= len(np.unique(size))
        shape = len(size_steps) + 1, len(self._cpu_steps) + 1
        self._per_position = shape[0] * shape[1]
        # Start of the rows of each size level: by the freest GPU, and by the whole ones.
        freest = np.arange((GPU_MILLI + 1) * width) // max(1, width)
        self._size_at = size_steps.searchsorted(freest, "right") * shape[1]
        whole = np.arange(width + 1).clip(1) - 1 + GPU_MILLI
        self._more_at = size_steps.searchsorted(whole, "right") * shape[1]
        self._more_at -= self._more_at[0]
        fits = size_level[:, None, None] <= np.arange(shape[0])[:, None]
        self._next = self._nexts(fits & (cpu_level[:, None, None] <= np.arange(shape[1])), drawn)

    def _draw(self, weights: Floats, length: int, seed: int) -> Ints:
        """Return streams in which each kind occurs about as often as expected."""
        chance = np.random.default_rng(seed)
        steps = np.arange(length)[:, None] + chance.random((length, STREAMS))
        shares = np.cumsum(weights)
        drawn = np.searchsorted(shares, steps / length * shares[-1], side="right")
        shuffled: Ints = chance.permuted(drawn.clip(0, len(weights) - 1), axis=0).T
        return shuffled

    def _nexts(self, fits: Bools, drawn: Ints) -> Ints:
        """Return `_next` as a flat array, computed from the end of the streams to their start."""
        length = self._length
        shape = *drawn.shape[:2], length + 2, *fits.shape[1:]
        table = np.full(shape, length, np.min_scalar_type(length))
        for position in range(length - 1, -1, -1):
            here = fits[drawn[:, :, position]]
            table[:, :, position] = np.where(here, position, table[:, :, position + 1])
        return table.ravel()

    def fill(self, sorts: Ints, cpu: Ints, gpus: Ints) -> Floats:
        """Return A, the expected fill, of some node states, in milli.

        Args:
            sorts: Type of each node: `[states]`.
            cpu: Free CPU milli: `[states]`.
            gpus: Free milli of every GPU, 0 to 1000: `[states, devices]`.
        """
        length, width, per_position = self._length, self._width, self._per_position
        streams = (sorts[:, None] * STREAMS + np.arange(STREAMS)).ravel()
        items = streams * (length + 1)
        starts = streams * ((length + 2) * per_position)
        coded = (gpus * width + np.arange(width)).astype(self._type).T
        free = coded.repeat(STREAMS, axis=1)
        left = cpu.repeat(STREAMS)
        filled = np.zeros(len(streams), np.int64)
        lanes: Any = slice(None)
        at = starts
        while True:
            freest = np.maximum.reduce(free)
            at = at + self._size_at.take(freest)
            if self._several is not None:
                at += self._more_at.take((free >= GPU_MILLI * width).sum(0))
            at += self._cpu_steps.searchsorted(left, "right")
            position = self._next.take(at)
            going = position < length
            count = np.count_nonzero(going)
            if not count:
                break
            if count * 2 < len(going) and len(going) > COMPRESSED_MIN:
                lanes = np.flatnonzero(going) if isinstance(lanes, slice) else lanes[going]
                free, left, position = free[:, going], left[going], position[going]
                items, starts, freest = items[going], starts[going], freest[going]
            item = items + position
            at = starts + (position + np.int64(1)) * per_position
            takes, wants = self._cpu.take(item), self._share.take(item)
            if self._several is not None:
                several = self._several.take(item)
                if several.any():
                    filled[lanes] += self._take_several(several, free, takes, left)
            if not self._exact:
                vain = (takes > left) | (wants > freest)
                takes[vain] = wants[vain] = 0
            after = free - wants
            np.copyto(free, after, where=after == np.minimum.reduce(after))
            left = left - takes
            filled[lanes] += wants
        mean: Floats = filled.reshape(-1, STREAMS).sum(1) / (STREAMS * width)
        return mean

    def _take_several(self, several: Ints, free: npt.NDArray[Any], takes: Ints, left: Ints) -> Ints:
        """Place requests for several whole GPUs; nodes with too few free GPUs get none."""
        lanes = np.flatnonzero(several)
        these, whole = free[:, lanes], GPU_MILLI * self._width
        rank = (these >= whole).cumsum(0)
        enough = (rank[-1] >= several[lanes]) & (takes[lanes] <= left[lanes])
        taken = (these >= whole) & (rank <= several[lanes]) & enough
        free[:, lanes] = these - (taken * whole).astype(self._type)
        takes[lanes] *= enough
        filled = np.zeros(len(several), np.int64)
        filled[lanes] = several[lanes] * enough * whole
        return filled


def size_of(kind: RequestKind) -> int:
    """Return the GPUs that a kind needs of a node, on the scale of `RequestStreams`."""
    return kind.gpu_milli + kind.gpus - 1 if kind.gpus else 0


def levels(needs: Ints) -> tuple[Ints, Ints]:
    """Return levels of free amounts, and for each need the first level that may suffice.

    `searchsorted(steps, free, "right")` is the level of `free`. A need's level is never above
    the level of an amount that meets the need; levels are exact while there are no more than
    `LEVELS_MAX` different needs.
    """
    different = np.unique(needs)
    if len(different) > LEVELS_MAX:
        different = different[np.linspace(0, len(different) - 1, LEVELS_MAX).astype(np.int64)]
    return different, np.searchsorted(different, needs, side="right")

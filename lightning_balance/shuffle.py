"""The order of an epoch: a permutation that any rank can draw again, and what is left of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.progress import EpochProgress

# Up to here numpy's own permutation takes some 50 ms; a first batch must not wait for tens of millions of swaps.
LARGEST_DRAWN_AT_ONCE = 2**21
_NUM_ROUNDS = 8


class EpochOrder:
    """The positions ``0 .. num_samples - 1`` in the order of one epoch.

    Up to 2,097,152 samples the order is ``np.random.default_rng([seed, epoch]).permutation(num_samples)``. Above, it
    is a keyed bijection (a Feistel network with keys from the same generator, values outside the range mapped again
    until they fall inside; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), computed slice by slice.

    >>> EpochOrder(5, seed=0, epoch=1, shuffle=False).slice(1, 3)
    array([1, 2])
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self._drawn: NDArray[np.int64] | None = None
        self._keys: NDArray[np.uint64] | None = None
        if shuffle:
            rng = np.random.default_rng([seed, epoch])
            if num_samples <= LARGEST_DRAWN_AT_ONCE:
                self._drawn = rng.permutation(num_samples)
            else:
                self._keys = rng.integers(0, 2**63, size=_NUM_ROUNDS, dtype=np.uint64)

    def slice(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the samples at places ``[start, end)`` of the order."""
        if self._drawn is not None:
            return self._drawn[start:end]
        places = np.arange(start, min(end, self.num_samples), dtype=np.int64)
        if self._keys is None:
            return places
        return _bijection(places.astype(np.uint64), self.num_samples, self._keys).astype(np.int64)


class RemainingOrder:
    """The samples of an epoch that are still to serve, in the epoch's order.

    Args:
        whole: the order of the epoch.
        begin: what has been served before; what it left waiting comes first.
        left_out: samples that are not served at all; with any, the whole order is drawn.

    Attributes:
        num_samples: number of samples to serve.

    >>> whole = EpochOrder(6, seed=0, epoch=0, shuffle=False)
    >>> rest = RemainingOrder(whole, EpochProgress(num_places=3, waiting=(1,)), left_out=np.array([4]))
    >>> rest.slice(0, 3), rest.places_taken(2)
    (array([1, 3, 5]), 5)
    """

    def __init__(self, whole: EpochOrder, begin: EpochProgress, left_out: NDArray[np.int64]) -> None:
        self._whole = whole
        self._first_place = begin.num_places
        self._waiting = np.array(begin.waiting, dtype=np.int64)
        self._places: NDArray[np.int64] | None = None
        if len(left_out):
            is_kept = np.ones(whole.num_samples, dtype=bool)
            is_kept[left_out] = False
            self._waiting = self._waiting[is_kept[self._waiting]]
            untouched = whole.slice(begin.num_places, whole.num_samples)
            self._places = begin.num_places + np.flatnonzero(is_kept[untouched])
            self._untouched = untouched[is_kept[untouched]]
        num_untouched = whole.num_samples - begin.num_places if self._places is None else len(self._places)
        self.num_samples = len(self._waiting) + num_untouched

    def slice(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the samples at ``[start, end)`` of what remains."""
        num_waiting = len(self._waiting)
        untouched = self._slice_untouched(max(start - num_waiting, 0), max(end - num_waiting, 0))
        if start >= num_waiting:
            return untouched
        return np.concatenate([self._waiting[start:end], untouched])

    def places_taken(self, end: int) -> int:
        """Return how many places of the whole epoch's order are taken once the first ``end`` samples are."""
        untouched = end - len(self._waiting)
        if untouched <= 0:
            return self._first_place
        if self._places is None:
            return self._first_place + untouched
        return int(self._places[untouched]) if untouched < len(self._places) else self._whole.num_samples

    def waiting_after(self, end: int) -> NDArray[np.int64]:
        """Return the samples that were waiting before and still are, once the first ``end`` samples are taken."""
        return self._waiting[end:]

    def _slice_untouched(self, start: int, end: int) -> NDArray[np.int64]:
        if self._places is None:
            return self._whole.slice(self._first_place + start, self._first_place + end)
        return self._untouched[start:end]


def _bijection(places: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    half_bits = np.uint64(((size - 1).bit_length() + 1) // 2)
    values = _feistel(places, half_bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = outside[values[outside] >= size]
    return values


def _feistel(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    joined: NDArray[np.uint64] = (left << half_bits) | right
    return joined


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers (the finaliser of MurmurHash3); overflow wraps around."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(33))
    return mixed

"""The order of an epoch: a permutation that any rank can draw again, and of which any slice is cheap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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

    def leave_out(self, positions: NDArray[np.int64]) -> None:
        """Take some positions out of the order; the others keep theirs. The whole order is drawn for it."""
        kept = np.ones(self.num_samples, dtype=bool)
        kept[positions] = False
        everything = self.slice(0, self.num_samples)
        self._drawn = everything[kept[everything]]

    def slice(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the samples at places ``[start, end)`` of the order."""
        if self._drawn is not None:
            return self._drawn[start:end]
        places = np.arange(start, min(end, self.num_samples), dtype=np.int64)
        if self._keys is None:
            return places
        return _bijection(places.astype(np.uint64), self.num_samples, self._keys).astype(np.int64)


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

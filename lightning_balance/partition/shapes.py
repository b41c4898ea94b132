"""Few padded lengths: which ones to keep so that padding costs least."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Lengths = TypeVar("Lengths", int, NDArray[np.int64])

# More candidates than this are thinned out to quantiles: the programme below is quadratic in them.
_MOST_CANDIDATES = 512


def choose_shapes(lengths: NDArray[np.int64], max_shapes: int, pad_to_multiple_of: int) -> NDArray[np.int64]:
    """Return at most ``max_shapes`` padded lengths, ascending, for the fewest padded tokens over all samples.

    Exact (a dynamic programme over sorted distinct lengths) up to 512 distinct lengths; above, over 512 quantiles.

    >>> choose_shapes(np.array([1, 2, 9, 10]), max_shapes=2, pad_to_multiple_of=1)
    array([ 2, 10])
    """
    candidates, counts = np.unique(round_up_to_multiple(lengths, pad_to_multiple_of), return_counts=True)
    candidates, counts = _thin_out(candidates, counts)
    if len(candidates) <= max_shapes:
        return candidates
    num = len(candidates)
    totals = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    # padded[i, j]: tokens of the samples in (candidate i - 1, candidate j] when all are padded to candidate j
    padded = (totals[None, 1:] - totals[:-1, None]) * candidates[None, :]
    padded[np.tril_indices(num, -1)] = np.inf
    best = padded[0]
    choices: list[NDArray[np.int64]] = []
    for _ in range(max_shapes - 1):
        table = np.concatenate([[0.0], best[:-1]])[:, None] + padded
        choices.append(table.argmin(axis=0))
        best = table.min(axis=0)
    return candidates[_trace(choices, num - 1)]


def round_up_to_multiple(lengths: Lengths, multiple: int) -> Lengths:
    """Return lengths rounded up to a multiple, as collate functions pad.

    >>> round_up_to_multiple(np.array([1, 8, 9]), 8), round_up_to_multiple(9, 8)
    (array([ 8,  8, 16]), 16)
    """
    return -(-lengths // multiple) * multiple


def round_up_to(lengths: NDArray[np.int64], shapes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each length the smallest shape that holds it.

    >>> round_up_to(np.array([1, 2, 9]), np.array([2, 10]))
    array([ 2,  2, 10])
    """
    return shapes[np.searchsorted(shapes, lengths)]


def _thin_out(candidates: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if len(candidates) <= _MOST_CANDIDATES:
        return candidates, counts
    totals = np.cumsum(counts)
    wanted = np.linspace(totals[0], totals[-1], _MOST_CANDIDATES)
    kept = np.unique(np.searchsorted(totals, wanted))
    return candidates[kept], np.diff(np.concatenate([[0], totals[kept]]))


def _trace(choices: list[NDArray[np.int64]], last: int) -> NDArray[np.int64]:
    picked = [last]
    for choice in reversed(choices):
        first = int(choice[picked[-1]])
        if first == 0:
            break
        picked.append(first - 1)
    return np.array(picked[::-1], dtype=np.int64)

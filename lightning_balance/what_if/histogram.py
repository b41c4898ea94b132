"""How many samples, and how many of the tokens, there are of each length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Histogram", "histogram_of"]

_NUM_BINS = 48
_LONG_TAIL = 6.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """Counts between edges; the last bin includes its end.

    Attributes:
        edges: lengths between which is counted, of shape ``(num_bins + 1,)``.
        num_samples: samples of each bin, of shape ``(num_bins,)``.
        num_tokens: tokens of these samples.
        is_logarithmic: whether bins are equally wide on a logarithmic axis.
    """

    edges: NDArray[np.float64]
    num_samples: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    is_logarithmic: bool


def histogram_of(lengths: NDArray[np.int64]) -> Histogram:
    """Count lengths in up to 48 bins, on a logarithmic axis where a few samples are far longer than most.

    Edges lie halfway between whole numbers, so that no bin has more whole numbers in it than its neighbours by rounding
    alone.

    Example:
        >>> histogram_of(np.array([3, 3, 5])).num_samples.tolist()
        [2, 0, 1]
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    is_logarithmic = longest > _LONG_TAIL * float(np.median(lengths)) and longest > shortest + _NUM_BINS
    ends = shortest - 0.5, longest + 0.5
    if is_logarithmic:
        edges = np.unique(np.floor(np.geomspace(*ends, _NUM_BINS + 1)) + 0.5)
        edges[0], edges[-1] = ends
    else:
        width = max(1, -(-(longest - shortest + 1) // _NUM_BINS))
        edges = np.arange(ends[0], ends[1] + width, width)
    samples = np.histogram(lengths, edges)[0]
    tokens = np.histogram(lengths, edges, weights=lengths)[0].astype(np.int64)
    return Histogram(edges=edges, num_samples=samples, num_tokens=tokens, is_logarithmic=is_logarithmic)

"""Which micro-batches to measure: powers of two of samples at quantiles of the lengths, all within a cap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.calibration.error import CalibrationError
from lightning_balance.validation import check_positive_int

NUM_LENGTHS = 6
NUM_COUNTS = 4
MIN_POINTS = 3
"""No fit of three coefficients can use fewer."""


@dataclass(frozen=True, order=True)
class GridPoint:
    """A micro-batch to measure: ``num_samples`` samples padded to ``padded_length`` tokens."""

    num_samples: int
    padded_length: int

    @property
    def tokens(self) -> int:
        """Padded tokens."""
        return self.num_samples * self.padded_length


def choose_grid(
    padded_lengths: NDArray[np.int64],
    *,
    max_tokens: int,
    num_lengths: int = NUM_LENGTHS,
    num_counts: int = NUM_COUNTS,
) -> list[GridPoint]:
    """Choose micro-batches over the whole range that training will use.

    Lengths are those at evenly spaced quantiles of the data, the shortest and the longest that fits included; for each,
    powers of two of samples from 1 to what the cap and the number of samples of the data allow.

    Args:
        padded_lengths: ``(num_samples,)`` lengths of the data in tokens, as padded alone.
        max_tokens: cap on padded tokens of every point.
        num_lengths: at most so many lengths.
        num_counts: at most so many counts per length.

    Raises:
        CalibrationError: the cap or the data leave fewer than :data:`MIN_POINTS` points, which no fit can use.

    >>> choose_grid(np.arange(1, 101), max_tokens=200, num_lengths=2, num_counts=3)
    [GridPoint(num_samples=1, padded_length=1), GridPoint(num_samples=8, padded_length=1),
     GridPoint(num_samples=64, padded_length=1), GridPoint(num_samples=1, padded_length=100),
     GridPoint(num_samples=2, padded_length=100)]
    """
    check_positive_int("max_tokens", max_tokens)
    fitting = padded_lengths[padded_lengths <= max_tokens]
    points = []
    if len(fitting):
        quantiles = np.quantile(fitting, np.linspace(0, 1, num_lengths), method="inverted_cdf")
        for length in np.unique(quantiles).astype(int).tolist():
            largest = min(max_tokens // length, len(padded_lengths))
            points += [GridPoint(count, length) for count in _counts(largest, num_counts)]
    if len(points) < MIN_POINTS:
        raise CalibrationError(
            f"a fit needs at least {MIN_POINTS} sizes of micro-batches, but max_tokens={max_tokens} and"
            f" {len(padded_lengths)} samples of up to {int(padded_lengths.max())} padded tokens allow {len(points)}:"
            " raise max_tokens, or calibrate with more data"
        )
    return points


def _counts(largest: int, num_counts: int) -> list[int]:
    """Powers of two from 1 to at most ``largest``, thinned evenly with both ends kept."""
    exponents = np.linspace(0, largest.bit_length() - 1, min(num_counts, largest.bit_length()))
    return [1 << exponent for exponent in np.unique(exponents.round().astype(int)).tolist()]

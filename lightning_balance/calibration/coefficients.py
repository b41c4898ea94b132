"""Coefficients of the cost of a micro-batch, from measured times: robust, and none of them negative."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

HUBER = 1.345
"""Residuals beyond so many robust standard deviations lose weight; 1.345 keeps 95 % of efficiency on normal noise."""
SMALLEST_DEVIATION = 1e-3
"""Relative errors below about this are rounding and clock resolution, never outliers."""
MAX_ROUNDS = 50


@dataclass(frozen=True)
class Coefficients:
    """``seconds = per_micro_batch + per_token * n * L + per_token_and_length * n * L**2``, each at least 0."""

    per_micro_batch: float
    per_token: float
    per_token_and_length: float

    def seconds(self, num_samples: ArrayLike, padded_lengths: ArrayLike) -> NDArray[np.float64]:
        """Return the fitted times of micro-batches.

        >>> Coefficients(1.0, 0.5, 0.0).seconds([2], [4])
        array([5.])
        """
        columns = _columns(np.asarray(num_samples, dtype=float), np.asarray(padded_lengths, dtype=float))
        fitted: NDArray[np.float64] = columns @ np.array(astuple(self))
        return fitted


def fit_coefficients(num_samples: ArrayLike, padded_lengths: ArrayLike, seconds: ArrayLike) -> Coefficients:
    """Fit by least squares on relative errors, iteratively reweighted (Huber), so that a few slow moments weigh little.

    Args:
        num_samples: samples of each measured micro-batch.
        padded_lengths: its padded length in tokens.
        seconds: its measured time.

    Raises:
        ValueError: fewer than three measurements, values that are not positive, or times that do not grow with the
            number of tokens.

    >>> fit_coefficients([1, 2, 4, 4], [8, 8, 8, 16], [1.08, 1.16, 1.32, 1.64]).per_micro_batch.__round__(6)
    1.0
    """
    count, length, time = _measurements(num_samples, padded_lengths, seconds)
    columns = _columns(count, length) / time[:, None]
    weights = np.ones_like(time)
    found = _fit_non_negative(columns, weights)
    for _ in range(MAX_ROUNDS):
        errors = np.abs(columns @ found - 1)
        deviation = max(1.4826 * float(np.median(errors)), SMALLEST_DEVIATION)
        weights = np.minimum(1.0, HUBER * deviation / np.maximum(errors, deviation * 1e-9))
        before, found = found, _fit_non_negative(columns, weights)
        if np.allclose(columns @ before, columns @ found, rtol=1e-9, atol=0):
            break
    return Coefficients(*found.tolist())


def _columns(count: NDArray[np.float64], length: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens = count * length
    return np.stack([np.ones_like(tokens), tokens, tokens * length], axis=-1)


def _measurements(
    num_samples: ArrayLike, padded_lengths: ArrayLike, seconds: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    count, length, time = (np.asarray(values, dtype=np.float64) for values in (num_samples, padded_lengths, seconds))
    if not count.ndim == length.ndim == time.ndim == 1 or not len(count) == len(length) == len(time):
        raise ValueError(
            "num_samples, padded_lengths and seconds must be 1-D and equally long, "
            f"got shapes {count.shape}, {length.shape} and {time.shape}."
        )
    if len(time) < 3:
        raise ValueError(f"a fit needs at least 3 measured micro-batches, got {len(time)}; measure more sizes.")
    for name, values in (("num_samples", count), ("padded_lengths", length), ("seconds", time)):
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            index = int(np.argmax(bad))
            raise ValueError(f"{name}[{index}] must be finite and above 0, got {values[index]}.")
    return count, length, time


def _fit_non_negative(columns: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return non-negative coefficients that bring ``columns`` to 1, the token column in use; every subset is tried."""
    roots = np.sqrt(weights)
    scale = columns.max(axis=0)
    best, best_error = None, inf
    for used in (subset for size in (1, 2, 3) for subset in combinations(range(3), size) if 1 in subset):
        part = columns[:, used] / scale[list(used)] * roots[:, None]
        solution = np.linalg.lstsq(part, roots, rcond=None)[0]
        error = float(np.square(part @ solution - roots).sum())
        if (solution >= 0).all() and solution[used.index(1)] > 0 and error < best_error * (1 - 1e-9):
            best, best_error = np.zeros(3), error
            best[list(used)] = solution / scale[list(used)]
    if best is None:
        raise ValueError(
            "seconds do not grow with the number of tokens; measure micro-batches of more different sizes."
        )
    return best

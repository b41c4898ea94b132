"""What a micro-batch costs, and the largest micro-batch that stays within a cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_balance.calibration.coefficients import fit_coefficients

CostFunction = Callable[[Any, Any], Any]
"""``cost(num_samples, padded_length) -> cost``: on numpy arrays element by element, or on single numbers only."""

# Costs are compared after different roundings; a relative step of 1e-12 is far above those and far below any real gap.
ROUNDING = 1e-12
# Sums and squares of costs have to stay finite.
_LARGEST_COEFFICIENT = 1e100


@dataclass(frozen=True)
class CostModel:
    """Modelled time of a micro-batch: ``intercept + n * L + alpha * n * L**2`` for n samples padded to L.

    Attributes:
        intercept: price of a micro-batch whatever is in it (launches, communication), in tokens.
        alpha: weight of the quadratic part (attention) per token of length.

    Raises:
        ValueError: a coefficient is negative, not finite or above 1e100.

    >>> CostModel(intercept=10.0, alpha=0.5).cost(2, 4)
    34.0
    """

    intercept: float = 0.0
    alpha: float = 0.001

    def __post_init__(self) -> None:
        for name, value in (("intercept", self.intercept), ("alpha", self.alpha)):
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{name} must be a number of at least 0, got {value!r} ({type(value).__name__}).")
            if not 0 <= value < inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}.")
            if value > _LARGEST_COEFFICIENT:
                raise ValueError(f"{name} must be at most {_LARGEST_COEFFICIENT:g}, got {value}.")
            object.__setattr__(self, name, float(value))

    def cost(self, num_samples: ArrayLike, padded_length: ArrayLike) -> Any:
        """Return the cost of micro-batches, broadcasting; in units of one token of a very short sample.

        >>> CostModel(alpha=0.0).cost(np.array([1, 2]), 8)
        array([ 8., 16.])
        """
        count = np.asarray(num_samples, dtype=np.float64)
        length = np.asarray(padded_length, dtype=np.float64)
        cost = self.intercept + count * (length + self.alpha * length * length)
        return float(cost) if np.ndim(cost) == 0 else cost

    def __call__(self, num_samples: ArrayLike, padded_length: ArrayLike) -> Any:
        """Return :meth:`cost`, so that a model stands wherever a cost callable does."""
        return self.cost(num_samples, padded_length)

    @classmethod
    def fit(cls, num_samples: ArrayLike, padded_lengths: ArrayLike, seconds: ArrayLike) -> CostModel:
        """Fit the coefficients to measured times: robust least squares on relative errors, none of them negative.

        Args:
            num_samples: samples of each measured micro-batch.
            padded_lengths: its padded length in tokens.
            seconds: its measured time; only ratios matter, since costs are in tokens.

        Raises:
            ValueError: fewer than three measurements, values that are not positive, or times that do not grow
                with the number of tokens.

        >>> model = CostModel.fit([1, 2, 4, 4], [8, 8, 8, 16], [108, 116, 132, 164])
        >>> round(model.intercept), round(model.alpha, 6)
        (100, 0.0)
        """
        found = fit_coefficients(num_samples, padded_lengths, seconds)
        return cls(
            intercept=found.per_micro_batch / found.per_token, alpha=found.per_token_and_length / found.per_token
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedCost:
    """A checked cost, ready for planning: vectorised, with its inverse. Made by :func:`prepare_cost`.

    Attributes:
        function: the cost; works on arrays.
        max_count: the largest number of samples in a micro-batch.
        max_tokens: the cap on padded tokens of a micro-batch, where there is one; it only saves evaluations.
    """

    function: CostFunction
    max_count: int
    max_tokens: int | None = None
    _rows: dict[int, NDArray[np.float64]] = field(default_factory=dict, repr=False)

    def __call__(self, num_samples: ArrayLike, padded_length: ArrayLike) -> NDArray[np.float64]:
        """Return costs as a float64 array of the broadcast shape."""
        if isinstance(self.function, CostModel):
            return np.asarray(self.function.cost(num_samples, padded_length))
        count, length = np.broadcast_arrays(num_samples, padded_length)
        return np.asarray(self.function(count, length), dtype=np.float64)

    @property
    def linear(self) -> CostModel | None:
        """The model where the cost is ``intercept + n * unit(L)``, whose inverse needs no search."""
        return self.function if isinstance(self.function, CostModel) else None

    def row(self, padded_length: int) -> NDArray[np.float64]:
        """Return the costs of 1, 2, ... samples of a padded length, as many as a micro-batch may hold; kept.

        Raises:
            ValueError: the cost falls somewhere between the points that were checked at first.
        """
        if padded_length not in self._rows:
            largest = self.max_count
            if self.max_tokens is not None:
                largest = min(largest, max(self.max_tokens // padded_length, 1))
            counts = np.arange(1, largest + 1)
            costs = self(counts, padded_length)
            check_values(costs[:, None], counts, np.array([padded_length]))
            self._rows[padded_length] = costs
        return self._rows[padded_length]

    def largest_counts(self, bounds: NDArray[np.float64], padded_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the largest number of samples whose cost stays within each bound; 0 where not even one does.

        Args:
            bounds: costs, of shape ``(num_bounds,)``.
            padded_lengths: lengths, of shape ``(num_lengths,)``.

        Returns:
            Counts of shape ``(num_bounds, num_lengths)``, at most ``max_count`` and what ``max_tokens`` allows a
            :class:`CostModel` excepted.
        """
        model = self.linear
        if model is not None:
            room = np.maximum(bounds * (1 + ROUNDING) - model.intercept, 0.0)
            counts = room[:, None] / (model.cost(1, padded_lengths) - model.intercept)
            largest: NDArray[np.int64] = np.minimum(counts, self.max_count, out=counts).astype(np.int64)
            return largest
        unique, inverse = np.unique(padded_lengths, return_inverse=True)
        limits = bounds * (1 + ROUNDING)
        table = [np.searchsorted(self.row(length), limits, side="right") for length in unique.tolist()]
        counts_of_unique: NDArray[np.int64] = np.stack(table, axis=1)
        return counts_of_unique[:, inverse]

    def price_per_micro_batch(self, padded_length: int) -> float:
        """Return what one more micro-batch costs by itself: what two samples save by sharing one."""
        single, double = self(np.array([1, 2]), padded_length).tolist()
        saved = 2 * single - double
        return saved if saved > 1e-9 * single else 0.0


def prepare_cost(
    cost: CostFunction | None, padded_lengths: NDArray[np.int64], max_count: int, max_tokens: int | None = None
) -> PreparedCost:
    """Check a cost on a sample of points and make it ready for planning.

    Args:
        cost: a :class:`CostModel`, a callable of ``(num_samples, padded_length)``, or None for ``CostModel()``.
        padded_lengths: the lengths that will occur.
        max_count: the largest number of samples in a micro-batch.
        max_tokens: the cap on padded tokens of a micro-batch.

    Raises:
        TypeError: ``cost`` is not callable.
        ValueError: the cost is negative, not finite, or falls where samples or length grow; with the counter-example.

    >>> prepared = prepare_cost(lambda n, length: n * length, np.array([4, 8]), max_count=9)
    >>> prepared.largest_counts(np.array([17.0]), np.array([4, 8]))
    array([[4, 2]])
    """
    if cost is None:
        cost = CostModel()
    if max_tokens is not None:
        max_count = min(max_count, max(max_tokens // int(padded_lengths.min()), 1))
    if isinstance(cost, CostModel):
        return PreparedCost(function=cost, max_count=max_count, max_tokens=max_tokens)
    if not callable(cost):
        raise TypeError(f"cost must be callable as cost(num_samples, padded_length), got {cost!r}")
    counts, lengths = probe_points(padded_lengths, max_count)
    function = _vectorised(cost, counts, lengths)
    prepared = PreparedCost(function=function, max_count=max_count, max_tokens=max_tokens)
    check_values(prepared(counts[:, None], lengths[None, :]), counts, lengths)
    return prepared


def probe_points(padded_lengths: NDArray[np.int64], max_count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sample counts and lengths at which a cost is checked and fingerprinted: at most 64 of each.

    >>> probe_points(np.array([5, 3, 5]), max_count=4)
    (array([1, 2, 3, 4]), array([3, 5]))
    """
    counts = np.unique(np.geomspace(1, max(max_count, 1), 32).round().astype(np.int64))
    unique = np.unique(padded_lengths)
    if len(unique) > 64:
        unique = unique[np.linspace(0, len(unique) - 1, 64).round().astype(np.int64)]
    return np.union1d(counts, np.arange(1, min(max_count, 16) + 1)), unique


def _vectorised(cost: CostFunction, counts: NDArray[np.int64], lengths: NDArray[np.int64]) -> CostFunction:
    """Return ``cost`` where it works on arrays, else a version that calls it number by number."""
    # arrays of one element would hide that a callable wants single numbers: repeat the last points
    grid = np.broadcast_arrays(np.append(counts, counts[-1])[:, None], np.append(lengths, lengths[-1])[None, :])
    one_by_one = np.vectorize(cost, otypes=[np.float64])
    try:
        values = np.asarray(cost(*grid), dtype=np.float64)
    except (TypeError, ValueError):  # math.sqrt, max and if want single numbers
        return one_by_one
    if values.shape != grid[0].shape:
        return one_by_one
    corner = float(cost(int(counts[-1]), int(lengths[-1])))
    return cost if np.isclose(values[-1, -1], corner, equal_nan=True) else one_by_one


def check_values(values: NDArray[np.float64], counts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Check costs of shape ``(num_counts, num_lengths)``.

    Raises:
        ValueError: a cost is negative or not finite, or falls where samples or length grow; with the counter-example.
    """
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            "cost must be finite and not negative, "
            f"but cost({counts[row]}, {lengths[column]}) is {values[row, column]}."
        )
    for axis, what in ((0, "num_samples"), (1, "padded_length")):
        falls = np.argwhere(np.diff(values, axis=axis) < -ROUNDING * values.max(initial=0))
        if len(falls):
            row, column = falls[0]
            next_row, next_column = (row + 1, column) if axis == 0 else (row, column + 1)
            raise ValueError(
                f"cost must not fall when {what} grows, but cost({counts[row]}, {lengths[column]}) is "
                f"{values[row, column]} and cost({counts[next_row]}, {lengths[next_column]}) is "
                f"{values[next_row, next_column]}."
            )

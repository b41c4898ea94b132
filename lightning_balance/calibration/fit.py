"""The cost model of measured micro-batches, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_balance.calibration.coefficients import Coefficients, fit_coefficients
from lightning_balance.calibration.grid import GridPoint
from lightning_balance.cost import CostModel

MEDIAN_BOUND = 0.10
"""A median relative error above it is a warning."""
WORST_BOUND = 0.35
"""A relative error of any point above it is a warning."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostFit:
    """A cost model fitted to measured micro-batches.

    Attributes:
        points: what was measured.
        repeats: ``(num_points, num_repeats)`` seconds.
        coefficients: the fit, in seconds.
    """

    points: Sequence[GridPoint]
    repeats: NDArray[np.float64]
    coefficients: Coefficients

    @property
    def model(self) -> CostModel:
        """The fit in units of one token, as the planner uses it."""
        found = self.coefficients
        return CostModel(
            intercept=found.per_micro_batch / found.per_token, alpha=found.per_token_and_length / found.per_token
        )

    @property
    def seconds_per_token(self) -> float:
        """What turns costs of :attr:`model` into seconds."""
        return self.coefficients.per_token

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Measured seconds of each point: the median of its repeats."""
        return np.asarray(np.median(self.repeats, axis=1))

    @cached_property
    def fitted(self) -> NDArray[np.float64]:
        """Fitted seconds of each point."""
        return self.coefficients.seconds(
            [point.num_samples for point in self.points], [point.padded_length for point in self.points]
        )

    @property
    def errors(self) -> NDArray[np.float64]:
        """Relative error of each point, ``fitted / measured - 1``."""
        return self.fitted / self.seconds - 1

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest absolute relative error."""
        return float(np.abs(self.errors).max())

    @property
    def r_squared(self) -> float:
        """Share of the variance of the measured seconds that the fit explains; dominated by large micro-batches."""
        total = float(np.square(self.seconds - self.seconds.mean()).sum())
        return 1 - float(np.square(self.seconds - self.fitted).sum()) / total if total else 1.0

    @property
    def noise(self) -> float:
        """Median over the points of half the range of the repeats, relative to their median: what a fit cannot beat."""
        return float(np.median(np.ptp(self.repeats, axis=1) / 2 / self.seconds))

    def warning(self) -> str | None:
        """One sentence if the form does not fit the measurements, None if it does."""
        if self.median_error <= MEDIAN_BOUND and self.worst_error <= WORST_BOUND:
            return None
        worst = int(np.abs(self.errors).argmax())
        point = self.points[worst]
        way_out = (
            f"repeats of one point differ by +-{self.noise:.0%} themselves, so measure again on an idle machine or with"
            " more repeats"
            if self.noise > MEDIAN_BOUND
            else "plans by this model may be off: give BalanceCallback(cost=...) a function of your own"
        )
        return (
            f"intercept + n*L + alpha*n*L^2 does not fit well: the median error is {self.median_error:.1%} (bound"
            f" {MEDIAN_BOUND:.0%}), the worst {self.worst_error:.1%} (bound {WORST_BOUND:.0%}) at"
            f" n={point.num_samples}, L={point.padded_length}; {way_out}"
        )


def fit_cost(points: Sequence[GridPoint], repeats: ArrayLike) -> CostFit:
    """Fit the cost model to the median of each point's repeats.

    Args:
        points: measured micro-batches.
        repeats: ``(num_points, num_repeats)`` seconds.

    Raises:
        ValueError: fewer than three points, times that are not positive, or another number of rows than points.

    >>> points = [GridPoint(1, 8), GridPoint(2, 8), GridPoint(4, 8), GridPoint(4, 16)]
    >>> fit = fit_cost(points, [[1.08, 9.0, 1.08], [1.16] * 3, [1.32] * 3, [1.64] * 3])
    >>> round(fit.model.intercept), round(fit.seconds_per_token, 6), round(fit.worst_error, 6), fit.warning()
    (100, 0.01, 0.0, None)
    """
    times = np.asarray(repeats, dtype=np.float64)
    if times.ndim != 2 or times.shape[0] != len(points):
        raise ValueError(f"repeats must have one row per point ({len(points)}), got shape {times.shape}")
    coefficients = fit_coefficients(
        [point.num_samples for point in points], [point.padded_length for point in points], np.median(times, axis=1)
    )
    return CostFit(points=tuple(points), repeats=times, coefficients=coefficients)

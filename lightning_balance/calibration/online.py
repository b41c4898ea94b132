"""A cost model that follows a run's own times; it changes only when asked, between epochs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_balance.calibration.coefficients import fit_coefficients
from lightning_balance.cost import CostModel

WARM_UP = 8
"""Micro-batches of a run that are not counted: compilation, allocators and caches are not warm yet."""
MIN_MEASURED = 32
"""With fewer measured micro-batches over all ranks the model stays as it is."""
MAX_KEPT = 1024
"""Only so many of the latest micro-batches of a rank count."""
GAIN = 0.9
"""A new model has to bring the median error below this share of the old one's, or noise would change every epoch."""

Measured = tuple[int, int, float]
"""Samples, padded length, seconds."""


@dataclass
class OnlineCost:
    """Keeps measured micro-batches of this rank, and the model that the run plans with.

    Attributes:
        model: the model in use, the same on every rank.
    """

    model: CostModel = field(default_factory=CostModel)
    _num_seen: int = 0
    _measured: deque[Measured] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))

    def add(self, num_samples: int, padded_length: int, seconds: float) -> None:
        """Count a measured micro-batch, but for the first ones."""
        self._num_seen += 1
        if self._num_seen > WARM_UP and seconds > 0:
            self._measured.append((num_samples, padded_length, seconds))

    @property
    def measured(self) -> list[Measured]:
        """What this rank has measured, the oldest first."""
        return list(self._measured)

    def renewed(self, measured: Iterable[Measured]) -> CostModel:
        """The model that fits measurements of all ranks, or the present one where that does about as well.

        Micro-batches of a balanced plan cost about the same, so that times of one epoch say little about sizes that did
        not occur; a model that is no better on those that did is no reason to plan anew.

        Example:
            >>> truth = CostModel(intercept=500.0, alpha=0.0)
            >>> sizes = [(n, length) for n in range(1, 9) for length in (16, 64, 256, 1024)]
            >>> found = OnlineCost().renewed([(n, length, 1e-5 * truth.cost(n, length)) for n, length in sizes])
            >>> round(found.intercept), round(found.alpha, 6)
            (500, 0.0)
        """
        rows = list(measured)
        if len(rows) < MIN_MEASURED or len({row[:2] for row in rows}) < 3:
            return self.model
        count, length, seconds = (np.array(values, dtype=float) for values in zip(*rows, strict=True))
        try:
            found = fit_coefficients(count, length, seconds)
        except ValueError:  # times do not grow with the tokens: nothing to learn from them
            return self.model
        present = self.model.cost(count, length) / seconds
        error_of_present = float(np.median(np.abs(present / np.median(present) - 1)))
        error = float(np.median(np.abs(found.seconds(count, length) / seconds - 1)))
        if error > GAIN * error_of_present:
            return self.model
        return CostModel(
            intercept=found.per_micro_batch / found.per_token, alpha=found.per_token_and_length / found.per_token
        )


def slowest_per_slot(of_ranks: Sequence[Sequence[Measured]], model: CostModel) -> list[Measured]:
    """One measurement per slot where ranks wait for each other in every slot.

    A slot lasts as long as its slowest rank, which is taken to be the one with the largest modelled cost; the times
    that the others see are that rank's.

    Args:
        of_ranks: measurements of each rank, the same slots in the same order.
        model: the model in use.

    Example:
        >>> slowest_per_slot([[(1, 8, 2.0)], [(4, 8, 2.1)]], CostModel())
        [(4, 8, 2.1)]
    """
    return [max(slot, key=lambda row: float(model.cost(row[0], row[1]))) for slot in zip(*of_ranks, strict=False)]

"""Histograms of what ranks got, for TensorBoard (layer 2)."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray

from lightning_balance.fitting import Place

MAX_STEPS = 1024
"""Histograms of an epoch cover its last so many optimizer steps."""
MAX_RANKS = 8
"""Histograms are written for so many ranks, the first ones."""
MAX_LENGTHS = 2**17
"""The histogram of lengths is that of so many samples, evenly spaced."""


class StepHistograms:
    """Collects samples and costs of every rank's micro-batches, and writes them at the end of an epoch.

    Under ``balance/lengths`` the lengths of the data set, under ``balance/samples_per_micro_batch/rank_R`` and
    ``balance/cost/rank_R`` what rank ``R`` ran.

    Args:
        trainer: the trainer; without a ``TensorBoardLogger`` nothing is collected.
    """

    def __init__(self, trainer: Trainer) -> None:
        loggers = trainer.loggers if trainer.is_global_zero and not trainer.fast_dev_run else []  # type: ignore[attr-defined]
        self._writers: list[Any] = [logger.experiment for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._steps: deque[tuple[NDArray[np.int64], NDArray[np.float64]]] = deque(maxlen=MAX_STEPS)
        self._has_lengths = False

    def add_step(self, place: Place) -> None:
        """Keep the step that ended with ``place``."""
        if self._writers:
            self._steps.append((place.plan.num_samples[: place.num_slots], place.plan.costs[: place.num_slots]))

    def write(self, lengths: NDArray[np.int64], step: int) -> None:
        """Write the epoch's histograms at a step of the loggers."""
        if not self._steps:
            return
        counts, costs = (np.concatenate(arrays) for arrays in zip(*self._steps, strict=True))
        self._steps.clear()
        for writer in self._writers:
            if not self._has_lengths:
                writer.add_histogram("balance/lengths", lengths[:: -(-len(lengths) // MAX_LENGTHS)], step)
            for rank in range(min(costs.shape[1], MAX_RANKS)):
                writer.add_histogram(f"balance/samples_per_micro_batch/rank_{rank}", counts[:, rank], step)
                writer.add_histogram(f"balance/cost/rank_{rank}", costs[:, rank], step)
        self._has_lengths = True

"""The lengths of a loader's data, the same on every rank (layer 2)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

from lightning_balance.agreement import check_equal_on_ranks, from_rank_zero, on_every_rank
from lightning_balance.lengths import LengthsOption, is_scan_needed, resolve_lengths
from lightning_balance.settings import BalanceSettings

NUM_COMPARED = 8
"""Samples that the other ranks read to see that they have the data that rank 0 scanned."""
WAY_OUT = "every rank needs the same data in the same order, the same seed and the same options"


class LengthsOfRanks:
    """Finds lengths; data that has to be read for that is read on rank 0 only, and once.

    Args:
        trainer: the trainer, with its strategy's processes running.
        settings: the user's options.
    """

    def __init__(self, trainer: Trainer, settings: BalanceSettings) -> None:
        self._trainer, self._settings = trainer, settings
        self._scanned: dict[int, tuple[Any, NDArray[np.int64]]] = {}

    def find(self, loader: DataLoader[Any], lengths: LengthsOption, datamodule: Any = None) -> NDArray[np.int64]:
        """The length of every sample of a loader's data. A collective call; errors are raised on every rank.

        Args:
            loader: the loader.
            lengths: the user's option.
            datamodule: the data module that is asked for ``lengths`` after the data set.
        """
        dataset: Any = loader.dataset
        num_samples = on_every_rank(lambda: len(dataset))
        check_equal_on_ranks({"the number of samples": num_samples}, WAY_OUT)
        if num_samples == 0:
            return np.empty(0, dtype=np.int64)

        def resolve() -> NDArray[np.int64]:
            return resolve_lengths(
                dataset,
                lengths,
                max_length=self._settings.max_length,
                datamodule=datamodule,
                cache_dir=self._settings.lengths_cache_dir,
                progress=self._trainer.progress_bar_callback is not None,
            )

        if not from_rank_zero(lambda: is_scan_needed(dataset, lengths, datamodule)):
            return on_every_rank(resolve)
        known = self._scanned.get(id(dataset))  # kept with the data set, so that its id stays its own
        if known is None or len(known[1]) != num_samples:
            # A loader that is requested again for the same data does not read the samples again.
            known = self._scanned[id(dataset)] = (dataset, from_rank_zero(resolve))
            scanned = known[1]
            on_every_rank(lambda: self._compare_with_scan(dataset, scanned, lengths))
        return known[1]

    def _compare_with_scan(self, dataset: Any, scanned: NDArray[np.int64], lengths: LengthsOption) -> None:
        """Read a few samples where another rank has read them all: ranks with other data have other lengths."""
        if self._trainer.is_global_zero:
            return
        places = np.unique(np.linspace(0, len(scanned) - 1, NUM_COMPARED).round().astype(int)).tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 has warned of the scan
            own = resolve_lengths(
                Subset(dataset, places), lengths, max_length=self._settings.max_length, progress=False
            )
        if (own != scanned[places]).any():
            place = int(np.flatnonzero(own != scanned[places])[0])
            raise ValueError(
                f"the data differs between ranks: sample {places[place]} has length {scanned[places[place]]} on"
                f" rank 0, but {own[place]} on rank {self._trainer.global_rank}; {WAY_OUT}"
            )

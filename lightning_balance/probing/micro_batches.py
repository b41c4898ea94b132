"""Micro-batches of a wanted size, from the user's own samples through the user's own collate function."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader


class MicroBatches:
    """Makes micro-batches of any count and padded length of a loader's data.

    Args:
        loader: the user's training loader.
        padded_lengths: ``(num_samples,)`` lengths of its samples as padded alone, in tokens.

    Example:
        >>> made = MicroBatches(DataLoader(["aa", "b", "cccc"], collate_fn=list), np.array([2, 1, 4]))
        >>> made.padded_to(2, 4), made.padded_to(3, 2), made.longest(1), made.shortest(max_tokens=4, max_samples=9)
        (['aa', 'cccc'], ['b', 'aa', 'aa'], ['cccc'], ['b', 'aa'])
        >>> made.fullest(max_tokens=7, max_samples=3)
        ['b', 'aa', 'aa']
    """

    def __init__(self, loader: DataLoader[Any], padded_lengths: NDArray[np.int64]) -> None:
        self._loader = loader
        self._order = np.argsort(padded_lengths, kind="stable")
        self.sorted_lengths: NDArray[np.int64] = padded_lengths[self._order]

    def padded_to(self, num_samples: int, padded_length: int) -> Any:
        """The batch of a sample of ``padded_length`` and of those next below; they repeat where too few are shorter."""
        end = int(np.searchsorted(self.sorted_lengths, padded_length, side="right"))
        places = np.resize(np.arange(end)[::-1], num_samples)
        return self._collate(np.sort(places))

    def longest(self, num_samples: int) -> Any:
        """The batch of the longest samples."""
        return self._collate(np.arange(len(self._order))[-num_samples:])

    def shortest(self, *, max_tokens: int, max_samples: int) -> Any:
        """The batch of as many of the shortest samples as fit within a budget of padded tokens; at least one."""
        counts = np.arange(1, min(max_samples, len(self._order)) + 1)
        fits = counts * self.sorted_lengths[: len(counts)] <= max_tokens
        return self._collate(counts[: max(int(fits.sum()), 1)] - 1)

    def fullest(self, *, max_tokens: int, max_samples: int) -> Any:
        """The batch with the most padded tokens within a budget; of several such the one of the longest samples."""
        counts = np.arange(1, max_samples + 1)
        ends = np.searchsorted(self.sorted_lengths, max_tokens // counts, side="right")
        lengths = np.where(ends > 0, self.sorted_lengths[ends - 1], 0)
        best = int(np.argmax(counts * lengths))
        return self.padded_to(int(counts[best]), int(lengths[best]))

    def _collate(self, places: NDArray[np.int64]) -> Any:
        # Python ints: datasets hand indices to APIs that refuse numpy integers.
        indices = self._order[places].tolist()
        dataset = self._loader.dataset
        fetch_many = getattr(dataset, "__getitems__", None)  # as torch's loaders do
        samples = fetch_many(indices) if fetch_many is not None else [dataset[index] for index in indices]
        return self._loader.collate_fn(samples)

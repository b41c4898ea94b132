"""Read samples one by one, the last resort: one warning, one progress bar, one read per sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]  # a dependency of lightning

from lightning_balance.lengths.cache import LengthsCache, fingerprint, probe_indices

__all__ = ["Measure", "Scan"]

Measure = Callable[[Any, int], int]
"""``measure(sample, index)``: length of a sample; the index is there for the error."""


class Scan:
    """Everything that the parts of one dataset share while they are read.

    Args:
        num_samples: samples to read in all parts together.
        cache_dir: folder for the results, ``None`` for no cache.
        progress: show a progress bar.

    Example:
        >>> with Scan(num_samples=2, cache_dir=None, progress=False) as scan:
        ...     scan.run(["ab", "cde"], lambda sample, index: len(sample), option="len", is_chosen=True)
        array([2, 3])
    """

    def __init__(self, *, num_samples: int, cache_dir: str | Path | None, progress: bool) -> None:
        self._num_samples = num_samples
        self._cache = LengthsCache(cache_dir) if cache_dir is not None and num_samples else None
        self._bar = tqdm(
            total=num_samples, desc="Reading lengths", unit=" samples", disable=not (progress and num_samples)
        )
        self._has_warned = False

    def __enter__(self) -> Scan:
        """Start nothing yet: parts whose lengths are cached need no bar."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the progress bar."""
        self._bar.close()

    def run(self, dataset: Any, measure: Measure, *, option: str, is_chosen: bool) -> NDArray[np.int64]:
        """Return the measured length of every sample of a part, from the cache where it has them.

        Args:
            dataset: the part, with ``__len__`` and ``__getitem__``.
            measure: length of one sample.
            option: how lengths are measured, in words; part of the cache's key.
            is_chosen: the user asked for a scan, so there is nothing to warn of.
        """
        num_samples = len(dataset)
        lengths = np.zeros(num_samples, dtype=np.int64)
        probes = probe_indices(num_samples) if self._cache is not None else []
        for index in probes:
            lengths[index] = measure(dataset[index], index)
        key = fingerprint(dataset, option, lengths[probes])
        cached = self._cache.load(key, num_samples) if self._cache is not None else None
        if cached is not None:
            self._bar.update(num_samples)
            return cached
        if self._cache is not None:
            self._cache.check_can_save()  # not to be noticed after an hour of reading
        if not is_chosen and num_samples:
            self._warn()
        self._bar.update(len(probes))
        probed = frozenset(probes)
        for index in range(num_samples):
            if index not in probed:
                lengths[index] = measure(dataset[index], index)
                self._bar.update()
        if self._cache is not None:
            self._cache.save(key, lengths)
        return lengths

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"reading {self._num_samples} samples one by one to find their lengths; to avoid this pass `lengths` "
                "(an array or the name of a column), give the dataset a `lengths` attribute, or keep the result in a "
                "cache folder",
                stacklevel=5,
            )

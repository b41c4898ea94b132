"""Find the length of every sample of a dataset, without reading the samples where that is possible.

Where lengths come from, first match wins:

1. what the user gives: an array, the name of a column, key or attribute, or a callable ``sample -> length``;
2. a ``lengths`` attribute or method of the dataset, then of the data module;
3. a column of a Hugging Face dataset, read through Arrow offsets without decoding rows;
4. the parts of a ``Subset``, ``ConcatDataset`` or a dataset that wraps another one as its ``dataset`` attribute;
5. one scan over ``dataset[i]``, with a warning that says how to avoid it, a progress bar, and a cache on disk if asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.lengths.find import LengthsOption, count_samples, find_source
from lightning_balance.lengths.samples import sample_length
from lightning_balance.lengths.scan import Scan
from lightning_balance.validation import check_positive_int, validate_lengths

__all__ = ["LengthsOption", "is_scan_needed", "resolve_lengths", "sample_length"]


def resolve_lengths(
    dataset: Any,
    lengths: LengthsOption = None,
    *,
    max_length: int | None = None,
    datamodule: Any = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> NDArray[np.int64]:
    """Return the length of every sample of a map-style dataset.

    Guarantee:
        No sample is read unless :func:`is_scan_needed` says so, and then each one is read once, with a Python int as
        its index. The result does not depend on the process, so one rank may compute it for all.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        lengths: array-like of one length per sample (sequence, numpy, tensor, Arrow, pandas), or a name: a column of a
            Hugging Face dataset, an attribute or zero-argument method of the dataset, a key of its dict samples; or a
            callable ``sample -> int``; ``None``: found as listed at the top of this module.
        max_length: lengths are clipped to it, as the collator truncates.
        datamodule: the data module that the dataset belongs to; asked for ``lengths`` after the dataset.
        cache_dir: folder for the results of scans. A file is used again for a dataset with the same classes, sizes,
            ``Subset`` indices and Hugging Face fingerprint, the same `lengths` option and the same lengths at up to 32
            evenly spaced samples, which are read for the comparison. Data that differ only elsewhere, in a dataset
            without a fingerprint, are **not** told apart: delete the file after such a change.
        progress: show a progress bar while scanning.

    Returns:
        int64 array of shape ``(len(dataset),)``, every entry at least 1.

    Raises:
        OSError: the cache folder cannot be used; told before all samples are read.
        TypeError: the dataset is iterable-style, a sample has no length that can be found, or `lengths` holds or
            returns something else than integers.
        ValueError: wrong count, unknown column, or lengths that are not whole numbers of at least 1.

    Example:
        >>> resolve_lengths(["some", "short", "strings"], lengths=[4, 5, 7], max_length=6)
        array([4, 5, 6])
        >>> resolve_lengths(["some", "short", "strings"], lengths=len, progress=False)
        array([4, 5, 7])
    """
    if max_length is not None:
        max_length = check_positive_int("max_length", max_length)
    source = find_source(dataset, lengths, datamodule)
    with Scan(num_samples=source.num_scanned, cache_dir=cache_dir, progress=progress) as scan:
        try:
            found = validate_lengths(source.read(scan), num_samples=count_samples(dataset))
        except (TypeError, ValueError) as error:
            if not source.origin or source.num_scanned:
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error} (lengths come from {source.origin}; pass `lengths` to use others)") from error
    return found if max_length is None else np.minimum(found, max_length)


def is_scan_needed(dataset: Any, lengths: LengthsOption = None, datamodule: Any = None) -> bool:
    """Whether :func:`resolve_lengths` would have to read samples one by one; reads nothing itself.

    Raises:
        TypeError: the dataset is iterable-style, or `lengths` is no array-like, name or callable.
        ValueError: `lengths` names a column that a Hugging Face dataset does not have.

    Example:
        >>> is_scan_needed(["some", "strings"], lengths=[4, 7])
        False
        >>> is_scan_needed(["some", "strings"])
        True
    """
    return find_source(dataset, lengths, datamodule).num_scanned > 0

"""The places that lengths can come from; each says how many samples it has to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_balance.lengths.scan import Measure, Scan
from lightning_balance.validation import as_entries, validate_lengths

__all__ = ["ConcatLengths", "KnownLengths", "ScannedLengths", "Source", "SubsetLengths", "as_array"]


class Source(Protocol):
    """Where lengths come from, and how many samples have to be read for them."""

    @property
    def origin(self) -> str:
        """The place in words, for errors; empty for the argument itself."""
        ...

    @property
    def num_scanned(self) -> int:
        """Samples that are read one by one."""
        ...

    def read(self, scan: Scan) -> NDArray[Any]:
        """Return one number per sample; their values are not checked yet."""
        ...


@dataclass(frozen=True, kw_only=True)
class KnownLengths:
    """Lengths that exist somewhere: given, an attribute, a method or a column."""

    load: Callable[[], Any]
    num_samples: int
    origin: str = ""
    num_scanned: int = 0

    def read(self, scan: Scan) -> NDArray[Any]:
        """Return the lengths as an array of the right shape."""
        array = as_entries(as_array(self.load()))
        # Values are checked after a subset has made its choice: it may be there to leave out empty samples.
        return array if array.shape == (self.num_samples,) else validate_lengths(array, num_samples=self.num_samples)


@dataclass(frozen=True, kw_only=True)
class ScannedLengths:
    """Lengths that have to be measured sample by sample."""

    dataset: Any
    measure: Measure
    option: str
    is_chosen: bool = False

    @property
    def origin(self) -> str:
        """The class that was read."""
        return f"a scan of {type(self.dataset).__name__}"

    @property
    def num_scanned(self) -> int:
        """All samples of the dataset."""
        return len(self.dataset)

    def read(self, scan: Scan) -> NDArray[Any]:
        """Measure every sample, or find the results of an earlier scan."""
        return scan.run(self.dataset, self.measure, option=self.option, is_chosen=self.is_chosen)


@dataclass(frozen=True, kw_only=True)
class SubsetLengths:
    """Lengths of a ``Subset`` whose whole dataset has known lengths."""

    whole: Source
    indices: Sequence[int]
    num_scanned: int = 0

    @property
    def origin(self) -> str:
        """The whole's origin."""
        return f"a Subset of {self.whole.origin}"

    def read(self, scan: Scan) -> NDArray[Any]:
        """Return the lengths at the subset's indices."""
        return self.whole.read(scan)[np.asarray(self.indices, dtype=np.int64)]


@dataclass(frozen=True, kw_only=True)
class ConcatLengths:
    """Lengths of a ``ConcatDataset``: each part has its own source."""

    parts: Sequence[Source]

    @property
    def origin(self) -> str:
        """The parts' origins."""
        return " + ".join(part.origin for part in self.parts[:4]) + (" + ..." if len(self.parts) > 4 else "")

    @property
    def num_scanned(self) -> int:
        """Samples of the parts without known lengths."""
        return sum(part.num_scanned for part in self.parts)

    def read(self, scan: Scan) -> NDArray[Any]:
        """Return the parts' lengths one after the other."""
        return np.concatenate([part.read(scan) for part in self.parts])


def as_array(lengths: Any) -> Any:
    """Return an array-like of any library as something numpy understands.

    Example:
        >>> import torch
        >>> as_array(torch.tensor([3, 4]))
        array([3, 4])
    """
    if isinstance(lengths, Tensor):
        lengths = lengths.detach().cpu()
        return (lengths.double() if lengths.is_floating_point() else lengths).numpy()  # numpy has no bfloat16
    if not isinstance(lengths, Sequence) or isinstance(lengths, (str, bytes)):
        return lengths
    entries = lengths[:]  # a lazy column of a Hugging Face dataset is read at once, not row by row
    if isinstance(entries, Tensor):
        return as_array(entries)
    if len(entries) and isinstance(entries[0], Tensor):
        return [entry.item() if isinstance(entry, Tensor) and entry.ndim == 0 else entry for entry in entries]
    return entries

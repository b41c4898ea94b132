"""Keep scanned lengths on disk, under a name that says which dataset they belong to as far as cheap checks can tell."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.lengths.huggingface import huggingface_fingerprint
from lightning_balance.outputs import whole_file, why_not_writable

__all__ = ["LengthsCache", "fingerprint", "probe_indices"]

_VERSION = 1
_NUM_PROBES = 32


def probe_indices(num_samples: int) -> list[int]:
    """Indices of the samples that are compared before cached lengths are trusted: up to 32, evenly spaced.

    Example:
        >>> probe_indices(3)
        [0, 1, 2]
    """
    indices = np.linspace(0, num_samples - 1, min(num_samples, _NUM_PROBES)).round().astype(np.int64)
    return [int(index) for index in np.unique(indices)]


def fingerprint(dataset: Any, option: str, probes: NDArray[np.int64]) -> str:
    """Name of a dataset's lengths: changes with whatever can be seen of the dataset without reading all of it.

    Trade-off:
        Two datasets of the same classes and sizes, without a Hugging Face fingerprint, whose lengths agree at the
        probes get the same name.

    Args:
        dataset: the dataset, or a part of it.
        option: how lengths are measured.
        probes: lengths of the samples at :func:`probe_indices`.

    Example:
        >>> fingerprint("abc", "len", np.array([1, 1, 1])) == fingerprint("abc", "len", np.array([1, 1, 2]))
        False
    """
    seen = json.dumps([_VERSION, _identity(dataset), option, probes.tolist()])
    return hashlib.sha256(seen.encode()).hexdigest()[:24]


class LengthsCache:
    """Folder of ``lengths-<fingerprint>.npy`` files, written atomically: ranks and jobs may share it.

    Raises:
        OSError: the folder can neither be used nor made.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = LengthsCache(folder)
        ...     cache.save("key", np.array([3, 4]))
        ...     cache.load("key", num_samples=2), cache.load("other", num_samples=2)
        (array([3, 4]), None)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def load(self, key: str, num_samples: int) -> NDArray[np.int64] | None:
        """Return the lengths under a key, ``None`` if there are none; a damaged file is reported and not used."""
        path = self._path(key)
        try:
            lengths = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            return None
        except (ValueError, EOFError, OSError) as error:
            warnings.warn(f"Cached lengths in {path} cannot be read ({error}); they are measured again.", stacklevel=2)
            return None
        if lengths.shape != (num_samples,) or lengths.dtype != np.int64:
            warnings.warn(f"Cached lengths in {path} do not fit the dataset; they are measured again.", stacklevel=2)
            return None
        return np.asarray(lengths, dtype=np.int64)

    def save(self, key: str, lengths: NDArray[np.int64]) -> None:
        """Write lengths under a key; readers see the old file or the whole new one.

        Raises:
            OSError: they cannot be written.
        """
        with whole_file(self._path(key), keep_mode=False) as file:  # a file that nobody else could read is replaced
            np.save(file, lengths)

    def check_can_save(self) -> None:
        """Check that the folder takes new files, before lengths are measured for it.

        Raises:
            OSError: it does not.
        """
        reason = why_not_writable(self._path("new"))
        if reason:
            raise OSError(f"the folder {self.folder} cannot keep lengths: {reason}; give another cache folder, or none")

    def _path(self, key: str) -> Path:
        return self.folder / f"lengths-{key}.npy"


def _identity(dataset: Any) -> list[Any]:
    """What can be seen of a dataset and of the datasets inside it without reading samples."""
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    indices = getattr(dataset, "indices", None)
    digest = hashlib.sha256(np.asarray(indices).tobytes()).hexdigest() if isinstance(indices, Sequence) else None
    inside = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    parts = [_identity(part) for part in inside if hasattr(part, "__len__") and part is not dataset]
    return [name, len(dataset), huggingface_fingerprint(dataset), digest, parts]

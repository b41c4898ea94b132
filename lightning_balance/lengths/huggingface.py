"""Lengths of the rows of a Hugging Face ``datasets.Dataset``, through its Arrow columns.

Only the public surface of ``datasets`` is used, with one exception: ``Dataset._fingerprint`` has no public name. It
only sharpens the key of the cache on disk and may be missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.lengths.samples import FLAT_KEYS, LENGTH_KEYS, SEQUENCE_KEYS

__all__ = ["column_lengths", "find_column", "has_row_transform", "huggingface_fingerprint", "is_huggingface"]

# A dataset that was shuffled or filtered copies the rows of a slice: 1,000 long rows are a few MiB.
_ROWS_PER_SLICE = 1000


def is_huggingface(dataset: Any) -> bool:
    """Whether this is a map-style ``datasets.Dataset``; does not import ``datasets``.

    Example:
        >>> is_huggingface([1, 2])
        False
    """
    datasets = sys.modules.get("datasets")  # without the module there can be no instance
    return datasets is not None and isinstance(dataset, datasets.Dataset)


def has_row_transform(dataset: Any) -> bool:
    """Whether ``with_transform`` makes the samples from the rows, so that columns say nothing about samples."""
    return bool(dataset.format["type"] == "custom")


def huggingface_fingerprint(dataset: Any) -> str | None:
    """The fingerprint that ``datasets`` keeps of data and transforms, ``None`` for other datasets.

    Example:
        >>> huggingface_fingerprint([1, 2]) is None
        True
    """
    return getattr(dataset, "_fingerprint", None) if is_huggingface(dataset) else None


def find_column(dataset: Any) -> str | None:
    """Name of the column that holds lengths as integers, or else the sequence as a list; ``None`` if there is none."""
    import pyarrow as pa

    if has_row_transform(dataset):
        return None
    types = {field.name: _storage_type(field.type) for field in dataset.features.arrow_schema}
    for name in LENGTH_KEYS:
        if name in types and pa.types.is_integer(types[name]):
            return name
    for name in SEQUENCE_KEYS:
        # A list of lists under a flat key may have a batch axis of 1 in front: only the samples can tell.
        if name in types and _is_list(types[name]) and not (name in FLAT_KEYS and _is_list(types[name].value_type)):
            return name
    return None


def column_lengths(dataset: Any, column: str) -> NDArray[np.int64]:
    """Length of every row of a column, in the dataset's present order.

    Guarantee:
        No row is decoded: lists, strings and arrays are measured by their Arrow offsets. Selected, shuffled, filtered
        and concatenated datasets are followed.

    Args:
        dataset: a ``datasets.Dataset``.
        column: an integer column (the lengths themselves), or one of lists, fixed-size lists, n-dimensional arrays
            (first axis), strings (characters) or bytes.

    Raises:
        TypeError: the column has another type.
        ValueError: a row is null.
    """
    rows = dataset.select_columns([column]).with_format("arrow")
    lengths = np.zeros(len(rows), dtype=np.int64)
    position = 0
    for chunk in _chunks(rows):
        measured = _chunk_lengths(chunk, column)
        if measured.null_count:
            index = position + measured.is_null().to_pylist().index(True)
            raise ValueError(f"lengths cannot be read from column {column!r}: row {index} is null; remove such rows")
        lengths[position : position + len(measured)] = measured.to_numpy(zero_copy_only=False)
        position += len(measured)
    return lengths


def _chunks(rows: Any) -> Iterator[Any]:
    for start in range(0, len(rows), _ROWS_PER_SLICE):
        yield from rows[start : start + _ROWS_PER_SLICE].column(0).chunks


def _chunk_lengths(chunk: Any, column: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(chunk, pa.ExtensionArray):
        chunk = chunk.storage
    if pa.types.is_integer(chunk.type):
        return chunk
    if _is_list(chunk.type):
        return pc.list_value_length(chunk)
    if pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type):
        return pc.utf8_length(chunk)
    if pa.types.is_binary(chunk.type) or pa.types.is_large_binary(chunk.type):
        return pc.binary_length(chunk)
    raise TypeError(
        f"lengths cannot be read from column {column!r} of type {chunk.type}: it must hold integers, lists, arrays or "
        "strings; name another column, or pass a callable sample -> int"
    )


def _storage_type(arrow_type: Any) -> Any:
    """The plain type below an extension type (``Array2D``, ``Array3D``, ...)."""
    import pyarrow as pa

    return arrow_type.storage_type if isinstance(arrow_type, pa.BaseExtensionType) else arrow_type


def _is_list(arrow_type: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type)
    )

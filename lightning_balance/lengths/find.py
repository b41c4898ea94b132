"""Decide where the lengths of a dataset come from, before anything is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from lightning_balance.lengths.huggingface import column_lengths, find_column, has_row_transform, is_huggingface
from lightning_balance.lengths.samples import FLAT_KEYS, LENGTH_KEYS, as_length, sample_length, value_length
from lightning_balance.lengths.scan import Measure
from lightning_balance.lengths.sources import ConcatLengths, KnownLengths, ScannedLengths, Source, SubsetLengths

__all__ = ["LengthsOption", "count_samples", "find_source"]

LengthsOption = ArrayLike | str | Callable[[Any], int] | None


def find_source(dataset: Any, lengths: LengthsOption = None, datamodule: Any = None) -> Source:
    """Return where :func:`lightning_balance.lengths.resolve_lengths` takes the lengths from; reads no sample.

    Raises:
        TypeError: the dataset is iterable-style.
        ValueError: `lengths` names a column that a Hugging Face dataset does not have.

    Example:
        >>> find_source(["ab", "cde"]).num_scanned, find_source(["ab", "cde"], [2, 3]).num_scanned
        (2, 0)
    """
    num_samples = count_samples(dataset)
    if lengths is None:
        return _stored(dataset, dataset) or _stored(dataset, datamodule) or _part(dataset, None)
    if isinstance(lengths, str):
        return _part(dataset, lengths)
    if callable(lengths):
        return _measured_by(dataset, lengths)
    return KnownLengths(load=lambda: lengths, num_samples=num_samples)


def count_samples(dataset: Any) -> int:
    """Return ``len(dataset)`` of a map-style dataset.

    Raises:
        TypeError: the dataset is an IterableDataset or a mapping of datasets, or has no length or no ``__getitem__``.

    Example:
        >>> count_samples("abc")
        3
    """
    name = type(dataset).__name__
    way_out = "use a map-style dataset with __len__ and __getitem__ (Hugging Face: load it without streaming)"
    if isinstance(dataset, Mapping):
        listed = ", ".join(repr(key) for key in list(dataset)[:5])
        raise TypeError(f"lengths need one dataset, got a {name} with the entries {listed}; pass one of them")
    if isinstance(dataset, IterableDataset):
        raise TypeError(f"lengths of an IterableDataset ({name}) cannot be known before it is read; {way_out}")
    try:
        num_samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"lengths need a dataset with a length, but len({name}) fails: {error}; {way_out}") from error
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"lengths need a dataset with __getitem__, got {name}; {way_out}")
    return num_samples


def _part(dataset: Any, name: str | None) -> Source:
    """Source of a dataset or of a part of one: known lengths where there are any, else a scan."""
    known = _known(dataset, name)
    if known is not None:
        return known
    # A subclass may make other samples out of the parts' samples: then only the samples that it returns count.
    if isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__:
        return ConcatLengths(parts=[_part(part, name) for part in dataset.datasets])
    if name is None:
        return ScannedLengths(dataset=dataset, measure=sample_length, option="found")
    _check_column(dataset, name)
    return ScannedLengths(dataset=dataset, measure=_key_measure(name), option=f"key {name}")


def _known(dataset: Any, name: str | None) -> Source | None:
    """Source of lengths that exist already, in the dataset or in the ones inside it; ``None`` if there is none."""
    stored = _stored(dataset, dataset, name or "lengths")
    if stored is not None and not stored.num_scanned:
        return stored
    if is_huggingface(dataset):
        return _column(dataset, name)
    if isinstance(dataset, Subset):
        whole = _known(dataset.dataset, name)
        return SubsetLengths(whole=whole, indices=dataset.indices) if whole is not None else None
    if isinstance(dataset, ConcatDataset):
        parts = [part for part in (_known(part, name) for part in dataset.datasets) if part is not None]
        return ConcatLengths(parts=parts) if len(parts) == len(dataset.datasets) else None
    inner = getattr(dataset, "dataset", None)
    is_wrapper = inner is not dataset and hasattr(inner, "__getitem__") and hasattr(inner, "__len__")
    return _known(inner, name) if is_wrapper and count_samples(inner) == len(dataset) else None


def _stored(dataset: Any, owner: Any, name: str = "lengths") -> Source | None:
    """The attribute of an owner that holds lengths: an array, a method, a per-sample function or a column's name."""
    if is_huggingface(owner):
        return None  # its names are columns
    value = getattr(owner, name, None)
    origin = f"{type(owner).__name__}.{name}"
    if value is None:
        return None
    if isinstance(value, str):
        return _part(dataset, value) if value != name else None
    if not callable(value):
        entries = value if name in LENGTH_KEYS else _entry_lengths(value)
        return KnownLengths(load=lambda: entries, origin=origin, num_samples=count_samples(dataset))
    num_arguments = _num_required_arguments(value)
    if num_arguments == 0:
        return KnownLengths(load=value, origin=f"{origin}()", num_samples=count_samples(dataset))
    if num_arguments == 1:
        return _measured_by(dataset, value)
    raise TypeError(f"lengths: {origin} must take no argument or one sample, but it needs {num_arguments}")


def _entry_lengths(values: Any) -> Any:
    """Lengths of the sequences in an attribute such as ``dataset.input_ids``; numbers are lengths already."""
    if not isinstance(values, (Sequence, np.ndarray, Tensor)) or not len(values) or value_length(values[0]) is None:
        return values
    return [value_length(entry) for entry in values]


def _column(dataset: Any, name: str | None) -> Source | None:
    column = find_column(dataset) if name is None else name
    if column is None or column not in dataset.column_names:
        return None

    def load() -> Any:
        return column_lengths(dataset, column)

    return KnownLengths(load=load, origin=f"column {column!r}", num_samples=len(dataset))


def _check_column(dataset: Any, name: str) -> None:
    """Refuse a name that no sample can have, before a scan is announced."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if is_huggingface(dataset) and not has_row_transform(dataset):
        columns = ", ".join(repr(column) for column in dataset.column_names)
        raise ValueError(f"lengths={name!r} is not a column of the dataset; its columns are {columns}")


def _measured_by(dataset: Any, function: Callable[[Any], Any]) -> Source:
    def measure(sample: Any, index: int) -> int:
        return as_length(function(sample), index, origin="the callable in lengths")

    return ScannedLengths(dataset=dataset, measure=measure, option=_describe(function), is_chosen=True)


def _describe(function: Callable[..., Any]) -> str:
    """Name, byte code and plain constants of a callable, the same in every process; closures are not seen."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return name
    constants = [constant for constant in code.co_consts if isinstance(constant, (int, float, str))]
    return f"{name} {code.co_code.hex()} {constants} {code.co_names}"


def _key_measure(name: str) -> Measure:
    def measure(sample: Any, index: int) -> int:
        try:
            value = sample[name]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            has = f"the keys {', '.join(map(repr, sample))}" if hasattr(sample, "keys") else type(sample).__name__
            raise ValueError(
                f"lengths={name!r} is neither an attribute of the dataset nor a key of sample {index} (has {has})"
            ) from error
        length = value_length(value, flat=name in FLAT_KEYS)
        return as_length(value, index, origin=f"lengths={name!r}") if length is None else length

    return measure


def _num_required_arguments(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins may have no signature
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters)

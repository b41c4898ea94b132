"""The length of one sample, by what kind of object it is."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sized
from numbers import Number
from typing import Any

import numpy as np

__all__ = ["FLAT_KEYS", "LENGTH_KEYS", "SEQUENCE_KEYS", "as_length", "sample_length", "value_length"]

LENGTH_KEYS = ("length", "lengths", "num_tokens")
"""Keys and columns whose integer is the length itself."""

SEQUENCE_KEYS = ("input_ids", "input_values", "input_features", "inputs_embeds", "tokens", "token_ids")
"""Keys and columns that hold the sequence, in the order in which they are looked for."""

FLAT_KEYS = frozenset({"input_ids", "input_values", "tokens", "token_ids"})
"""Keys with one number per position: a leading axis of 1 is a batch axis (``tokenizer(..., return_tensors="pt")``)."""

_WAY_OUT = "pass `lengths` as an array, as the name of a key or column, or as a callable sample -> int"


def sample_length(sample: Any, index: int = 0) -> int:
    """Return the length of a sample as a padding collator would see it.

    ======================================  ====================================================================
    sample                                  length
    ======================================  ====================================================================
    mapping                                 integer at ``length``, ``lengths`` or ``num_tokens``, else the value
                                            at ``input_ids``, ``input_values``, ``input_features``, ...; else its
                                            only sequence
    tensor or array                         size of the first axis; ``input_ids`` of shape ``(1, L)`` have L
    list, str, bytes                        number of entries
    tuple                                   length of its first element (``(inputs, target)``), or the number of
                                            entries when all are numbers
    graph (PyTorch Geometric, DGL)          ``num_nodes``
    ======================================  ====================================================================

    Args:
        sample: what ``dataset[index]`` returned.
        index: its index, for the error.

    Raises:
        TypeError: none of the above; the sentence names the keys or the type seen.

    Example:
        >>> sample_length({"input_ids": [5, 6, 7], "labels": [6, 7, 8]})
        3
        >>> sample_length((np.zeros((20, 80)), 3))
        20
    """
    if isinstance(sample, Mapping):
        return _mapping_length(sample, index)
    nodes = getattr(sample, "num_nodes", None)
    if nodes is not None:
        return as_length(nodes() if callable(nodes) else nodes, index)
    if isinstance(sample, tuple):
        return _tuple_length(sample, index)
    if _is_mapping(sample):
        return _mapping_length(sample, index)
    length = value_length(sample)
    if length is None:
        raise TypeError(f"lengths were not found: sample {index} is a {type(sample).__name__}; {_WAY_OUT}")
    return length


def value_length(value: Any, flat: bool = False) -> int | None:
    """Return the size of a tensor's first axis or the number of entries of a collection; ``None`` for anything else.

    Args:
        value: part of a sample.
        flat: the value has one number per position, so ``(1, L)`` is a batch of one.

    Example:
        >>> value_length(np.zeros((1, 7))), value_length(np.zeros((1, 7)), flat=True), value_length(3.5)
        (1, 7, None)
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        if len(shape) > 1 and shape[0] == 1 and flat:
            return int(shape[1])
        return int(shape[0]) if shape else None
    if isinstance(value, Sized) and not _is_mapping(value):
        if flat and len(value) == 1 and isinstance(value, list) and isinstance(value[0], list):
            return len(value[0])
        return len(value)
    return None


def as_length(value: Any, index: int, origin: str = "lengths") -> int:
    """Return an integer, or say which sample gave something else.

    Args:
        value: a Python, numpy or tensor integer.
        index: index of the sample, for the error.
        origin: where the value came from, for the error.

    Raises:
        TypeError: the value is no integer (booleans are none, and floats are not rounded).

    Example:
        >>> as_length(np.int32(7), index=0)
        7
    """
    is_bool = isinstance(value, (bool, np.bool_)) or "bool" in str(getattr(value, "dtype", ""))
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{origin} gave {value!r} ({type(value).__name__}) for sample {index}; it must give an int")


def _tuple_length(sample: tuple[Any, ...], index: int) -> int:
    if sample and all(isinstance(entry, Number) for entry in sample):
        return len(sample)
    if not sample or isinstance(sample[0], Number):
        kinds = ", ".join(type(entry).__name__ for entry in sample)
        raise TypeError(f"lengths were not found: sample {index} is a tuple of ({kinds}); {_WAY_OUT}")
    return sample_length(sample[0], index)


def _mapping_length(sample: Mapping[Any, Any], index: int) -> int:
    keys = list(sample.keys())
    for key in LENGTH_KEYS:
        if key in keys and _is_integer(sample[key]):
            return as_length(sample[key], index)
    for key in SEQUENCE_KEYS:
        length = value_length(sample[key], flat=key in FLAT_KEYS) if key in keys else None
        if length is not None:
            return length
    sized = {key: value_length(sample[key]) for key in keys}
    sequences = [key for key, length in sized.items() if length is not None and not isinstance(sample[key], str)]
    candidates = sequences or [key for key, length in sized.items() if length is not None]
    only = sized[candidates[0]] if len(candidates) == 1 else None
    if only is None:
        listed = ", ".join(repr(key) for key in keys) or "none"
        raise TypeError(f"lengths were not found: sample {index} has the keys {listed}; {_WAY_OUT}")
    return only


def _is_mapping(sample: Any) -> bool:
    # TensorDict and BatchEncoding behave like mappings without being registered as one in every version.
    return isinstance(sample, Mapping) or (hasattr(sample, "keys") and hasattr(sample, "items"))


def _is_integer(value: Any) -> bool:
    try:
        as_length(value, index=0)
    except TypeError:
        return False
    return True

"""Checks of what users pass in: every error names the argument, the value, what was expected and the way out."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Sums of padded tokens over a whole epoch have to stay exact in int64.
LONGEST_ALLOWED = 2**40
LARGEST_INT = 2**63 - 1

_NUMBERS = "iuf"
"""Kinds of numpy's real numbers; booleans are none."""
_SHORT = reprlib.Repr()
_SHORT.maxother = 60  # a date of numpy has 46 characters


def check_positive_int(name: str, value: object, largest: int = LARGEST_INT) -> int:
    """Return ``value`` as an ``int`` from 1 to ``largest``.

    Raises:
        TypeError: ``value`` is not an integer (booleans are refused too).
        ValueError: ``value`` is out of range.

    >>> check_positive_int("num_ranks", 4)
    4
    """
    return check_int_at_least(name, value, minimum=1, largest=largest)


def check_int_at_least(name: str, value: object, minimum: int, largest: int = LARGEST_INT) -> int:
    """Return ``value`` as an ``int`` from ``minimum`` to ``largest``, by default what arrays of 64 bits can hold.

    Raises:
        TypeError: ``value`` is not an integer (booleans are refused too).
        ValueError: ``value`` is out of range.

    >>> check_int_at_least("seed", 0, minimum=0)
    0
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer >= {minimum}, got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {number}")
    if number > largest:
        raise ValueError(f"{name} must be an integer from {minimum} to {largest}, got {number}")
    return number


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return ``value`` when it is one of ``choices``.

    Raises:
        ValueError: ``value`` is something else; the message lists the choices.

    >>> check_choice("sync", "step", ("micro_batch", "step"))
    'step'
    """
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return value


def validate_lengths(lengths: Any, num_samples: int | None = None) -> NDArray[np.int64]:
    """Return the lengths of a data set as a 1-D ``int64`` array, or say what is wrong with them.

    Nothing is repaired: whole numbers stored as floats or objects are taken, every other oddity is an error.

    Args:
        lengths: one length per sample, in tokens, frames or nodes: a sequence, an array or a CPU tensor.
        num_samples: how many samples the data set has, where that is known.

    Returns:
        Array of shape ``(num_samples,)``. An ``int64`` array is returned as it is, without a copy.

    Raises:
        TypeError: the lengths are not numbers.
        ValueError: the count is wrong, or a length is not a whole number of at least 1.

    >>> validate_lengths([3, 1, 2])
    array([3, 1, 2])
    """
    array = as_entries(lengths)
    if array.ndim != 1:
        got = f"an array of shape {array.shape}" if array.ndim else _SHORT.repr(array.item())
        raise ValueError(f"lengths must be 1-D, one number per sample, got {got}.")
    if num_samples is not None and len(array) != num_samples:
        raise ValueError(
            f"lengths has {len(array)} entries but the dataset has {num_samples} samples; give one length per sample."
        )
    if len(array) == 0:
        raise ValueError("lengths is empty; give one length per sample, and at least one sample.")
    if array.dtype.kind not in _NUMBERS:
        array = _numbers(array)
    if array.dtype.kind == "f":
        array = _whole_numbers(array)
    _check_range(array)
    return np.asarray(array, dtype=np.int64)


def as_entries(lengths: Any) -> NDArray[Any]:
    """Return lengths as an array whose entries are still those given: numpy makes texts of numbers beside a text.

    Raises:
        ValueError: a ragged sequence.

    >>> as_entries([1, "x"]), as_entries([1, 2])
    (array([1, 'x'], dtype=object), array([1, 2]))
    """
    try:
        array = np.asarray(lengths)
    except ValueError as error:
        raise ValueError(
            f"lengths must be 1-D, one number per sample, but {_first_without_number(lengths)}: got nested sequences."
        ) from error
    if array.ndim != 1 or not isinstance(lengths, Sequence):
        return array
    has_bools = not {bool, np.bool_}.isdisjoint(map(type, lengths))  # beside numbers they become 0 and 1
    return np.asarray(lengths, dtype=object) if has_bools or array.dtype.kind not in _NUMBERS else array


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    wrong = _first_without_number(array)
    if wrong is not None:
        raise TypeError(
            f"lengths must be numbers, but {wrong}; give one whole number from 1 to {LONGEST_ALLOWED} per sample."
        )
    return np.asarray(array.tolist())


def _first_without_number(entries: Iterable[Any]) -> str | None:
    for index, entry in enumerate(entries):
        is_nested = isinstance(entry, Sequence) or np.ndim(entry) > 0
        if is_nested or np.asarray(entry).dtype.kind not in _NUMBERS:
            return f"lengths[{index}] is {_SHORT.repr(entry)} ({type(entry).__name__})"
    return None


def _whole_numbers(array: NDArray[Any]) -> NDArray[Any]:
    bad = ~(np.isfinite(array) & (array == np.floor(array)))
    if bad.any():
        index = int(np.argmax(bad))
        raise ValueError(
            f"lengths[{index}] is {array[index]}; every length must be a whole number of at least 1 "
            f"({int(bad.sum())} of {len(array)} are not whole numbers)."
        )
    return array


def _check_range(array: NDArray[Any]) -> None:
    smallest = array.min()
    if smallest < 1:
        bad = array < 1
        index = int(np.argmax(bad))
        which = "all lengths are zero" if not array.any() else f"{int(bad.sum())} of {len(array)} are not"
        raise ValueError(
            f"lengths[{index}] is {array[index]}; every length must be at least 1 ({which}): "
            "remove empty samples from the dataset or correct their lengths."
        )
    if array.max().item() > LONGEST_ALLOWED:  # float16 cannot hold the bound
        index = int(np.argmax(array))
        raise ValueError(f"lengths[{index}] is {array[index]}; lengths above {LONGEST_ALLOWED} are not supported.")

"""Which column of a table holds lengths, and how a column of sequences is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["choose_column", "lengths_of_column"]

# As in lightning_balance.lengths.samples, which cannot be imported here because that loads torch; a test compares them.
LENGTH_KEYS = ("length", "lengths", "num_tokens")
SEQUENCE_KEYS = ("input_ids", "input_values", "input_features", "inputs_embeds", "tokens", "token_ids")


def choose_column(columns: Mapping[str, Any], column: str | None) -> str:
    """Return the column that is asked for, or the one that by its name, or as the only one, holds lengths.

    Raises:
        ValueError: there is no such column, none at all, or none stands out; the sentence lists the columns.

    Example:
        >>> choose_column({"name": None, "num_tokens": None}, None)
        'num_tokens'
    """
    names = list(columns)
    if not names:
        raise ValueError("it has no columns, so none that holds lengths")
    listed = ", ".join(repr(name) for name in names[:10]) + (", ..." if len(names) > 10 else "")
    if column is not None:
        if column not in names:
            raise ValueError(f"--column {column} is none of its columns {listed}")
        return column
    for name in (*LENGTH_KEYS, *SEQUENCE_KEYS):
        if name in names:
            return name
    if len(names) != 1:
        raise ValueError(f"several columns may hold the lengths: choose one of {listed} with --column")
    return names[0]


def lengths_of_column(columns: Mapping[str, Any], name: str) -> Any:
    """Return the numbers of a column, or how many entries its lists have.

    Raises:
        TypeError: a column that begins with a list holds something else.

    Example:
        >>> lengths_of_column({"input_ids": [[5, 6, 7], [8]]}, "input_ids"), lengths_of_column({"a": [3, 1]}, "a")
        ([3, 1], [3, 1])
    """
    values = columns[name]
    if not isinstance(values, list) or not values or not isinstance(values[0], list):
        return values
    for number, value in enumerate(values, start=1):
        if not isinstance(value, list):
            raise TypeError(f"column {name!r} holds lists, but entry {number} is {value!r} ({type(value).__name__})")
    return [len(value) for value in values]

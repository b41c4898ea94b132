"""Outputs of micro-batches, taken apart into those of single samples and put into the data set's order (layer 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def split_by_sample(output: Any, num_samples: int) -> list[Any]:
    """Take the output of a micro-batch apart into one output per sample.

    Args:
        output: a tensor or array with a leading dimension of samples, a list with an entry per sample, or a tuple, a
            dictionary or a ``ModelOutput`` of them; a sample then has a tuple or a dictionary of its own parts.
        num_samples: samples of the micro-batch.

    Raises:
        ValueError: some part has no entry per sample; the sentence says which.

    Example:
        >>> import torch
        >>> split_by_sample({"logits": torch.tensor([1.0, 2.0]), "text": ["a", "b"]}, num_samples=2)
        [{'logits': tensor(1.), 'text': 'a'}, {'logits': tensor(2.), 'text': 'b'}]
    """
    return _split(output, num_samples, "predict_step's output")


def _split(output: Any, num_samples: int, name: str) -> list[Any]:
    if isinstance(output, (Mapping, tuple)) and not output:
        found = f"is an empty {type(output).__name__}"
    elif isinstance(output, (Tensor, np.ndarray)):
        if output.ndim and len(output) == num_samples:
            # Copies: a row of a tensor would keep the whole micro-batch, in memory and in files.
            return [row.clone() if isinstance(row, Tensor) else np.copy(row) for row in output]
        found = f"has the shape {tuple(output.shape)}"
    elif isinstance(output, Mapping):
        parts = {key: _split(value, num_samples, f"{name}[{key!r}]") for key, value in output.items()}
        return [{key: values[place] for key, values in parts.items()} for place in range(num_samples)]
    elif isinstance(output, tuple):
        columns = [_split(value, num_samples, f"{name}[{place}]") for place, value in enumerate(output)]
        rows = zip(*columns, strict=True)
        return [type(output)(*row) if hasattr(output, "_fields") else row for row in rows]
    elif isinstance(output, list):
        if len(output) == num_samples:
            return list(output)
        found = f"is a list of {len(output)}"
    else:
        found = f"is a {type(output).__name__}"
    raise ValueError(f"{name} {found}, which has no entry for each of the {num_samples} samples of its micro-batch")


def in_order(outputs: Iterable[Any], indices: Iterable[Sequence[int]]) -> tuple[list[int], list[Any]]:
    """Put outputs of micro-batches into the order of the data set.

    Args:
        outputs: what each micro-batch gave, as :func:`split_by_sample` takes it.
        indices: the samples of each micro-batch, in its order.

    Returns:
        Indices in ascending order, each once, and the output of each.

    Raises:
        ValueError: an output has no entry per sample.

    Example:
        >>> in_order([["b", "a"], ["c"]], [[1, 0], [2]])
        ([0, 1, 2], ['a', 'b', 'c'])
    """
    return join(
        (samples, split_by_sample(output, len(samples))) for output, samples in zip(outputs, indices, strict=True)
    )


def join(parts: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> tuple[list[int], list[Any]]:
    """Join parts, each the indices of samples and an output for each, in ascending order of indices, each once.

    Example:
        >>> join([([3, 0], ["d", "a"]), ([1], ["b"])])
        ([0, 1, 3], ['a', 'b', 'd'])
    """
    found: dict[int, Any] = {}
    for indices, outputs in parts:
        found.update(zip(indices, outputs, strict=True))
    ordered = sorted(found)
    return ordered, [found[index] for index in ordered]

"""Micro-batches without balancing: plain shuffled ones, and length-grouped ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction
from lightning_balance.micro_batches import MicroBatches, batches_of
from lightning_balance.shuffle import EpochOrder

__all__ = ["length_grouped_batches", "length_grouped_order", "plain_batches"]

_MOST_BATCHES_PER_GROUP = 50


def plain_batches(
    lengths: NDArray[np.int64],
    order: EpochOrder,
    *,
    batch_size: int,
    num_ranks: int,
    num_slots: int,
    cost: CostFunction | None,
    pad_to_multiple_of: int = 1,
    drop_last: bool = False,
) -> MicroBatches:
    """Return what a DataLoader with a DistributedSampler makes of the order of an epoch.

    Rank r takes every ``num_ranks``-th sample and cuts its own in micro-batches of `batch_size`. Where the samples do
    not divide by the ranks the first ones are repeated.

    Raises:
        ValueError: `drop_last` leaves nothing.
    """
    per_rank = -(-len(lengths) // num_ranks)
    if drop_last:
        per_rank = _num_rounds(len(lengths), batch_size, num_ranks, drop_last) * batch_size
    places = np.arange(per_rank * num_ranks)
    drawn = order.slice(0, len(lengths))
    return batches_of(
        lengths[drawn[places % len(lengths)]].reshape(per_rank, num_ranks),
        (places >= len(lengths)).reshape(per_rank, num_ranks),
        batch_size=batch_size,
        num_slots=num_slots,
        cost=cost,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def length_grouped_order(lengths: NDArray[np.int64], order: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """Return a shuffled order regrouped by length, as transformers' ``LengthGroupedSampler`` does.

    The order is cut into groups of 50 batches, of fewer where that would make less than four groups. Each group is
    sorted from longest to shortest, and the longest sample of all is exchanged with the first one, so that a batch
    that does not fit into memory fails at once.

    Args:
        lengths: length of every sample in tokens.
        order: the shuffled positions.
        batch_size: samples of a batch.

    Source:
        ``get_length_grouped_indices`` in ``transformers/trainer_pt_utils.py``, which draws its own shuffle.

    Example:
        >>> length_grouped_order(np.array([3, 5, 9, 2]), np.array([0, 1, 2, 3]), batch_size=1)
        array([2, 1, 0, 3])
    """
    group_size = batch_size * (min(len(order) // (batch_size * 4), _MOST_BATCHES_PER_GROUP) or 1)
    grouped: NDArray[np.int64] = order.copy()
    for start in range(0, len(order), group_size):
        group = order[start : start + group_size]
        grouped[start : start + group_size] = group[np.argsort(-lengths[group], kind="stable")]
    longest = int(np.argmax(lengths[grouped[::group_size]])) * group_size
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


def length_grouped_batches(
    lengths: NDArray[np.int64],
    order: EpochOrder,
    *,
    batch_size: int,
    num_ranks: int,
    num_slots: int,
    cost: CostFunction | None,
    pad_to_multiple_of: int = 1,
    drop_last: bool = False,
) -> MicroBatches:
    """Return what transformers' Trainer with ``group_by_length`` makes of the order of an epoch.

    It asks for groups of ``batch_size * gradient_accumulation_steps`` samples, and deals consecutive batches of
    `batch_size` to the ranks in turn. Where they do not come out even the first samples are repeated, as accelerate's
    ``even_batches`` does, or with `drop_last` (``dataloader_drop_last``) the last ones are left out.

    Raises:
        ValueError: `drop_last` leaves nothing.
    """
    drawn = order.slice(0, len(lengths))
    grouped = length_grouped_order(lengths, drawn, batch_size * num_slots)
    plain_steps = np.empty(len(lengths), dtype=np.int64)
    plain_steps[drawn] = np.arange(len(lengths)) // (batch_size * num_slots * num_ranks)
    num_rounds = _num_rounds(len(lengths), batch_size, num_ranks, drop_last)
    places = np.arange(num_rounds * num_ranks * batch_size).reshape(num_rounds, num_ranks, batch_size)
    places = places.transpose(0, 2, 1).reshape(num_rounds * batch_size, num_ranks)
    served = grouped[places % len(lengths)]
    return batches_of(
        lengths[served],
        places >= len(lengths),
        batch_size=batch_size,
        num_slots=num_slots,
        cost=cost,
        pad_to_multiple_of=pad_to_multiple_of,
        plain_steps=plain_steps[served],
    )


def _num_rounds(num_samples: int, batch_size: int, num_ranks: int, drop_last: bool) -> int:
    """Return how often every rank gets a micro-batch."""
    size = batch_size * num_ranks
    if drop_last and num_samples < size:
        raise ValueError(
            f"drop_last=True leaves no full micro-batch: {num_samples} samples are fewer than "
            f"batch_size * num_ranks = {size}"
        )
    return num_samples // size if drop_last else -(-num_samples // size)

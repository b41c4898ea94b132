"""Other samplers on a list of lengths, wrapped so that every rank's micro-batches can be seen.

A function ``..._for_one_rank`` runs what a training process runs; :func:`all_ranks` asks it for every rank. Where a
sampler leaves ranks with unequal numbers of micro-batches, the missing ones repeat what was served first, as
``DistributedSampler`` and accelerate's ``even_batches`` do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.trainer_pt_utils import BatchRebalanceSampler, get_length_grouped_indices

from benchmarks.served import ServedEpoch


def has_lhotse() -> bool:
    """Return whether lhotse can be imported."""
    try:
        import lhotse  # noqa: F401
    except ImportError:
        return False
    return True


def random_batches(
    lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, batch_size: int, seed: int
) -> list[Any]:
    """Return plain shuffled micro-batches of ``batch_size``."""
    order = np.random.default_rng([seed, 0]).permutation(len(lengths))
    return _slices(order, batch_size, num_ranks)


def length_grouped(
    lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, batch_size: int, seed: int
) -> list[Any]:
    """Return the micro-batches of transformers' ``LengthGroupedSampler`` as ``Trainer`` sets it up.

    The trainer asks for groups of ``batch_size * gradient_accumulation_steps``; accelerate then deals consecutive
    batches of ``batch_size`` to the ranks in turn.
    """
    generator = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(lengths.tolist(), batch_size * num_slots, generator=generator)
    return _slices(np.array(order), batch_size, num_ranks)


def batch_rebalance_for_one_rank(
    lengths: list[int], *, num_ranks: int, num_slots: int, batch_size: int, seed: int, rank: int
) -> list[list[int]]:
    """Return one rank's micro-batches of transformers' ``BatchRebalanceSampler``, the last step included."""
    sampler = BatchRebalanceSampler(
        lengths, num_ranks * num_slots * batch_size, num_ranks, num_slots, seed=seed, rank=rank, drop_last=False
    )
    return list(sampler)


def batch_rebalance(
    lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, batch_size: int, seed: int
) -> list[Any]:
    """Return the micro-batches of transformers' ``BatchRebalanceSampler``, asked for every rank."""
    listed = lengths.tolist()
    shape = {"num_ranks": num_ranks, "num_slots": num_slots, "batch_size": batch_size}
    return all_ranks(lambda rank: batch_rebalance_for_one_rank(listed, **shape, seed=seed, rank=rank), num_ranks)


def greedy_fill(lengths: NDArray[np.int64], order: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
    """Sort the samples and fill micro-batches one after another while ``count * longest <= max_tokens``.

    >>> [part.tolist() for part in greedy_fill(np.array([4, 9, 4]), np.arange(3), 9)]
    [[1], [0, 2]]
    """
    order = order[np.argsort(-lengths[order], kind="stable")]
    longest = lengths[order].tolist()
    parts, start = [], 0
    while start < len(order):
        end = min(start + max(max_tokens // longest[start], 1), len(order))
        parts.append(order[start:end])
        start = end
    return parts


def greedy_per_step(
    lengths: NDArray[np.int64], *, num_ranks: int, samples_per_step: int, max_tokens: int, seed: int
) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Return the greedy fill of every global batch of the shuffle, and the slots of each step.

    Micro-batches go to slots by length; places that are left over in the last slot run a copy of the shortest sample.
    """
    order = np.random.default_rng([seed, 0]).permutation(len(lengths))
    micro_batches, slots = [], []
    for start in range(0, len(order), samples_per_step):
        parts = greedy_fill(lengths, order[start : start + samples_per_step], max_tokens)
        slots.append(-(-len(parts) // num_ranks))
        micro_batches += parts + [parts[-1][-1:]] * (slots[-1] * num_ranks - len(parts))
    return micro_batches, slots


def greedy_shuffled(
    lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, max_tokens: int, seed: int
) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Return the greedy fill of the whole data set with the micro-batches shuffled (fairseq's ``max_tokens``)."""
    parts = greedy_fill(lengths, np.arange(len(lengths)), max_tokens)
    order = np.random.default_rng([seed, 0]).permutation(len(parts))
    parts = _even([parts[place] for place in order], num_ranks)
    return parts, slots_of(len(parts) // num_ranks, num_slots)


def lhotse_cuts(lengths: NDArray[np.int64]) -> Any:
    """Return the samples as lhotse knows them: cuts whose duration is the length."""
    from lhotse import CutSet
    from lhotse.testing.dummies import dummy_cut

    return CutSet.from_cuts(dummy_cut(index, duration=float(length)) for index, length in enumerate(lengths))


def lhotse_for_one_rank(cuts: Any, *, num_ranks: int, max_tokens: int, seed: int, rank: int) -> list[list[int]]:
    """Return one rank's micro-batches of lhotse's ``DynamicBucketingSampler`` with 30 buckets."""
    from lhotse.dataset import DynamicBucketingSampler

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*eagerly read CutSet.*")
        sampler = DynamicBucketingSampler(
            cuts,
            max_duration=float(max_tokens),
            num_buckets=30,
            shuffle=True,
            seed=seed,
            world_size=num_ranks,
            rank=rank,
        )
    # A batch that is short of samples for all ranks gets copies: ids with "_dup0" at the end.
    return [[int(cut.id.rsplit("-", 1)[-1].split("_dup")[0]) for cut in batch] for batch in sampler]


def all_ranks(one_rank: Callable[[int], list[list[int]]], num_ranks: int) -> list[Any]:
    """Return the micro-batches of all ranks, slot by slot, by asking the sampler for each rank."""
    ranks = [one_rank(rank) for rank in range(num_ranks)]
    num_slots = max(len(rank) for rank in ranks)
    return [rank[slot % len(rank)] for slot in range(num_slots) for rank in ranks]


def slots_of(num_slots: int, num_slots_per_step: int) -> list[int]:
    """Return the slots of each step when steps have so many, the last one what is left.

    >>> slots_of(10, 4)
    [4, 4, 2]
    """
    full, rest = divmod(num_slots, num_slots_per_step)
    return [num_slots_per_step] * full + [rest] * (rest > 0)


def serve(micro_batches: list[Any], num_ranks: int, num_slots: int) -> ServedEpoch:
    """Return micro-batches as an epoch of steps with ``num_slots`` slots."""
    return ServedEpoch.of(micro_batches, num_ranks, slots_of(len(micro_batches) // num_ranks, num_slots))


PLAIN, GROUPED, REBALANCED = "plain shuffle", "LengthGrouped", "BatchRebalance"
SAMPLERS: dict[str, Callable[..., list[Any]]] = {
    PLAIN: random_batches,
    GROUPED: length_grouped,
    REBALANCED: batch_rebalance,
}
"""Samplers of fixed numbers of samples per step; each takes lengths, the shape of a step and a seed."""


def _slices(order: NDArray[np.int64], batch_size: int, num_ranks: int) -> list[Any]:
    return _even([order[start : start + batch_size] for start in range(0, len(order), batch_size)], num_ranks)


def _even(micro_batches: list[NDArray[np.int64]], num_ranks: int) -> list[NDArray[np.int64]]:
    missing = -len(micro_batches) % num_ranks
    return micro_batches + [micro_batches[place % len(micro_batches)] for place in range(missing)]

"""The order of slots, and of ranks inside a slot: heavy micro-batches first, and not always on the same rank."""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray


def arrange(costs: NDArray[np.float64], sync: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order in which a step runs its micro-batches, without changing its modelled time.

    With ``sync="micro_batch"`` slots stay together: the heaviest slot first, and in slot ``s`` the heaviest
    micro-batch on rank ``s``, the next on rank ``s + 1``, and so on. With ``"step"`` ranks stay together: each runs
    its heaviest first, and the heaviest rank is rank 0.

    Args:
        costs: cost of each micro-batch, of shape ``(num_slots, num_ranks)``.
        sync: when ranks wait for each other.

    Returns:
        Slot and rank from which each place takes its micro-batch, both of shape ``(num_slots, num_ranks)``.

    >>> slots, ranks = arrange(np.array([[1.0, 2.0], [4.0, 3.0]]), "micro_batch")
    >>> slots.tolist(), ranks.tolist()
    ([[1, 1], [0, 0]], [[0, 1], [0, 1]])
    """
    num_slots, num_ranks = costs.shape
    if sync == "step":
        ranks = np.argsort(-costs.sum(axis=0), kind="stable")
        slots = np.argsort(-costs[:, ranks], axis=0, kind="stable")
        return slots, np.broadcast_to(ranks, costs.shape)
    slots = np.argsort(-costs.max(axis=1), kind="stable")
    ranks = np.argsort(-costs[slots], axis=1, kind="stable")
    turned = (np.arange(num_ranks) - np.arange(num_slots)[:, None]) % num_ranks
    return np.broadcast_to(slots[:, None], costs.shape), np.take_along_axis(ranks, turned, axis=1)


def turn_of(num_ranks: int) -> int:
    """Return by how many ranks a plan moves from one step to the next.

    About a golden section of the ranks, so that the places a rank has had in any few steps are spread over all of them,
    and without a common divisor, so that it has had each place once in ``num_ranks`` steps.

    >>> [turn_of(num_ranks) for num_ranks in (1, 2, 3, 4, 8, 512)]
    [1, 1, 2, 3, 5, 317]
    """
    golden = round(num_ranks * 0.6180339887)
    return next(turn for turn in range(max(golden, 1), num_ranks + 2) if gcd(turn, num_ranks) == 1)

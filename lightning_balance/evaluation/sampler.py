"""Serve one rank's part of an evaluation's plan as an ordinary batch sampler (layer 1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from lightning_balance._reinstantiation import note_arguments
from lightning_balance.plan import StepPlan


class EvaluationBatchSampler(BatchSampler):
    """The micro-batches of one rank in a plan of a whole data set; the same number on every rank.

    Lightning takes its ``sampler``, a ``DistributedSampler``, as a sign that the loader is sharded already. For predict
    it makes every batch sampler again, from the arguments that it was made with.

    Args:
        plan: of :func:`plan_evaluation`.
        rank: this data-parallel rank.
        drop_last: filled in by Lightning; nothing is ever dropped.
        sampler: filled in by Lightning; never needed by hand.

    Example:
        >>> from lightning_balance.evaluation.plan import plan_evaluation
        >>> list(EvaluationBatchSampler(plan_evaluation([3, 9, 1, 2], num_ranks=1, max_tokens=9), rank=0))
        [[1], [0, 3, 2]]
    """

    def __init__(
        self, plan: StepPlan, rank: int, *, drop_last: bool = False, sampler: DistributedSampler[Any] | None = None
    ) -> None:
        self.plan, self.rank = plan, rank
        self.batch_size = None  # type: ignore[assignment]  # torch declares int; None: unequal counts
        self.drop_last = drop_last
        self.sampler = sampler or DistributedSampler[Any](
            range(len(plan.order)),  # type: ignore[arg-type]  # anything with a length
            num_replicas=plan.num_ranks,
            rank=rank,
            shuffle=False,
        )
        note_arguments(self, {"plan": plan, "rank": rank, "drop_last": False})

    def __len__(self) -> int:
        """Micro-batches per rank."""
        return self.plan.num_slots

    def __iter__(self) -> Iterator[list[int]]:
        # Python ints: datasets hand indices to APIs that refuse numpy integers.
        return (self.plan.micro_batch(self.rank, slot).tolist() for slot in range(self.plan.num_slots))

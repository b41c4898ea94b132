"""Compare the methods on one epoch: all of its steps, or as many as there is time for, the same for each method."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.micro_batches import MicroBatches
from lightning_balance.report import PlanSummary, modelled_speed_up, summarize_micro_batches
from lightning_balance.shuffle import EpochOrder
from lightning_balance.unbalanced import length_grouped_batches, plain_batches
from lightning_balance.validation import validate_lengths
from lightning_balance.what_if.methods import Method, methods_to_compare
from lightning_balance.what_if.options import PlanOptions
from lightning_balance.what_if.planning import Progress, StepsPlanner

__all__ = ["Comparison", "Outcome", "compare"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one method comes to.

    Attributes:
        method: the method.
        summary: figures of the steps that were planned.
        num_steps: steps of the whole epoch.
        step_time: modelled time of a step, averaged over the epoch; estimated where not all steps were planned, from
            the ratio to plain shuffle in the same steps.
        speed_up: how many times more samples than plain shuffle in the same modelled time, in the same steps.
        speed_up_error: its standard error as a share of it; 0 where it is exact, ``nan`` where one block of steps does
            not tell.
    """

    method: Method
    summary: PlanSummary
    num_steps: int
    step_time: float
    speed_up: float
    speed_up_error: float

    @property
    def is_exact(self) -> bool:
        """Whether every step of the epoch was planned."""
        return self.summary.num_steps == self.num_steps

    @property
    def micro_batches_per_step(self) -> float:
        """Micro-batches per rank and step, on average."""
        return self.summary.num_micro_batches / self.summary.num_steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Every method on one epoch.

    Attributes:
        lengths: length of every sample in tokens.
        options: the run.
        outcomes: one per method, plain shuffle first.
        num_steps: steps of the epoch that balancing plans.
        num_steps_planned: how many of them were planned.
        num_steps_together: steps that were planned as a block.
        plain: micro-batches of plain shuffle in the steps that were planned.
        rebalance: micro-batches of rebalance in the same steps.
    """

    lengths: NDArray[np.int64]
    options: PlanOptions
    outcomes: list[Outcome]
    num_steps: int
    num_steps_planned: int
    num_steps_together: int
    plain: MicroBatches
    rebalance: MicroBatches

    @property
    def is_exact(self) -> bool:
        """Whether every step of the epoch was planned."""
        return self.num_steps_planned == self.num_steps


def compare(
    lengths: NDArray[np.int64],
    options: PlanOptions,
    *,
    num_steps: int | None = None,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
) -> Comparison:
    """Compare plain shuffle, length-grouped, rebalance, token budgets and lookahead on one epoch.

    Plain shuffle and length-grouped batches are always those of the whole epoch. Planned methods take blocks of
    consecutive steps in a random order that the seed decides, until all are planned, `num_steps` are, or the next block
    would take longer than the time that is left; one block is always planned. A block holds whole windows of every
    lookahead; a last one that is not full comes in the end. With a time limit that is reached the figures depend on the
    machine; `num_steps` gives the same again.

    Args:
        lengths: length of every sample in tokens.
        options: the run.
        num_steps: plan at least so many steps, rounded up to whole blocks; ``None``: all.
        time_limit_s: stop planning before so many seconds have passed.
        progress: called whenever a method has planned a block.

    Raises:
        TypeError: lengths that are not numbers.
        ValueError: lengths that cannot be, or do not fill a step with ``drop_last``, or `num_steps` below 1.

    Example:
        >>> comparison = compare(np.array([3, 5, 9, 2] * 8), PlanOptions(batch_size=2, num_ranks=2, lookahead=(1,)))
        >>> [outcome.method.name for outcome in comparison.outcomes]
        ['plain shuffle', 'length-grouped', 'rebalance', 'token budget 10', 'token budget 18']
    """
    lengths = validate_lengths(lengths)
    methods = methods_to_compare(lengths, options)
    planner = StepsPlanner(lengths, options, [method for method in methods if method.is_planned])
    planner.run(num_steps, time_limit_s, progress)
    plain, grouped = (
        function(
            lengths,
            EpochOrder(len(lengths), seed=options.seed, epoch=options.epoch, shuffle=shuffle),
            batch_size=options.batch_size,
            num_ranks=options.num_ranks,
            num_slots=options.num_slots,
            cost=options.cost,
            pad_to_multiple_of=options.pad_to_multiple_of,
            drop_last=options.drop_last,
        )
        for function, shuffle in ((plain_batches, options.shuffle), (length_grouped_batches, True))
    )
    judge = _Judge(plain=plain, options=options, steps_per_block=planner.steps_per_block, num_steps=planner.num_steps)
    planned = planner.results()
    batches = {method: planned.get(method, plain) for method in methods}
    batches[Method(kind="length_grouped")] = grouped
    rebalance = planned[Method(kind="rebalance")]
    return Comparison(
        lengths=lengths,
        options=options,
        outcomes=[judge.outcome(method, batches[method]) for method in methods],
        num_steps=planner.num_steps,
        num_steps_planned=rebalance.num_steps,
        num_steps_together=planner.steps_per_block,
        plain=plain.select(rebalance.step_indices),
        rebalance=rebalance,
    )


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Holds every method against plain shuffle in the same steps."""

    plain: MicroBatches
    options: PlanOptions
    steps_per_block: int
    num_steps: int

    def outcome(self, method: Method, batches: MicroBatches) -> Outcome:
        sync, cost = self.options.sync, self.options.cost
        summary = summarize_micro_batches(batches, cost=cost, sync=sync)
        num_steps = self.num_steps if method.is_planned else batches.num_steps
        is_whole = batches.num_steps == num_steps
        beside = self.plain if is_whole else self.plain.select(batches.step_indices)
        plain_times, times = beside.step_times(sync), batches.step_times(sync)
        return Outcome(
            method=method,
            summary=summary,
            num_steps=num_steps,
            step_time=float(
                times.mean() if is_whole else self.plain.step_times(sync).mean() * times.sum() / plain_times.sum()
            ),
            speed_up=modelled_speed_up(summary, summarize_micro_batches(beside, cost=cost, sync=sync)),
            speed_up_error=0.0 if is_whole else self._ratio_error(batches.step_indices, times, plain_times),
        )

    def _ratio_error(
        self, steps: NDArray[np.int64], times: NDArray[np.float64], plain_times: NDArray[np.float64]
    ) -> float:
        """Return the relative standard error of the ratio of two totals, from blocks drawn without replacement."""
        blocks = np.unique(steps // self.steps_per_block, return_inverse=True)[1]
        ours, plain = np.bincount(blocks, times), np.bincount(blocks, plain_times)
        num_drawn, num_all = len(ours), -(-self.num_steps // self.steps_per_block)
        if num_drawn < 2:
            return math.nan
        residuals = ours - ours.sum() / plain.sum() * plain
        variance = (1 - num_drawn / num_all) * num_drawn / (num_drawn - 1) * float(np.dot(residuals, residuals))
        return math.sqrt(variance) / float(ours.sum())

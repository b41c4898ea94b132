"""Plan the steps of an epoch with several methods: all of them, or as many as there is time for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_balance.epoch import EpochPlan, plan_epoch
from lightning_balance.micro_batches import MicroBatches, micro_batches_of
from lightning_balance.plan import StepPlan
from lightning_balance.validation import check_positive_int
from lightning_balance.what_if.methods import Method
from lightning_balance.what_if.options import PlanOptions

__all__ = ["FEWEST_SLOTS_TOGETHER", "Progress", "StepsPlanner"]

FEWEST_SLOTS_TOGETHER = 4
"""Steps are planned in blocks of at least so many slots, so that there are enough beside each other to draw."""

Progress = Callable[[float, int], None]
"""``progress(share of the work or of the time that is over, steps planned with every method)``."""


class StepsPlanner:
    """Plans the same blocks of steps for every method, block after block.

    A block holds whole windows of every lookahead, so that its samples are the same with every method.

    Args:
        lengths: length of every sample in tokens.
        options: the run.
        methods: the methods that plan.

    Attributes:
        num_steps: steps of the epoch.
        steps_per_block: steps of a block; the last one may have fewer.

    Raises:
        TypeError: lengths that are not numbers.
        ValueError: lengths that cannot be, or do not fill a step that ``drop_last`` leaves in.
    """

    def __init__(self, lengths: NDArray[np.int64], options: PlanOptions, methods: list[Method]) -> None:
        self._lengths = lengths
        self._samples_per_step = options.samples_per_step
        self._plans = {method: _plan_of(method, lengths, options) for method in methods}
        self._steps: dict[Method, list[StepPlan]] = {method: [] for method in methods}
        self._indices: list[int] = []
        self.num_steps = options.num_steps(len(lengths))
        window = math.lcm(*(method.lookahead for method in methods))
        together = -(-FEWEST_SLOTS_TOGETHER // options.num_slots)
        self.steps_per_block = min(window * -(-together // window), self.num_steps)
        # A last block with fewer samples comes last: alone it would tell nothing about the others.
        num_whole = len(lengths) // (self.steps_per_block * self._samples_per_step)
        num_blocks = -(-self.num_steps // self.steps_per_block)
        drawn = np.random.default_rng([options.seed, options.epoch]).permutation(num_whole)
        self._blocks = np.append(drawn, np.arange(num_whole, num_blocks))

    def run(self, num_steps: int | None, time_limit_s: float, progress: Progress | None) -> None:
        """Plan blocks in a random order until there are `num_steps`, or the next would take longer than is left.

        A last block that is not full comes in the end.

        Raises:
            ValueError: `num_steps` is below 1.
        """
        wanted = (
            self.num_steps if num_steps is None else min(check_positive_int("num_steps", num_steps), self.num_steps)
        )
        begin = now = time.perf_counter()
        for block in self._blocks.tolist():
            for part in self._plan_block(block):
                if progress is not None:
                    share = (len(self._indices) + part) / wanted
                    progress(min(max(share, (time.perf_counter() - begin) / time_limit_s), 1.0), len(self._indices))
            before, now = now, time.perf_counter()
            if len(self._indices) >= wanted or (now - begin) + (now - before) > time_limit_s:
                return

    def results(self) -> dict[Method, MicroBatches]:
        """Return the steps of each method, in the order of the epoch."""
        indices = np.array(self._indices)
        order = np.argsort(indices)
        return {
            method: micro_batches_of(
                self._plans[method],
                self._lengths,
                [steps[place] for place in order],
                step_indices=indices[order],
                first_places=self._first_places([steps[place] for place in order], indices[order]),
            )
            for method, steps in self._steps.items()
        }

    def _plan_block(self, block: int) -> Iterator[float]:
        """Plan a block with one method after the other; says after each how many steps' worth of work is done."""
        first = block * self.steps_per_block
        indices = range(first, min(first + self.steps_per_block, self.num_steps))
        for number, (method, plan) in enumerate(self._plans.items(), start=1):
            self._steps[method] += [plan.step(index) for index in indices]
            yield len(indices) * number / len(self._plans)
        self._indices += indices

    def _first_places(self, steps: list[StepPlan], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in the shuffle a slice of each step's size begins; blocks begin where they always do."""
        sizes = np.array([len(step.order) for step in steps])
        before = np.cumsum(sizes) - sizes
        blocks = indices // self.steps_per_block
        is_first = np.diff(blocks, prepend=-1) > 0
        first_of_block = np.repeat(np.flatnonzero(is_first), np.diff(np.flatnonzero(is_first), append=len(sizes)))
        places: NDArray[np.int64] = (
            blocks * self.steps_per_block * self._samples_per_step + before - before[first_of_block]
        )
        return places


def _plan_of(method: Method, lengths: NDArray[np.int64], options: PlanOptions) -> EpochPlan:
    return plan_epoch(
        lengths,
        samples_per_step=options.samples_per_step,
        num_ranks=options.num_ranks,
        num_slots=None if method.max_tokens else options.num_slots,
        max_tokens=method.max_tokens,
        seed=options.seed,
        epoch=options.epoch,
        shuffle=options.shuffle,
        drop_last=options.drop_last,
        cost=options.cost,
        sync=options.sync,
        pad_to_multiple_of=options.pad_to_multiple_of,
        lookahead=method.lookahead,
    )

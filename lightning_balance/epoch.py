"""The plan of an epoch: the shuffle cut into steps, each step planned when it is asked for."""

from __future__ import annotations

import hashlib
import warnings
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction, CostModel, PreparedCost, prepare_cost, probe_points
from lightning_balance.lookahead import WindowPlanner, slots_of_steps
from lightning_balance.plan import StepPlan
from lightning_balance.rules import StepRules
from lightning_balance.schedule import SampleSchedule, Schedule, TokenSchedule
from lightning_balance.shuffle import EpochOrder
from lightning_balance.validation import check_choice, check_int_at_least, check_positive_int, validate_lengths

# Part of the digest: raise it whenever the same input would give another plan.
PLANNER_VERSION = 1
STEP_UNITS = ("samples", "tokens")
# Workers fetch some steps ahead of training, which asks for its own step again: plan none of them twice.
_CACHED_STEPS, _FEWEST_CACHED_WINDOWS = 32, 2


class EpochPlan:
    """All optimizer steps of one epoch, planned lazily; made by :func:`plan_epoch`.

    A pure function of its arguments: every rank that makes it gets the same plan, and the same :attr:`digest`.

    Attributes:
        num_ranks: ranks that run at the same time.
        seed: seed of the shuffle.
        epoch: number of the epoch.
        order: the samples of the epoch in the order of the shuffle, of which steps are slices with ``lookahead=1``.
        skipped: dataset indices left out by ``oversize="skip"``.
    """

    def __init__(
        self,
        *,
        planner: WindowPlanner,
        schedule: Schedule,
        seed: int,
        epoch: int,
        fingerprint: str,
        lookahead: int,
        skipped: NDArray[np.int64],
    ) -> None:
        self._planner = planner
        self._lookahead = lookahead
        self._schedule = schedule
        self._fingerprint = fingerprint
        self._windows: OrderedDict[int, list[StepPlan]] = OrderedDict()
        self.num_ranks = planner.rules.num_ranks
        self.seed = seed
        self.epoch = epoch
        self.order = planner.order
        self.skipped = skipped

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return self._schedule.num_steps

    @property
    def num_samples(self) -> int:
        """Samples that the epoch serves, each once."""
        return self._schedule.num_samples

    @cached_property
    def num_slots_per_step(self) -> NDArray[np.int64]:
        """Micro-batches per rank of each step, exact, of shape ``(num_steps,)``; with a budget planned on first use."""
        fixed = self._planner.rules.num_slots
        if fixed is not None:
            return np.full(self.num_steps, fixed, dtype=np.int64)
        counts = [
            slots_of_steps(self._planner.num_slots(*self._schedule.window(index)), self._schedule.window(index)[2])
            for index in range(self._schedule.num_windows)
        ]
        return np.concatenate(counts)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per rank in the epoch."""
        return int(self.num_slots_per_step.sum())

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ when lengths, settings, seed or epoch do; equal plans have equal ones."""
        text = f"{PLANNER_VERSION} {self._fingerprint} {self.seed} {self.epoch}"
        hasher = hashlib.blake2b(text.encode(), digest_size=8)
        hasher.update(np.ascontiguousarray(self._planner.lengths).data)
        return hasher.hexdigest()

    def step(self, index: int) -> StepPlan:
        """Return the plan of one step, over dataset indices.

        Raises:
            IndexError: there is no such step.
        """
        window, place = self._schedule.window_of_step(index)
        if window not in self._windows:
            self._windows[window] = self._planner.plan(window, *self._schedule.window(window))
            if len(self._windows) > max(_CACHED_STEPS // self._lookahead, _FEWEST_CACHED_WINDOWS):
                self._windows.popitem(last=False)
        self._windows.move_to_end(window)
        return self._windows[window][place].rotated(self.epoch + index)

    def locate(self, micro_batch_index: int) -> tuple[int, int]:
        """Return step and slot of a rank's micro-batch, counted from the start of the epoch.

        Raises:
            IndexError: the epoch has no such micro-batch.

        >>> plan_epoch([4, 4, 4, 4], samples_per_step=2, num_ranks=1, num_slots=2).locate(3)
        (1, 1)
        """
        if not 0 <= micro_batch_index < self.num_micro_batches:
            raise IndexError(f"micro_batch_index must be in [0, {self.num_micro_batches}), got {micro_batch_index}")
        step = int(np.searchsorted(self._first_micro_batches, micro_batch_index, side="right")) - 1
        return step, micro_batch_index - int(self._first_micro_batches[step])

    @cached_property
    def _first_micro_batches(self) -> NDArray[np.int64]:
        return np.cumsum(self.num_slots_per_step) - self.num_slots_per_step


def plan_epoch(
    lengths: Any,
    *,
    samples_per_step: int | None = None,
    num_ranks: int,
    num_slots: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    cost: CostFunction | None = None,
    sync: str = "micro_batch",
    pad_to_multiple_of: int = 1,
    oversize: str = "single",
    step_unit: str = "samples",
    lookahead: int = 1,
    max_shapes: int | None = None,
) -> EpochPlan:
    """Plan an epoch: shuffle, take the samples of each step, cut and deal each step as :func:`plan_step` does.

    With ``lookahead=1`` step k holds exactly the k-th slice of the seeded shuffle. With more, samples may be exchanged
    among that many consecutive steps, which pays for outliers and small batches; steps then hold varying numbers of
    samples. Without ``max_tokens`` no micro-batch gets more padded tokens than a plain one could:
    ``ceil(samples_per_step / micro-batches) * longest padded length``.

    Args:
        lengths: length of each sample of the dataset in tokens, of shape ``(num_samples,)``.
        samples_per_step: samples of an optimizer step over all ranks; not used with ``step_unit="tokens"``.
        num_ranks: ranks that run at the same time.
        num_slots: micro-batches per rank and step; None: as many as ``max_tokens`` needs, or 1 where that does not say.
        max_tokens: hard cap on ``samples * padded length`` of a micro-batch.
        seed: seed of the shuffle.
        epoch: number of the epoch; every epoch has another shuffle.
        shuffle: draw the order at random; else the order of the dataset.
        drop_last: leave out a last step that is not full.
        cost: modelled time of a micro-batch, monotone in both arguments; None: ``CostModel()``.
        sync: when ranks wait for each other: after every ``"micro_batch"`` (FSDP) or once a ``"step"`` (DDP).
        pad_to_multiple_of: padded lengths are rounded up to a multiple of it.
        oversize: a sample longer than ``max_tokens`` becomes a ``"single"`` micro-batch, an ``"error"``, or is left
            out (``"skip"``).
        step_unit: ``"samples"``: every step has ``samples_per_step``; ``"tokens"``: every step takes as many samples
            as fill its micro-batches to the budget, the rest goes to the next step. Without ``samples_per_step``:
            ``"tokens"``.
        lookahead: consecutive steps that may exchange samples.
        max_shapes: most distinct padded lengths in the epoch; None: no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, the cost is not monotone, a sample is over the budget and ``oversize``
            is ``"error"``, or the epoch would be empty. A step whose samples do not fit into ``num_slots`` under
            ``max_tokens`` raises when it is planned.

    >>> plan = plan_epoch([3, 5, 9, 2, 4], samples_per_step=4, num_ranks=2, shuffle=False)
    >>> plan.num_steps, plan.num_samples, plan.step(1).is_filler(1, 0)
    (2, 5, False)
    """
    lengths = validate_lengths(lengths)
    check_choice("step_unit", step_unit, STEP_UNITS)
    if samples_per_step is None and max_tokens is None:
        raise ValueError("samples_per_step is None: give the samples of an optimizer step, or a budget with max_tokens")
    in_tokens = step_unit == "tokens" or samples_per_step is None
    if in_tokens and max_tokens is None:
        raise ValueError("step_unit='tokens' fills micro-batches to a budget: give max_tokens")
    if in_tokens and samples_per_step is not None:
        warnings.warn("samples_per_step is not used with step_unit='tokens'", stacklevel=2)
    if samples_per_step is not None:
        check_positive_int("samples_per_step", samples_per_step)
    seed, epoch = check_int_at_least("seed", seed, 0), check_int_at_least("epoch", epoch, 0)
    check_positive_int("lookahead", lookahead)
    rules = StepRules.checked(
        num_ranks=num_ranks, num_slots=1 if in_tokens and num_slots is None else num_slots, max_tokens=max_tokens,
        sync=sync, pad_to_multiple_of=pad_to_multiple_of, oversize=oversize, max_shapes=max_shapes,
    )  # fmt: skip
    rules = rules.with_shapes(lengths)
    padded = rules.padded(lengths)
    kept, skipped = rules.sort_out_oversize(lengths, padded)
    if len(kept) == 0:
        raise ValueError(f"all {len(lengths)} samples are longer than max_tokens={max_tokens}: an epoch would be empty")
    if samples_per_step is not None and not in_tokens:
        rules = rules.with_default_cap(samples_per_step, int(padded.max()))
    prepared = prepare_cost(cost, padded, max_count=len(lengths), max_tokens=rules.cap)
    order = EpochOrder(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle)
    if len(skipped):
        order.leave_out(skipped)
    planner = WindowPlanner(
        lengths=lengths, padded=padded, cost=prepared, rules=rules, order=order, seed=seed, epoch=epoch
    )
    schedule: Schedule
    if in_tokens:
        schedule = TokenSchedule(planner, num_samples=len(kept), lookahead=lookahead, drop_last=drop_last)
    else:
        assert samples_per_step is not None
        schedule = SampleSchedule(
            num_samples=len(kept), samples_per_step=samples_per_step, lookahead=lookahead, drop_last=drop_last
        )
    settings = (
        samples_per_step,
        num_ranks,
        num_slots,
        max_tokens,
        shuffle,
        drop_last,
        sync,
        pad_to_multiple_of,
        oversize,
    )
    fingerprint = f"{settings} {step_unit} {lookahead} {max_shapes} {_cost_fingerprint(prepared, padded)}"
    return EpochPlan(
        planner=planner,
        schedule=schedule,
        seed=seed,
        epoch=epoch,
        fingerprint=fingerprint,
        lookahead=lookahead,
        skipped=skipped,
    )


def _cost_fingerprint(cost: PreparedCost, padded: NDArray[np.int64]) -> str:
    """Return a text that differs where the cost does: a callable is known by its name and by its values."""
    if isinstance(cost.function, CostModel):
        return repr(cost.function)
    counts, lengths = probe_points(padded, cost.max_count)
    values = cost(counts[:, None], lengths[None, :])
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()

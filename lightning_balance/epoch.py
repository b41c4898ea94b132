"""The plan of an epoch: the shuffle cut into steps, each step planned when it is asked for."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction, CostModel, PreparedCost, prepare_cost, probe_points
from lightning_balance.lookahead import WindowPlanner, slots_of_steps
from lightning_balance.partition import turn_of
from lightning_balance.plan import StepPlan
from lightning_balance.progress import EpochProgress
from lightning_balance.rules import StepRules
from lightning_balance.schedule import SampleSchedule, Schedule, TokenSchedule
from lightning_balance.shuffle import EpochOrder, RemainingOrder
from lightning_balance.validation import check_choice, check_int_at_least, check_positive_int, validate_lengths

# Part of the digest: raise it whenever the same input would give another plan.
PLANNER_VERSION = 2
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
        order: the samples to serve in the order of the shuffle, of which steps are slices with ``lookahead=1``.
        skipped: dataset indices left out by ``oversize="skip"``.
        begin: what was served of the epoch before this plan, which goes on from there. Steps and micro-batches are
            counted from the epoch's beginning all the same.
        planning_seconds: time that this process has spent on planning steps so far.
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
        begin: EpochProgress,
    ) -> None:
        self._planner = planner
        self._lookahead = lookahead
        self._schedule = schedule
        self._fingerprint = fingerprint
        self._windows: OrderedDict[int, list[StepPlan]] = OrderedDict()
        self.num_ranks = planner.rules.num_ranks
        self._turn = turn_of(self.num_ranks)
        self.seed = seed
        self.epoch = epoch
        self.order = planner.order
        self.skipped = skipped
        self.begin = begin
        self.planning_seconds = 0.0

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return self.begin.num_steps + self._schedule.num_steps

    @property
    def steps(self) -> range:
        """The steps that this plan has: all of the epoch, unless some were served before it."""
        return range(self.begin.num_steps, self.num_steps)

    @property
    def num_samples(self) -> int:
        """Samples that the epoch serves, each once."""
        return self.begin.num_samples + self._schedule.num_samples

    @cached_property
    def num_slots_per_step(self) -> NDArray[np.int64]:
        """Micro-batches per rank of each of :attr:`steps`, exact; with a budget planned on first use."""
        fixed = self._planner.rules.num_slots
        if fixed is not None:
            return np.full(len(self.steps), fixed, dtype=np.int64)
        if self._schedule.is_empty:
            return np.zeros(0, dtype=np.int64)
        started = time.perf_counter()
        counts = [
            slots_of_steps(self._planner.num_slots(*self._schedule.window(index)), self._schedule.window(index)[2])
            for index in range(self._schedule.num_windows)
        ]
        self.planning_seconds += time.perf_counter() - started
        return np.concatenate(counts)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches per rank in the epoch; asked for at every micro-batch."""
        return self.begin.num_micro_batches + int(self.num_slots_per_step.sum())

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ when lengths, settings, seed or epoch do; equal plans have equal ones."""
        text = f"{PLANNER_VERSION} {self._fingerprint} {self.seed} {self.epoch} {self.begin}"
        hasher = hashlib.blake2b(text.encode(), digest_size=8)
        hasher.update(np.ascontiguousarray(self._planner.lengths).data)
        return hasher.hexdigest()

    def step(self, index: int) -> StepPlan:
        """Return the plan of one step, over dataset indices.

        Raises:
            IndexError: the plan has no such step.
        """
        window, place = self._window_of_step(index)
        if window not in self._windows:
            started = time.perf_counter()
            self._windows[window] = self._planner.plan(window, *self._schedule.window(window))
            self.planning_seconds += time.perf_counter() - started
            if len(self._windows) > max(_CACHED_STEPS // self._lookahead, _FEWEST_CACHED_WINDOWS):
                self._windows.popitem(last=False)
        self._windows.move_to_end(window)
        return self._windows[window][place].rotated((self.epoch + index) * self._turn)

    def locate(self, micro_batch_index: int) -> tuple[int, int]:
        """Return step and slot of a rank's micro-batch, counted from the start of the epoch.

        Raises:
            IndexError: the plan has no such micro-batch.

        >>> plan_epoch([4, 4, 4, 4], samples_per_step=2, num_ranks=1, num_slots=2).locate(3)
        (1, 1)
        """
        first, end = self.begin.num_micro_batches, self.num_micro_batches
        if not first <= micro_batch_index < end:
            raise IndexError(f"micro_batch_index must be in [{first}, {end}), got {micro_batch_index}")
        place = int(np.searchsorted(self._first_micro_batches, micro_batch_index, side="right")) - 1
        return self.begin.num_steps + place, micro_batch_index - int(self._first_micro_batches[place])

    def progress(self, step: int) -> EpochProgress:
        """Return what has been served when ``step`` begins, or at ``num_steps`` when the epoch is over.

        Raises:
            IndexError: the plan has no such step.

        >>> plan = plan_epoch([4, 4, 4, 4], samples_per_step=2, num_ranks=1, num_slots=2, shuffle=False)
        >>> plan.progress(1)
        EpochProgress(num_places=2, waiting=(), num_samples=2, num_steps=1, num_micro_batches=2)
        """
        if step == self.num_steps:
            return self._progress(self._schedule.num_samples, (), step, self.num_micro_batches)
        window, place = self._window_of_step(step)
        start, end, _ = self._schedule.window(window)
        num_micro_batches = int(self._first_micro_batches[step - self.begin.num_steps])
        if place == 0:
            return self._progress(start, (), step, num_micro_batches)
        samples = self.order.slice(start, end)
        served = np.concatenate([self.step(step - back).order for back in range(1, place + 1)])
        waiting = samples[~np.isin(samples, served)]
        return self._progress(end, tuple(waiting.tolist()), step, num_micro_batches)

    def _progress(self, end: int, waiting: tuple[int, ...], step: int, num_micro_batches: int) -> EpochProgress:
        return EpochProgress(
            num_places=self.order.places_taken(end),
            waiting=waiting + tuple(self.order.waiting_after(end).tolist()),
            num_samples=self.begin.num_samples + end - len(waiting),
            num_steps=step,
            num_micro_batches=num_micro_batches,
        )

    def _window_of_step(self, step: int) -> tuple[int, int]:
        first = self.begin.num_steps
        if step < first:
            raise IndexError(f"step must be in [{first}, {self.num_steps}), got {step}")
        return self._schedule.window_of_step(step - first)

    @cached_property
    def _first_micro_batches(self) -> NDArray[np.int64]:
        return self.begin.num_micro_batches + np.cumsum(self.num_slots_per_step) - self.num_slots_per_step


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
    begin: EpochProgress | None = None,
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
        drop_last: leave out a last step that is not full, unless it is all that is left after ``begin``.
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
        begin: plan only what is left of the epoch after this much of it was served, by whatever plan; None: all of it.

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
    whole = EpochOrder(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle)
    begin = begin or EpochProgress()
    order = RemainingOrder(whole, begin, left_out=skipped)
    planner = WindowPlanner(
        lengths=lengths, padded=padded, cost=prepared, rules=rules, order=order, seed=seed, epoch=epoch
    )
    step_size = None if in_tokens else samples_per_step
    schedule = _schedule(planner, step_size, lookahead, drop_last)
    if schedule.is_empty and begin != EpochProgress():
        schedule = _schedule(planner, step_size, lookahead, drop_last=False)
    elif schedule.is_empty:
        raise ValueError(
            f"an epoch would be empty: {len(kept)} samples "
            + ("do not fill one step" if in_tokens else f"are fewer than samples_per_step={samples_per_step}")
            + " and drop_last=True leaves out a step that is not full; "
            + ("lower max_tokens or num_slots" if in_tokens else "lower samples_per_step")
            + ", or set drop_last=False"
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
        begin=begin,
    )


def _schedule(planner: WindowPlanner, samples_per_step: int | None, lookahead: int, drop_last: bool) -> Schedule:
    num_samples = planner.order.num_samples
    if samples_per_step is None:
        return TokenSchedule(planner, num_samples=num_samples, lookahead=lookahead, drop_last=drop_last)
    return SampleSchedule(
        num_samples=num_samples, samples_per_step=samples_per_step, lookahead=lookahead, drop_last=drop_last
    )


def _cost_fingerprint(cost: PreparedCost, padded: NDArray[np.int64]) -> str:
    """Return a text that differs where the cost does: a callable is known by its name and by its values."""
    if isinstance(cost.function, CostModel):
        return repr(cost.function)
    counts, lengths = probe_points(padded, cost.max_count)
    values = cost(counts[:, None], lengths[None, :])
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()

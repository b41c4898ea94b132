"""Serve one rank's part of the plan as an ordinary batch sampler (layer 1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lightning_balance._reinstantiation import note_arguments
from lightning_balance.agreement import has_process_group
from lightning_balance.cost import CostFunction
from lightning_balance.epoch import EpochPlan, plan_epoch
from lightning_balance.partition.shapes import round_up_to_multiple
from lightning_balance.progress import EpochProgress
from lightning_balance.settings import Oversize, StepUnit, describe
from lightning_balance.validation import check_positive_int, validate_lengths

STATE_VERSION = 2
WHAT_STAYS = ("num_samples", "lengths", "seed", "shuffle")
"""What has to be the same wherever a state is continued; ranks, budget and every other option may change."""
WHERE_IT_STANDS = ("epoch", "position", "num_micro_batches", "begin", "digest", "served")


class BalancedBatchSampler(BatchSampler):
    """Micro-batches of one rank: unequal counts, equal cost, the same number on every rank.

    Every rank computes the same plan (a pure function of its arguments) and serves its own part, so that equal numbers
    of micro-batches hold by construction. ``len`` is exact for the current epoch. Iterating has no side effects other
    than the position that :meth:`state_dict` reports.

    Pass it to a loader as ``DataLoader(dataset, batch_sampler=...)``. Lightning re-creates a batch sampler that has an
    argument ``sampler`` with a ``DistributedSampler``, which carries rank, number of ranks and epoch: an explicit
    ``rank`` wins over it, so that nothing is sharded twice, and ``set_epoch`` arrives through it.

    Args:
        lengths: ``(num_samples,)`` positive integers, in tokens (frames, nodes).
        batch_size: samples per micro-batch of the plain run; ``samples_per_step = batch_size * num_slots *
            num_replicas``.
        samples_per_step: samples per optimizer step over all ranks, instead of ``batch_size``.
        max_tokens: budget of padded tokens per micro-batch. Alone (no batch size) it also sets the step:
            ``num_slots`` micro-batches per rank, each filled to the budget.
        num_slots: micro-batches per rank and optimizer step; with ``max_tokens`` and samples per step: as many as
            needed.
        num_replicas: number of ranks; default: from ``sampler``, else from the process group, else 1.
        rank: this rank; default likewise.
        seed: seed of the shuffle, together with the epoch.
        shuffle: draw a new permutation every epoch.
        drop_last: leave out an incomplete last step.
        cost: a :class:`CostModel` or a function ``(num_samples, padded_length) -> cost``.
        sync: ``"micro_batch"`` (FSDP: ranks wait after every micro-batch) or ``"step"`` (DDP: after every step).
        pad_to_multiple_of: padded lengths are rounded up to it.
        oversize: what to do with a sample longer than ``max_tokens``: ``"single"``, ``"error"`` or ``"skip"``.
        step_unit: ``"samples"`` or ``"tokens"``, see :func:`plan_epoch`.
        lookahead: number of consecutive steps that may exchange samples.
        max_shapes: limit on distinct padded lengths.
        sampler: filled in by Lightning; never needed by hand.

    Raises:
        ValueError: an argument is out of range, or ``rank`` is not in ``[0, num_replicas)``.

    Example:
        >>> sampler = BalancedBatchSampler([9, 1, 1, 1], batch_size=2, num_replicas=2, rank=0, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[0]], 1)
        >>> list(BalancedBatchSampler([9, 1, 1, 1], batch_size=2, num_replicas=2, rank=1, shuffle=False))
        [[1, 2, 3]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: int | None = None,
        samples_per_step: int | None = None,
        max_tokens: int | None = None,
        num_slots: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        cost: CostFunction | None = None,
        sync: str = "micro_batch",
        pad_to_multiple_of: int = 1,
        oversize: Oversize = "single",
        step_unit: StepUnit = "samples",
        lookahead: int = 1,
        max_shapes: int | None = None,
        sampler: DistributedSampler[Any] | None = None,
    ) -> None:
        if isinstance(lengths, Sampler):
            raise TypeError(
                f"lengths must hold one number per sample, got a {type(lengths).__name__}: pass it as sampler=..."
            )
        self.lengths: NDArray[np.int64] = validate_lengths(lengths)
        self.num_replicas, self.rank = _ranks(num_replicas, rank, sampler)
        self.batch_size = batch_size  # type: ignore[assignment]  # torch declares int; None: unequal counts
        self.drop_last = drop_last
        self._options: dict[str, Any] = {
            "samples_per_step": _samples_per_step(batch_size, samples_per_step, num_slots, self.num_replicas),
            "num_ranks": self.num_replicas,
            "num_slots": num_slots,
            "max_tokens": None if max_tokens is None else check_positive_int("max_tokens", max_tokens),
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "cost": cost,
            "sync": sync,
            "pad_to_multiple_of": pad_to_multiple_of,
            "oversize": oversize,
            "step_unit": step_unit,
            "lookahead": lookahead,
            "max_shapes": max_shapes,
        }
        # Lightning calls set_epoch on `batch_sampler.sampler`, never on the batch sampler itself: hold the epoch there.
        self.sampler = self._epoch_holder = sampler or DistributedSampler[Any](
            range(len(self.lengths)),  # type: ignore[arg-type]  # anything with a length
            num_replicas=self.num_replicas,
            rank=self.rank,
            shuffle=shuffle,
            seed=seed,
        )
        note_arguments(
            self,
            {"lengths": self.lengths, "rank": rank, "num_replicas": num_replicas, "batch_size": batch_size}
            | {name: value for name, value in self._options.items() if name != "num_ranks"}
            | ({} if batch_size is None else {"samples_per_step": None}),
        )
        self._plan: EpochPlan | None = None
        self._planning_seconds = 0.0
        self._start_epoch, self._start, self._start_progress = 0, 0, EpochProgress()
        self._position = 0, 0
        self._begun: tuple[int, int] | None = None
        _ = self.plan  # bad arguments are reported here, not at the first batch

    @property
    def num_slots(self) -> int | None:
        """Micro-batches per rank in every optimizer step; None where steps have as many as the budget needs."""
        return None if self._options["max_tokens"] is not None else self._options["num_slots"] or 1

    @property
    def max_tokens(self) -> int | None:
        """The token budget of a micro-batch."""
        max_tokens: int | None = self._options["max_tokens"]
        return max_tokens

    @property
    def smallest_max_tokens(self) -> int:
        """The smallest budget that :meth:`set_max_tokens` can take, as far as single samples decide it."""
        needed = {"single": 1, "error": int(self.lengths.max()), "skip": int(self.lengths.min())}
        return round_up_to_multiple(needed[self._options["oversize"]], self._options["pad_to_multiple_of"])

    @cached_property
    def lengths_fingerprint(self) -> str:
        """:func:`fingerprint_of` the lengths; taken once, as every checkpoint asks for it."""
        return fingerprint_of(self.lengths)

    @property
    def shuffle(self) -> bool:
        """Whether every epoch draws a new permutation."""
        return bool(self._options["shuffle"])

    @property
    def epoch(self) -> int:
        """The epoch whose plan is served."""
        return int(self._epoch_holder.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Serve the plan of ``epoch`` from the next iteration on."""
        self._epoch_holder.set_epoch(epoch)

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, the same on every rank."""
        if self._plan is None or self._plan.epoch != self.epoch:
            self._serve(self._make_plan(self.epoch))
        assert self._plan is not None
        return self._plan

    def _serve(self, plan: EpochPlan) -> None:
        self._planning_seconds = self.planning_seconds
        self._plan = plan

    @property
    def planning_seconds(self) -> float:
        """Time that this process has spent on planning the epochs that were served."""
        return self._planning_seconds + (0.0 if self._plan is None else self._plan.planning_seconds)

    def set_cost(self, cost: CostFunction) -> None:
        """Plan by another cost from now on: only before an epoch's first micro-batch, and on every rank alike."""
        self._options["cost"] = cost
        self._planning_seconds, self._plan = self.planning_seconds, None

    def plan_for(self, epoch: int) -> EpochPlan:
        """The plan of any epoch, without changing the one that is served."""
        return self.plan if epoch == self.epoch else self._make_plan(epoch)

    def _make_plan(self, epoch: int) -> EpochPlan:
        begin = self._start_progress if epoch == self._start_epoch else EpochProgress()
        return self._plan_from(epoch, begin)

    def _plan_from(self, epoch: int, begin: EpochProgress) -> EpochPlan:
        return plan_epoch(self.lengths, epoch=epoch, **self._options, begin=begin)

    def set_max_tokens(self, max_tokens: int, position: int | None = None) -> None:
        """Plan later epochs, and what is left of the current one after some micro-batches, under another budget.

        Args:
            max_tokens: padded tokens per micro-batch.
            position: micro-batches per rank of the current epoch that are done, up to the end of a step; None: the
                current epoch keeps its plan.

        Raises:
            ValueError: the sampler has no budget, or cannot have this one; nothing is changed then.
        """
        if self.max_tokens is None:
            raise ValueError("there is no token budget to change: the sampler was made with max_tokens=None")
        options = {**self._options, "max_tokens": check_positive_int("max_tokens", max_tokens)}
        begin = None if position is None else self.progress(position)
        plan = plan_epoch(self.lengths, epoch=self.epoch + (begin is None), **options, begin=begin)
        _ = plan.num_micro_batches  # steps that do not fit say so now
        self._options = options
        if position is not None and begin is not None:
            self._serve(plan)
            self._start_epoch, self._start, self._start_progress = plan.epoch, position, begin

    def progress(self, position: int) -> EpochProgress:
        """What the steps that end before micro-batch ``position`` of the current epoch have served."""
        plan = self.plan
        return plan.progress(plan.locate(position)[0] if position < plan.num_micro_batches else plan.num_steps)

    def __len__(self) -> int:
        """Micro-batches per rank in the current epoch, also after a resume within it."""
        return self.plan.num_micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: the epoch is read at the first batch. Lightning creates the iterator before it sets the epoch.
        plan = self.plan
        start = position = self._first_position(plan.epoch)
        self._begun = self._position = plan.epoch, start
        if start >= plan.num_micro_batches:
            return
        first_step, first_slot = plan.locate(start)
        for step in range(first_step, plan.num_steps):
            step_plan = plan.step(step)
            for slot in range(first_slot if step == first_step else 0, step_plan.num_slots):
                position += 1
                self._position = plan.epoch, position
                # Python ints: datasets hand indices to APIs that refuse numpy integers.
                yield step_plan.micro_batch(self.rank, slot).tolist()

    def _first_position(self, epoch: int) -> int:
        return self._start if epoch == self._start_epoch else 0

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration stands in the current epoch, as :meth:`state_at` describes it.

        With workers the position runs ahead of training by what they prefetch; :class:`BalanceCallback` stores the
        position of training instead.
        """
        epoch, position = self._position
        return self.state_at(position if epoch == self.epoch else self._first_position(self.epoch))

    def state_at(self, position: int) -> dict[str, Any]:
        """The state of a run that has done ``position`` micro-batches per rank of the current epoch.

        It says so twice: as a position in this plan, with everything that the plan depends on, and as the samples that
        whole steps have had (``"served"``), from which any other plan can go on.
        """
        plan = self.plan
        return {
            "version": STATE_VERSION,
            "epoch": plan.epoch,
            "position": position,
            "num_micro_batches": plan.num_micro_batches,
            **self.description(),
            "begin": plan.begin.state(),
            "digest": plan.digest,
            "served": self.progress(position).state(),
        }

    def description(self) -> dict[str, int | float | str | None]:
        """Everything that the plan depends on, as plain values: the samples and every option, by name."""
        options = {name: describe(value) for name, value in self._options.items() if name != "num_ranks"}
        return {
            "num_samples": len(self.lengths),
            "lengths": self.lengths_fingerprint,
            "num_replicas": self.num_replicas,
            **options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue inside the epoch of ``state``; later epochs are whole.

        With the ranks and options that the state was saved with, exactly the micro-batches follow that would have. With
        others, what whole steps have not had yet of the epoch's samples is planned anew, in the order of the shuffle;
        ``len`` then counts what was done before, too.

        Raises:
            ValueError: the state was made of other data, another seed or another order, by another state version, or is
                none.
        """
        check_state(state)
        ours = self.description()
        for name in WHAT_STAYS:
            if state[name] != ours[name]:
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}, but this sampler has {name}={ours[name]!r}:"
                    " continue with the same data, order and seed, or start without the state"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        begin = EpochProgress.of_state(state["begin"])
        plan = self._plan_from(epoch, begin)
        if plan.digest != state["digest"]:
            begin = EpochProgress.of_state(state["served"])
            position = begin.num_micro_batches
            plan = self._plan_from(epoch, begin)
        self._serve(plan)
        self._start_epoch, self._start, self._start_progress = epoch, position, begin
        self._position = epoch, position
        self.set_epoch(epoch)

    def changes_since(self, state: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Options that differ from those a state was saved with: name to value then and now."""
        return {name: (state.get(name), now) for name, now in self.description().items() if state.get(name) != now}

    @property
    def begun(self) -> tuple[int, int] | None:
        """Epoch and first position of the latest iterator that was asked for a batch; None before the first."""
        return self._begun


def fingerprint_of(lengths: NDArray[np.int64]) -> str:
    """16 hexadecimal digits that tell lengths from others."""
    return hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()


def check_state(state: Any) -> None:
    """Check that a state can be one that :meth:`BalancedBatchSampler.state_at` made.

    Raises:
        ValueError: it is none, lacks something, is of another version, or stands at no place of its epoch.
    """
    way_out = "continue from another checkpoint, or start without the state"
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state must be a dictionary that state_dict made, got a {type(state).__name__}: {way_out}"
        )
    version = state.get("version")
    if version != STATE_VERSION:
        raise ValueError(f"state['version'] is {version!r}, but this release reads version {STATE_VERSION}: {way_out}")
    missing = [name for name in (*WHAT_STAYS, *WHERE_IT_STANDS) if name not in state]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}, so it is not as state_dict made it: {way_out}")
    position, num_micro_batches = state["position"], state["num_micro_batches"]
    if not isinstance(position, int) or not 0 <= position <= num_micro_batches:
        raise ValueError(
            f"state['position'] must be an integer in [0, {num_micro_batches}], the micro-batches of its epoch, got"
            f" {position!r}: {way_out}"
        )


def _ranks(num_replicas: int | None, rank: int | None, sampler: DistributedSampler[Any] | None) -> tuple[int, int]:
    is_distributed = has_process_group()
    if num_replicas is None:
        num_replicas = sampler.num_replicas if sampler else dist.get_world_size() if is_distributed else 1
    if rank is None:
        rank = sampler.rank if sampler else dist.get_rank() if is_distributed else 0
    check_positive_int("num_replicas", num_replicas)
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank must be in [0, num_replicas={num_replicas}), got {rank!r}")
    return num_replicas, rank


def _samples_per_step(
    batch_size: int | None, samples_per_step: int | None, num_slots: int | None, num_replicas: int
) -> int | None:
    if batch_size is None:
        return samples_per_step
    if samples_per_step is not None:
        raise ValueError(
            f"batch_size={batch_size} and samples_per_step={samples_per_step} both set the step: give one of them"
        )
    check_positive_int("batch_size", batch_size)
    return batch_size * (num_slots or 1) * num_replicas

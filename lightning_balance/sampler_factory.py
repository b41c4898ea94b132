"""From a user's training loader to the batch sampler that serves the plan, agreed on by all ranks (layer 2)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import lightning_balance
from lightning_balance import _lightning
from lightning_balance.agreement import check_equal_on_ranks, from_rank_zero, gather_objects, on_every_rank
from lightning_balance.calibration.online import OnlineCost, slowest_per_slot
from lightning_balance.calibration.search import MEMORY_IS_NOT_THE_LIMIT, BudgetSearch
from lightning_balance.cost import CostFunction, CostModel
from lightning_balance.lengths.find import count_samples
from lightning_balance.lengths_of_ranks import WAY_OUT, LengthsOfRanks
from lightning_balance.loaders import LoaderOrder, check_loader, read_order
from lightning_balance.partition.shapes import round_up_to_multiple
from lightning_balance.probing._lightning import showing_loader
from lightning_balance.probing.budget import BudgetFinder
from lightning_balance.probing.micro_batches import MicroBatches
from lightning_balance.sampler import BalancedBatchSampler
from lightning_balance.settings import (
    DEFAULT_MEMORY_FRACTION,
    OPTION_NAMES,
    OPTIONS_OF_WEIGHTS_AND_OUTPUT,
    BalanceSettings,
    PlannedSync,
    describe,
)

OWN_OF_A_RANK = frozenset({"lengths", "lengths_cache_dir", "seed"})
"""Options that may differ between ranks: what they lead to is compared, or it is the same."""
WITHOUT_SEARCH: dict[str, Any] = {"memory_fraction": DEFAULT_MEMORY_FRACTION, "memory_limit_gib": None}
"""Options of the search for a budget, once it is over."""


class SamplerFactory:
    """Makes the balanced batch sampler of a training loader.

    Args:
        trainer: the trainer, with its strategy's processes running.
        settings: the user's options.

    Attributes:
        num_ranks: data-parallel ranks; tensor-parallel peers share one.
        rank: this data-parallel rank.
        accumulation: the trainer's ``accumulate_grad_batches``.
        sync: when ranks wait for each other.
        order: batch size and order of the loader; None for a loader that brought its own balanced sampler.
        settings: the user's options; with ``max_tokens="auto"``, from the first loader on, with the number found.
        online: follows the run's own times with ``cost="auto"``; ``settings`` then has its model.
        memory_bounds: the user's share and limit of memory for ``max_tokens="auto"``.
        can_run: whether strategy, module and optimizers are set up, so that micro-batches can be tried.
    """

    def __init__(self, trainer: Trainer, settings: BalanceSettings) -> None:
        self.num_ranks, self.rank = _lightning.data_parallel_ranks(trainer)
        self.accumulation: int = trainer.accumulate_grad_batches
        self.sync = _planned_sync(trainer, settings)
        self.order: LoaderOrder | None = None
        self.online = OnlineCost() if settings.cost == "auto" else None
        self.settings = settings if self.online is None else replace(settings, cost=self.online.model)
        self.memory_bounds = [settings.memory_fraction, settings.memory_limit_gib]
        self._trainer = trainer
        self._lengths = LengthsOfRanks(trainer, settings)
        self._saved: dict[str, Any] = {}
        self._warned_of_skipped: tuple[int, int | None] | None = None
        self.can_run = False

    def make(self, loader: Any) -> BalancedBatchSampler:
        """The sampler for a user's training loader. A collective call; errors are raised on every rank.

        Raises:
            TypeError: the loader cannot be balanced.
            ValueError: lengths, options or seeds are wrong, or differ between ranks.
        """
        loader = on_every_rank(lambda: check_loader(loader))
        if isinstance(loader.batch_sampler, BalancedBatchSampler):
            sampler = on_every_rank(lambda: self._adopt(loader.batch_sampler))
        else:
            self.order = order = on_every_rank(lambda: read_order(loader))
            lengths = self.find_lengths(loader)
            if self.settings.max_tokens == "auto":
                self._settle_budget(loader)
            sampler = on_every_rank(lambda: self._make(lengths, order))
        self._check_agreement(sampler)
        return sampler

    def find_lengths(self, loader: DataLoader[Any]) -> NDArray[np.int64]:
        """The length of every sample of a loader's data. A collective call; errors are raised on every rank."""
        if isinstance(loader.batch_sampler, BalancedBatchSampler):
            return loader.batch_sampler.lengths
        return self._lengths.find(loader, self.settings.lengths, _lightning.train_datamodule(self._trainer))

    def _make(self, lengths: NDArray[np.int64], order: LoaderOrder) -> BalancedBatchSampler:
        settings = self.settings
        assert settings.max_tokens != "auto"
        samples_per_step = self._samples_per_step(order.batch_size)
        is_token_step = settings.step_unit == "tokens"
        return BalancedBatchSampler(
            lengths,
            samples_per_step=None if is_token_step else samples_per_step,
            max_tokens=settings.max_tokens,
            num_slots=self.accumulation if settings.max_tokens is None or is_token_step else None,
            num_replicas=self.num_ranks,
            rank=self.rank,
            seed=_seed(settings),
            shuffle=order.shuffle,
            drop_last=order.drop_last,
            cost=self.cost,
            sync=self.sync,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            oversize=settings.oversize,
            step_unit=settings.step_unit,
            lookahead=settings.lookahead,
            max_shapes=settings.max_shapes,
        )

    @property
    def cost(self) -> CostFunction:
        """The cost that the plan is made with."""
        assert self.settings.cost != "auto"
        return self.settings.cost

    def _samples_per_step(self, batch_size: int) -> int:
        return self.settings.samples_per_step or batch_size * self.accumulation * self.num_ranks

    def _most_samples(self, loader: DataLoader[Any]) -> int:
        in_tokens = self.settings.step_unit == "tokens"
        samples_per_step = None if in_tokens else self._samples_per_step(self.batch_size(loader))
        return most_samples(samples_per_step, self.settings.lookahead, count_samples(loader.dataset))

    def batch_size(self, loader: DataLoader[Any]) -> int:
        """Samples per micro-batch of the plain run; 1 where a balanced sampler has none of its own."""
        if isinstance(loader.batch_sampler, BalancedBatchSampler):
            return loader.batch_sampler.batch_size or 1
        return read_order(loader).batch_size

    def micro_batches(self, loader: DataLoader[Any]) -> MicroBatches:
        """Makes single micro-batches of a loader's data. A collective call; errors are raised on every rank."""
        return MicroBatches(loader, round_up_to_multiple(self.find_lengths(loader), self.settings.pad_to_multiple_of))

    def renew_cost(self) -> bool:
        """Fit the cost to the times of all ranks, with ``cost="auto"``; True if it changed. A collective call."""
        if self.online is None:
            return False
        of_ranks, online = gather_objects(self.online.measured), self.online
        if _lightning.exchanges_every_micro_batch(self._trainer):
            measured = slowest_per_slot(of_ranks, online.model)
        else:
            measured = [row for rows in of_ranks for row in rows]
        return self._plan_by(from_rank_zero(lambda: online.renewed(measured)))

    def keep_cost(self, state: dict[str, Any]) -> None:
        """Take the cost that a run had found before it was saved."""
        if self.online is not None and state.get("online_cost") is not None:
            self._plan_by(CostModel(**state["online_cost"]))

    def _plan_by(self, model: CostModel) -> bool:
        assert self.online is not None
        is_new, self.online.model = model != self.online.model, model
        self.settings = replace(self.settings, cost=model)
        return is_new

    def keep_budget(self, state: dict[str, Any]) -> None:
        """Take the budget that a saved run had found, if it had these ranks, this memory and no smaller steps."""
        self._saved = state

    def _saved_budget(self, loader: DataLoader[Any]) -> int | None:
        state = self._saved
        is_alike = (state.get("num_replicas"), state.get("memory_bounds")) == (self.num_ranks, self.memory_bounds)
        if not is_alike:
            return None
        most = most_samples(state.get("samples_per_step"), state.get("lookahead", 1), state["num_samples"])
        return state.get("max_tokens") if self._most_samples(loader) <= most else None

    def _settle_budget(self, loader: DataLoader[Any]) -> None:
        saved = from_rank_zero(lambda: self._saved_budget(loader))
        max_tokens = self._find_budget(loader) if saved is None else saved
        self.settings = replace(self.settings, max_tokens=max_tokens, **WITHOUT_SEARCH)

    def _find_budget(self, loader: DataLoader[Any]) -> int:
        if not self.can_run:
            raise ValueError(
                "max_tokens='auto' runs the module before the number of steps is known, but configure_optimizers asks"
                " for trainer.estimated_stepping_batches: find the budget with `lightning-balance calibrate"
                " --find-max-tokens` and give max_tokens the number"
            )
        max_tokens, search, limit_gib = self.find_max_tokens(
            loader,
            memory_fraction=self.settings.memory_fraction,
            memory_limit_gib=self.settings.memory_limit_gib,
        )
        memory = f"{limit_gib:.3g} GiB"
        fits = f"is the largest that fits into {memory}"
        if not search.is_limited:
            fits = f"fits into {memory}; {MEMORY_IS_NOT_THE_LIMIT}"
        rank_zero_info(f"BalanceCallback: max_tokens={max_tokens} {fits}")
        return max_tokens

    def find_max_tokens(
        self, loader: DataLoader[Any], *, memory_fraction: float, memory_limit_gib: float | None
    ) -> tuple[int, BudgetSearch, float]:
        """The largest budget that fits on every rank, the tries, and this rank's limit in GiB. A collective call.

        Raises:
            ValueError: no budget fits, or the device needs ``memory_limit_gib``.
        """
        max_samples = on_every_rank(lambda: self._most_samples(loader))
        finder = BudgetFinder(
            self._trainer,
            self.micro_batches(loader),
            max_samples=max_samples,
            memory_fraction=memory_fraction,
            memory_limit_gib=memory_limit_gib,
        )
        with showing_loader(self._trainer, loader):
            max_tokens, search = finder.find()
        return max_tokens, search, finder.limit_gib

    def _adopt(self, sampler: BalancedBatchSampler) -> BalancedBatchSampler:
        if (sampler.num_replicas, sampler.rank) != (self.num_ranks, self.rank):
            raise ValueError(
                f"the DataLoader's BalancedBatchSampler has rank={sampler.rank}, num_replicas={sampler.num_replicas},"
                f" but this is rank {self.rank} of {self.num_ranks}: leave both out of the sampler, or let"
                " BalanceCallback make it"
            )
        ignored = set(self.settings.differing_options(BalanceSettings())) - OPTIONS_OF_WEIGHTS_AND_OUTPUT
        if ignored:
            raise ValueError(
                f"BalanceCallback has {', '.join(sorted(ignored))}, but the DataLoader has a BalancedBatchSampler with"
                " options of its own: give the options to one of the two"
            )
        return sampler

    def warn_of_skipped(self, sampler: BalancedBatchSampler, epoch: int) -> None:
        """Say how many samples an epoch leaves out, once for a budget."""
        num_skipped = len(sampler.plan_for(epoch).skipped)
        if num_skipped and self._warned_of_skipped != (num_skipped, sampler.max_tokens):
            self._warned_of_skipped = num_skipped, sampler.max_tokens
            rank_zero_warn(
                f"oversize='skip': {num_skipped} of {len(sampler.lengths)} samples are longer than"
                f" max_tokens={sampler.max_tokens} and are left out"
            )

    def _check_agreement(self, sampler: BalancedBatchSampler) -> None:
        options = {name: describe(getattr(self.settings, name)) for name in OPTION_NAMES if name not in OWN_OF_A_RANK}
        description = sampler.description()
        check_equal_on_ranks(
            {
                "lightning_balance.__version__": lightning_balance.__version__,
                "the number of samples": description.pop("num_samples"),
                "the lengths' fingerprint": description.pop("lengths"),
                "seed": description.pop("seed"),
                "the DataLoader's order": self.order,
                **options,
                "accumulate_grad_batches": self.accumulation,
                "limit_train_batches": self._trainer.limit_train_batches,
                **description,
                "the plan's digest": sampler.plan_for(0).digest,
            },
            WAY_OUT,
        )

    def check_same_place(self, sampler: BalancedBatchSampler, num_batches_done: int) -> None:
        """Compare where the ranks begin, after a restart perhaps from files of their own. A collective call.

        Raises:
            ValueError: on every rank, when they are not at the same place of the same plan.
        """
        check_equal_on_ranks(
            {
                "the epoch": sampler.epoch,
                "the number of batches done": num_batches_done,
                "the number of optimizer steps done": self._trainer.global_step,
                "the number of samples done before": sampler.plan.begin.num_samples,
                "the plan's digest": sampler.plan.digest,
            },
            "every rank needs the same checkpoint",
        )


def most_samples(samples_per_step: int | None, lookahead: int, num_samples: int) -> int:
    """Samples over all ranks that no optimizer step has more of: one step of a window may have nearly all of them.

    Args:
        samples_per_step: None for steps of tokens, which may have any number.
        lookahead: steps of a window.
        num_samples: of the data set.

    >>> most_samples(8, 2, 100), most_samples(8, 2, 10), most_samples(None, 1, 100)
    (16, 10, 100)
    """
    return num_samples if samples_per_step is None else min(samples_per_step * lookahead, num_samples)


def _seed(settings: BalanceSettings) -> int:
    if settings.seed is not None:
        return settings.seed
    return int(os.environ.get("PL_GLOBAL_SEED", 0))  # set by lightning's seed_everything


def _planned_sync(trainer: Trainer, settings: BalanceSettings) -> PlannedSync:
    if settings.sync != "auto":
        return settings.sync
    return "micro_batch" if _lightning.waits_every_micro_batch(trainer) else "step"

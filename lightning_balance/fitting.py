"""The walk through the plan in one ``fit``: epoch lengths, windows, stop and restart (layer 2)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_balance import _lightning
from lightning_balance.agreement import on_every_rank
from lightning_balance.epoch import EpochPlan
from lightning_balance.loaders import with_batch_sampler
from lightning_balance.plan import StepPlan
from lightning_balance.sampler import BalancedBatchSampler, check_state
from lightning_balance.sampler_factory import SamplerFactory
from lightning_balance.settings import BalanceSettings
from lightning_balance.windows import Accumulation, BetweenWindows, batch_role

MAX_EPOCHS_COUNTED = 64
"""Steps of so many epochs are counted one by one for ``estimated_stepping_batches``; more epochs are extrapolated."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a micro-batch stands in its optimizer step.

    Attributes:
        plan: the step over all ranks.
        slot: 0-based position in the window.
        num_slots: slots of the window that will run; fewer than planned when ``limit_train_batches`` cuts the epoch.
    """

    plan: StepPlan
    slot: int
    num_slots: int

    @property
    def is_first(self) -> bool:
        """Whether an optimizer step begins here."""
        return self.slot == 0

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after it."""
        return self.slot == self.num_slots - 1

    @property
    def num_samples(self) -> int:
        """Real samples of the window over all ranks."""
        return int(self.plan.num_samples[: self.num_slots].sum())

    @property
    def real_tokens(self) -> int:
        """Real tokens of the window over all ranks, before padding."""
        return int(self.plan.real_tokens[: self.num_slots].sum())


class BalancedFit:
    """One ``fit`` with balanced micro-batches.

    Args:
        trainer: the trainer, with its strategy's processes running.
        settings: the user's options.

    Attributes:
        factory: ranks, synchronisation and the user's loader.
        is_validation_ahead: a validation after the latest batch has begun, in this run or before a restart, and has
            not ended.
    """

    def __init__(self, trainer: Trainer, settings: BalanceSettings) -> None:
        self.trainer = trainer
        self.factory = SamplerFactory(trainer, settings)
        self._sampler: BalancedBatchSampler | None = None
        self._restored: dict[str, Any] | None = None
        self._restored_step = 0
        self._length_is_stale = False
        self._steps_of_epoch: dict[int, int] = {}
        self._steps_before: tuple[int, int] | None = None
        self._given_max_tokens: int | None = None
        self._changed_max_tokens: int | None = None
        self._validated = 0, 0
        self.is_validation_ahead = False

    @property
    def sampler(self) -> BalancedBatchSampler:
        """The batch sampler in use.

        Raises:
            RuntimeError: no training loader has been requested yet.
        """
        if self._sampler is None:
            raise RuntimeError("the training loader has not been requested yet, so there is no plan")
        return self._sampler

    @property
    def has_loader(self) -> bool:
        """Whether the training loader has been balanced already."""
        return self._sampler is not None

    @property
    def has_fixed_windows(self) -> bool:
        """Whether every window has ``accumulate_grad_batches`` slots, which the trainer's loop handles by itself.

        Not after a restart: windows before it may have been others.
        """
        return self.sampler.num_slots == self.factory.accumulation and self._steps_before is None

    def balance(self, loader: Any) -> DataLoader[Any]:
        """Rebuild the user's training loader around the plan. A collective call; errors are raised on every rank."""
        on_every_rank(lambda: None if self._restored is None else self._take_over(self._restored))
        self._sampler = sampler = self.factory.make(loader)
        self._steps_of_epoch.clear()
        sampler.set_epoch(self.trainer.current_epoch)
        self._given_max_tokens = sampler.max_tokens
        if self._restored is not None and self._restored.get("given_max_tokens") == sampler.max_tokens:
            self._changed_max_tokens = self._restored.get("max_tokens")
        if self._changed_max_tokens is not None:
            sampler.set_max_tokens(self._changed_max_tokens, sampler.plan.begin.num_micro_batches)
        on_every_rank(lambda: None if self._restored is None else self._load(sampler, self._restored))
        self.factory.warn_of_skipped(sampler, sampler.epoch)
        self._announce_steps()
        return with_batch_sampler(loader, sampler)

    @property
    def position(self) -> int:
        """Micro-batches per rank of the sampler's epoch whose backward is done."""
        has_begun = _lightning.has_begun(self.trainer, self.sampler.epoch)
        return _lightning.num_batches_done(self.trainer) if has_begun else 0

    def state(self) -> dict[str, Any]:
        """Where the run stands, as :meth:`BalancedBatchSampler.load_state_dict` reads it; at a step's beginning."""
        position = self.position
        return {
            **self.sampler.state_at(position - self.num_batches_into_step(position)),
            "num_micro_batches": self.num_batches_of_epoch,
            "given_max_tokens": self._given_max_tokens,
            "memory_bounds": self.factory.memory_bounds,
            "online_cost": None if self.factory.online is None else asdict(self.factory.online.model),
        }

    def num_batches_into_step(self, position: int) -> int:
        """Micro-batches between ``position`` and the beginning of its optimizer step; 0 at the epoch's end."""
        return self.sampler.plan.locate(position)[1] if position < self.num_batches_of_epoch else 0

    @property
    def num_batches_of_epoch(self) -> int:
        """Micro-batches per rank that the current epoch runs, after ``limit_train_batches``."""
        return self._num_batches(self.sampler.plan)

    def _num_batches(self, plan: EpochPlan) -> int:
        limited = _lightning.limited_num_batches(self.trainer, plan.num_micro_batches)
        if not plan.begin.num_micro_batches:
            return limited
        # Under another plan the limit may lie before the place where the epoch goes on: then one more step ends it.
        return max(limited, plan.begin.num_micro_batches + int(plan.num_slots_per_step[:1].sum()))

    def restore(self, state: Any, global_step: int) -> None:
        """Continue where ``state`` stands as soon as the loader is there; at once if Lightning asked for it early."""
        self._restored, self._restored_step = state, global_step
        if self.has_loader:
            _lightning.forget_train_dataloader(self.trainer)

    def _take_over(self, state: dict[str, Any]) -> None:
        """Take from a state what has to be known before there is a sampler."""
        check_state(state)
        self.factory.keep_budget(state)
        self.factory.keep_cost(state)
        if state["position"] < state["num_micro_batches"]:
            self._steps_before = state["epoch"], self._restored_step - state["served"]["num_steps"]
        else:
            self._steps_before = state["epoch"] + 1, self._restored_step

    def _load(self, sampler: BalancedBatchSampler, state: dict[str, Any]) -> None:
        """Put the sampler where a state stands, and keep in mind which validations it has seen."""
        sampler.load_state_dict(state)
        num_validated = state.get("validated", state["position"])
        self._validated = sampler.epoch, num_validated if state["digest"] == sampler.plan.digest else 0
        self.is_validation_ahead = num_validated < state["position"]

    def continue_epoch(self, epoch: int) -> None:
        """Begin the first epoch of a run, possibly in its middle, and see that the iterator serves it.

        A collective call; errors are raised on every rank.

        After a restart the trainer keeps the iterator that it made before the epoch was known (PL#21938), and workers
        have fetched from it already.
        """
        restored, self._restored = self._restored, None
        is_restarting = _lightning.is_restarting(self.trainer)
        finished_an_epoch = _lightning.finished_an_epoch(self.trainer)
        num_done = _lightning.num_batches_done(self.trainer)
        is_inside_epoch = is_restarting and num_done > 0 and not finished_an_epoch
        on_every_rank(lambda: self._check_continues(restored, epoch, num_done) if is_inside_epoch else None)
        self.begin_epoch(epoch)
        self.factory.check_same_place(self.sampler, num_done)
        if restored is not None and epoch == restored["epoch"]:
            self._tell_changes(restored)
        if is_restarting or restored is not None or self.sampler.begun not in (None, (epoch, 0)):
            _lightning.restart_train_iterator(self.trainer)
        if is_restarting and finished_an_epoch:
            # The loop finds out that the checkpoint's epoch is over by comparing the batches done with the epoch's
            # length, which has to be the old epoch's until the first batch of the new one.
            _lightning.set_epoch_length(self.trainer, num_done)
            self._length_is_stale = True
        if is_restarting and not num_done:
            _lightning.begin_restarted_epoch(self.trainer)
        if is_restarting:
            self.trainer.accumulate_grad_batches = BetweenWindows(self._count_steps)

    def _check_continues(self, restored: dict[str, Any] | None, epoch: int, num_done: int) -> None:
        if restored is None:
            raise ValueError(
                f"the checkpoint was saved in the middle of an epoch ({num_done} batches done) by a run without"
                " BalanceCallback, so the samples it has seen are unknown: resume from a checkpoint of an epoch's end,"
                " or without BalanceCallback"
            )
        if restored["epoch"] != epoch:
            raise ValueError(
                f"the checkpoint continues at batch {num_done} of epoch {epoch}, but its samples are those of epoch"
                f" {restored['epoch']}: resume from a checkpoint that ModelCheckpoint saved during fit"
            )
        if restored["position"] != num_done:
            raise ValueError(
                f"the checkpoint continues at batch {num_done} of epoch {epoch}, but its samples are those of batch"
                f" {restored['position']}: resume from a checkpoint that ModelCheckpoint saved during fit"
            )
        if not self.sampler.plan_for(epoch).steps:
            raise ValueError(
                f"nothing is left of epoch {epoch}: every sample that it has not trained is longer than"
                f" max_tokens={self.factory.settings.max_tokens} and oversize='skip' leaves it out: raise max_tokens,"
                " or resume from a checkpoint of an epoch's end"
            )

    def _tell_changes(self, restored: dict[str, Any]) -> None:
        begin = self.sampler.plan.begin
        changes = self.sampler.changes_since(restored)
        if begin.num_samples and changes:
            rank_zero_info(
                f"BalanceCallback: epoch {self.sampler.epoch} goes on after {begin.num_samples:,} of its samples with "
                + ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changes.items())
            )

    def change_max_tokens(self, max_tokens: int, num_batches: int) -> None:
        """Go on under another token budget after ``num_batches`` of the epoch, where a step ended. A collective call.

        Raises:
            ValueError: on every rank, when the data cannot be planned under this budget; nothing is changed then.
        """
        sampler, num_steps = self.sampler, self.trainer.global_step
        is_over = num_batches >= self.num_batches_of_epoch
        steps_of_epoch = 0 if is_over else sampler.progress(num_batches).num_steps
        on_every_rank(lambda: sampler.set_max_tokens(max_tokens, None if is_over else num_batches))
        self.factory.warn_of_skipped(sampler, sampler.epoch + is_over)
        self._changed_max_tokens = max_tokens
        self._steps_before = sampler.epoch + is_over, num_steps - steps_of_epoch
        self._steps_of_epoch.clear()
        if not is_over:
            _lightning.set_epoch_length(self.trainer, self.num_batches_of_epoch)
            _lightning.restart_train_iterator(self.trainer, num_batches)

    def renew_cost(self) -> bool:
        """Plan by what the run has measured, with ``cost="auto"``; True if that is another cost. A collective call.

        Only where an epoch begins: within one the plan stays.
        """
        if not self.factory.renew_cost():
            return False
        assert self.factory.online is not None
        model = self.factory.online.model
        self.sampler.set_cost(model)
        self._steps_of_epoch.clear()
        rank_zero_info(
            f"BalanceCallback: from epoch {self.trainer.current_epoch} on planned with"
            f" CostModel(intercept={model.intercept:.1f}, alpha={model.alpha:.3e}), fitted to the run's own times"
        )
        return True

    def begin_epoch(self, epoch: int) -> None:
        """Tell sampler and trainer which epoch comes and how long it is."""
        self._length_is_stale = False
        self.sampler.set_epoch(epoch)
        _lightning.set_epoch_length(self.trainer, self.num_batches_of_epoch)
        self._announce_steps()

    def _announce_steps(self) -> None:
        """Make ``trainer.estimated_stepping_batches`` exact although windows have different lengths."""
        if not self.has_fixed_windows:
            self.trainer.accumulate_grad_batches = BetweenWindows(self._count_steps)

    def _count_steps(self, num_epochs: int) -> int:
        """Optimizer steps of the first ``num_epochs`` epochs, after ``limit_train_batches``.

        Steps before a restart are those that were done, under whatever plan.
        """
        first, num_before = self._steps_before or (0, 0)
        num_left = max(num_epochs - first, 0)
        num_counted, num_steps = min(num_left, MAX_EPOCHS_COUNTED), 0
        for epoch in range(first, first + num_counted):
            if epoch not in self._steps_of_epoch:
                self._steps_of_epoch[epoch] = self._num_steps(epoch)
            num_steps += self._steps_of_epoch[epoch]
            if 0 <= self.trainer.max_steps <= num_before + num_steps:
                return num_before + num_steps  # the trainer takes the smaller of the two
        return num_before + (-(-num_steps * num_left // num_counted) if num_counted else 0)

    def _num_steps(self, epoch: int) -> int:
        plan = self.sampler.plan_for(epoch)
        limit = self.trainer.limit_train_batches
        if isinstance(limit, float) and limit == 1:  # all batches; the integer 1 is one batch
            return plan.num_steps
        return plan.locate(self._num_batches(plan) - 1)[0] + 1

    def place(self, batch_index: int) -> Place:
        """Where the epoch's micro-batch ``batch_index``, which begins, stands."""
        self.is_validation_ahead = False
        if self._length_is_stale:
            self.begin_epoch(self.trainer.current_epoch)
        plan = self.sampler.plan
        step, slot = plan.locate(batch_index)
        step_plan = plan.step(step)
        num_left = int(self.trainer.num_training_batches) - (batch_index - slot)
        return Place(plan=step_plan, slot=slot, num_slots=min(step_plan.num_slots, num_left))

    def was_validated(self, num_batches: int) -> bool:
        """Whether a validation after so many batches of the epoch ended before the restart, inside a step."""
        return num_batches <= self.num_validated_before

    @property
    def num_validated_before(self) -> int:
        """Batches of the epoch, perhaps more than are done again, after which validations ended before the restart."""
        epoch, num_validated = self._validated
        return num_validated if epoch == self.sampler.epoch else 0

    def open_window(self, place: Place, batch_index: int) -> bool:
        """Set the trainer's accumulation for this micro-batch; True if gradients have to be zeroed by hand."""
        if self.has_fixed_windows:
            self.trainer.accumulate_grad_batches = self.factory.accumulation
            return False
        role = batch_role(batch_index, place.slot, place.num_slots)
        self.trainer.accumulate_grad_batches = Accumulation(role.accumulation, self._count_steps)
        return role.zero_grad

    def close(self) -> None:
        """Give the trainer back its own accumulation."""
        self.trainer.accumulate_grad_batches = self.factory.accumulation

"""Another token budget for a running job: asked for on rank 0, taken by all ranks after the same step (layer 2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_balance.agreement import from_rank_zero
from lightning_balance.control import RunDescription, begin_run, end_run, take_request
from lightning_balance.fitting import BalancedFit

DEFAULT_EVERY_N_STEPS = 50
"""Where a trainer never logs steps: ``log_every_n_steps=0``."""


class BudgetControl:
    """Watches for requests in the log folder of a run that has a token budget.

    Ranks compare notes once in ``log_every_n_steps`` optimizer steps (in 50 where that is 0), a single process after
    every step. A collective object: every rank makes it, and calls its methods, at the same places.

    Args:
        trainer: the trainer; its first logger's folder is watched, none without a logger.
        fit: the run.
    """

    def __init__(self, trainer: Trainer, fit: BalancedFit) -> None:
        self._fit = fit
        self._every_n_steps = 1 if trainer.world_size == 1 else trainer.log_every_n_steps or DEFAULT_EVERY_N_STEPS  # type: ignore[attr-defined]
        self._requested: int | None = None
        log_dir = trainer.log_dir if trainer.loggers and not trainer.fast_dev_run else None  # type: ignore[attr-defined]
        self._folder = self._watch(str(log_dir)) if log_dir is not None and trainer.is_global_zero else None

    def request(self, max_tokens: int) -> None:
        """Ask for another budget; the request of rank 0 counts."""
        self._requested = max_tokens

    def end_step(self, num_steps: int, num_batches: int) -> None:
        """Look for a request, and follow it. A collective call once in a number of steps.

        Args:
            num_steps: optimizer steps done in the run.
            num_batches: micro-batches per rank done in the epoch, up to the end of a step.
        """
        if num_steps % self._every_n_steps:
            return
        asked = from_rank_zero(self._take)
        before = self._fit.sampler.max_tokens
        if asked is None or asked == before:
            return
        try:
            self._fit.change_max_tokens(asked, num_batches)
        except ValueError as error:
            rank_zero_warn(f"BalanceCallback keeps max_tokens={before}, because {asked} was refused: {error}")
        else:
            rank_zero_info(f"BalanceCallback: max_tokens {before} -> {asked} after optimizer step {num_steps}")
            self._tell(self._description().write)

    def warn_of_late_request(self) -> None:
        """Say which request nobody will follow, as the training has ended."""
        asked, before = self._take(), self._fit.sampler.max_tokens
        if asked is not None and asked != before:
            rank_zero_warn(
                f"BalanceCallback: the request for max_tokens={asked} came too late: the run, which looks for requests"
                f" every {self._every_n_steps} optimizer step(s), ended with max_tokens={before}; give {asked} to the"
                " next run, or ask earlier"
            )

    def close(self) -> None:
        """Say that the run takes no more requests."""
        self._tell(end_run)

    def _tell(self, write: Callable[[Path], None]) -> None:
        """Write into the folder; the run goes on where that is not possible."""
        if self._folder is None:
            return
        try:
            write(self._folder)
        except ValueError as error:
            rank_zero_warn(f"what BalanceCallback says of its run for `set-max-tokens` is out of date: {error}")

    def _take(self) -> int | None:
        asked, self._requested = self._requested, None
        if self._folder is not None:
            try:
                from_file = take_request(self._folder)
            except ValueError as error:
                rank_zero_warn(f"BalanceCallback keeps its token budget: {error}")
            else:
                asked = from_file if from_file is not None else asked
        return asked

    def _watch(self, log_dir: str) -> Path | None:
        """The folder that is watched from now on; None, and why, where that is not possible."""
        if "://" in log_dir:
            rank_zero_info(
                "BalanceCallback: `lightning-balance set-max-tokens` cannot reach this run, as its log folder"
                f" {log_dir} is not one of a local file system"
            )
            return None
        folder = Path(log_dir)
        try:
            begin_run(folder, self._description())
        except ValueError as error:
            rank_zero_warn(
                f"`lightning-balance set-max-tokens` cannot reach this run of BalanceCallback, which goes on: {error}"
            )
            return None
        return folder

    def _description(self) -> RunDescription:
        sampler = self._fit.sampler
        assert sampler.max_tokens is not None
        return RunDescription(
            max_tokens=sampler.max_tokens,
            smallest_max_tokens=sampler.smallest_max_tokens,
            every_n_steps=self._every_n_steps,
        )

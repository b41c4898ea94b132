"""The callback that measures instead of training: what `lightning-balance calibrate` runs in ``Trainer.fit``."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from math import inf
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

import lightning_balance
from lightning_balance._lightning import intercept_train_dataloader
from lightning_balance.agreement import on_every_rank
from lightning_balance.calibration.error import CalibrationError
from lightning_balance.calibration.file import check_is_cost_path, write_cost_file
from lightning_balance.calibration.fit import CostFit, fit_cost
from lightning_balance.calibration.grid import MIN_POINTS, choose_grid
from lightning_balance.calibration.search import MEMORY_IS_NOT_THE_LIMIT, BudgetSearch
from lightning_balance.callback import BalanceCallback
from lightning_balance.checks import check_trainer
from lightning_balance.console import format_value, print_table, say
from lightning_balance.loaders import check_loader
from lightning_balance.probing import _lightning
from lightning_balance.probing.prober import Prober
from lightning_balance.probing.timing import measure_grid
from lightning_balance.sampler_factory import SamplerFactory
from lightning_balance.settings import DEFAULT_MEMORY_FRACTION, BalanceSettings, check_memory
from lightning_balance.validation import check_positive_int


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What `lightning-balance calibrate` measures, and where it writes.

    Args:
        out: the file for the fitted cost model.
        max_tokens: cap on the padded tokens of what is measured; null: the max_tokens of the config's BalanceCallback,
            else batch_size * longest length.
        num_repeats: measured rounds over all sizes.
        memory_fraction: with --find-max-tokens: the share of the memory that may be used; null: that of the config's
            BalanceCallback, else 0.9.
        memory_limit_gib: with --find-max-tokens: memory of a rank in GiB, needed on the CPU; null: that of the config's
            BalanceCallback.

    Raises:
        ValueError: an option is out of its range.
    """

    out: str = "cost.yaml"
    max_tokens: int | None = None
    num_repeats: int = 5
    memory_fraction: float | None = None
    memory_limit_gib: float | None = None

    def __post_init__(self) -> None:
        check_positive_int("calibrate.num_repeats", self.num_repeats)
        if self.max_tokens is not None:
            check_positive_int("calibrate.max_tokens", self.max_tokens)
        check_memory(_first(self.memory_fraction, DEFAULT_MEMORY_FRACTION), self.memory_limit_gib)
        check_is_cost_path("calibrate.out", self.out)


class CalibrationCallback(BalanceCallback):
    """Measures on the real strategy, module and data of a ``fit``, and ends it before its first batch.

    Other callbacks do not run, except those that freeze layers, which changes what backward costs.

    Args:
        settings: options of balancing: where lengths come from, how they are padded.
        options: what to measure.
        find_max_tokens: find the largest token budget instead of fitting the cost.
    """

    def __init__(self, settings: BalanceSettings, options: CalibrateOptions, *, find_max_tokens: bool) -> None:
        super().__init__()
        self.settings = settings
        self._options = options
        self._find_max_tokens = find_max_tokens
        self._loader: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the user's loader when it is requested, and the callbacks that the module brings from running."""
        _lightning.keep_callbacks(trainer, lambda other: other is self or isinstance(other, BaseFinetuning))
        on_every_rank(lambda: check_trainer(trainer, pl_module))
        intercept_train_dataloader(trainer, self._keep)

    def _keep(self, loader: Any) -> DataLoader[Any]:
        self._loader = loader
        return loader  # type: ignore[no-any-return]  # the user's own

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, tell, and stop; the module's hooks around a training have none to speak of."""
        _lightning.silence_training(trainer)
        factory = SamplerFactory(trainer, self.settings)
        loader = on_every_rank(lambda: check_loader(self._loader))
        if self._find_max_tokens:
            self._find(trainer, factory, loader)
        else:
            self._calibrate(trainer, factory, loader)
        trainer.should_stop = True

    def _find(self, trainer: Trainer, factory: SamplerFactory, loader: DataLoader[Any]) -> None:
        max_tokens, search, limit_gib = factory.find_max_tokens(
            loader,
            memory_fraction=_first(self._options.memory_fraction, self.settings.memory_fraction),
            memory_limit_gib=_first(self._options.memory_limit_gib, self.settings.memory_limit_gib),
        )
        if trainer.is_global_zero:
            print_search(search, limit_gib)
            if search.is_limited:
                say(f"largest max_tokens that fits: {max_tokens}")
            else:
                say(f"max_tokens that fits: {max_tokens}; {MEMORY_IS_NOT_THE_LIMIT}")

    def _calibrate(self, trainer: Trainer, factory: SamplerFactory, loader: DataLoader[Any]) -> None:
        micro_batches = factory.micro_batches(loader)
        longest = int(micro_batches.sorted_lengths[-1])
        cap = on_every_rank(lambda: self._cap(factory, loader, longest))
        points = on_every_rank(lambda: choose_grid(micro_batches.sorted_lengths, max_tokens=cap))
        measured, seconds = measure_grid(
            Prober(trainer),
            micro_batches,
            points,
            num_repeats=self._options.num_repeats,
            progress=trainer.is_global_zero,
        )
        if len(measured) < MIN_POINTS:
            raise CalibrationError(
                f"a fit needs at least {MIN_POINTS} sizes of micro-batches, but {len(points) - len(measured)} of"
                f" {len(points)} within {cap} tokens run out of memory: lower the cap (calibrate.max_tokens), clip"
                " samples (max_length), checkpoint activations, or shard the model (FSDP)"
            )
        fit = on_every_rank(lambda: fit_cost(measured, seconds))
        if trainer.is_global_zero:
            print_fit(fit)
            write_cost_file(self._options.out, fit, describe_machine(trainer, factory.num_ranks))
            say(f"wrote {self._options.out}: use it as BalanceCallback(cost={self._options.out!r})")

    def _cap(self, factory: SamplerFactory, loader: DataLoader[Any], longest: int) -> int:
        if self._options.max_tokens is not None:
            return self._options.max_tokens
        if isinstance(self.settings.max_tokens, int):
            return self.settings.max_tokens
        return factory.batch_size(loader) * longest


def _first(given: Any, otherwise: Any) -> Any:
    """What is given, 0 too, else something else."""
    return otherwise if given is None else given


def describe_machine(trainer: Trainer, num_ranks: int) -> dict[str, Any]:
    """What a measurement depends on, as plain values without a date."""
    device = trainer.strategy.root_device
    get_name = getattr(torch.get_device_module(device), "get_device_name", lambda _: platform.machine())
    return {
        "device": get_name(device),
        "device_type": device.type,
        "num_threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "module": type(trainer.lightning_module).__qualname__,
        "versions": {
            "lightning-balance": lightning_balance.__version__,
            "torch": str(torch.__version__),
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
    }


def print_fit(fit: CostFit) -> None:
    """Print every point with measured and fitted seconds, the coefficients, and how good they are."""
    rows = [
        (
            f"{point.num_samples:,}",
            f"{point.padded_length:,}",
            format_value(measured, "seconds"),
            format_value(fitted, "seconds"),
            f"{error:+.1%}",
        )
        for point, measured, fitted, error in zip(
            fit.points, fit.seconds.tolist(), fit.fitted.tolist(), fit.errors.tolist(), strict=True
        )
    ]
    print_table("Forward and backward of a micro-batch", ["n", "L", "measured", "fitted", "error"], rows)
    say(
        f"seconds = {fit.seconds_per_token:.3e} * (n*L + {fit.model.alpha:.3e}*n*L^2 + {fit.model.intercept:.1f})\n"
        f"median error {fit.median_error:.1%}, worst {fit.worst_error:.1%}, R^2 {fit.r_squared:.4f}; repeats of a point"
        f" differ by +-{fit.noise:.1%}"
    )
    warning = fit.warning()
    if warning is not None:
        say(f"warning: {warning}")


def print_search(search: BudgetSearch, limit_gib: float) -> None:
    """Print every budget that was tried."""
    rows = [
        (
            f"{done.max_tokens:,}",
            "out of memory" if done.share == inf else f"{done.share:.1%}",
            "yes" if done.share <= 1 else "no",
        )
        for done in search.tries
    ]
    print_table(f"Peak memory of the worst micro-batches, of {limit_gib:.3g} GiB", ["max_tokens", "peak", "fits"], rows)

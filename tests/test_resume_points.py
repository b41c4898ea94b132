"""A checkpoint may be saved in any hook: the resumed run does exactly what the uninterrupted one still had to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lightning_balance import BalanceCallback
from tests.toys import ScalarModel, equal_samples, loader, trainer

DATA = equal_samples([1, 2, 3, 10, 4, 4, 7, 1, 2, 2, 5, 3])
MODES: dict[str, dict[str, Any]] = {
    "rebalance": {},
    "token budget": {"max_tokens": 12},
    "filled to the budget": {"max_tokens": 20, "step_unit": "tokens"},
    "lookahead": {"max_tokens": 12, "lookahead": 2},
}
HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


@dataclass
class Done:
    """What a run did, each list in order."""

    batches: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Optimizer step, epoch and samples of each micro-batch."""
    rates: list[tuple[int, float]] = field(default_factory=list)
    """Optimizer step and learning rate of each step."""
    validations: list[tuple[int, int]] = field(default_factory=list)
    """Epoch and optimizer steps done, of each validation that ended."""
    epochs: list[int] = field(default_factory=list)
    """Epochs that ended."""
    logged: list[tuple[int, str]] = field(default_factory=list)
    """Step and name of what reached the logger."""


class Recorder(ScalarModel):
    """Records what it did; the learning rate decreases with every step."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.done = Done()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.done.batches.append((self.trainer.global_step, self.trainer.current_epoch, batch["index"].tolist()))
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.done.rates.append((self.trainer.global_step, optimizer.param_groups[0]["lr"]))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.token_losses(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Counts(Callback):
    """Counts validations and epochs that ended, before any other callback sees them end."""

    def __init__(self, done: Done) -> None:
        self.done = done

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.done.validations.append((trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.done.epochs.append(trainer.current_epoch)


class ListLogger(Logger):
    """Keeps the steps at which training metrics were logged."""

    def __init__(self, done: Done) -> None:
        super().__init__()
        self.done = done

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.done.logged += [(int(step or 0), name) for name in metrics if "loss" in name]

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@dataclass
class Point:
    """A checkpoint, and how much had been done when it was saved."""

    hook: str
    path: Path
    num_steps: int
    num_validations: int
    num_epochs: int


class SavesIn(Callback):
    """Saves a checkpoint in every call of some hooks."""

    def __init__(self, hooks: tuple[str, ...], folder: Path, done: Done) -> None:
        self.points: list[Point] = []
        calls: Counter[str] = Counter()
        for hook in hooks:
            setattr(self, hook, self._saver(hook, folder, done, calls))

    def _saver(self, hook: str, folder: Path, done: Done, calls: Counter[str]) -> Callable[..., None]:
        def save(trainer: Any, *_: Any, **__: Any) -> None:
            path = folder / f"{hook}-{calls[hook]}.ckpt"
            calls[hook] += 1
            trainer.save_checkpoint(path)
            self.points.append(Point(hook, path, trainer.global_step, len(done.validations), len(done.epochs)))

        return save


def run(
    mode: str,
    *,
    hooks: tuple[str, ...] = (),
    folder: Path | None = None,
    checkpoint: Path | None = None,
    **arguments: Any,
) -> tuple[Recorder, list[Point], Any]:
    model = Recorder()
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **MODES[mode])
    saver = SavesIn(hooks, folder or Path(), model.done)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0, **arguments}
    used = trainer(
        callbacks=[Counts(model.done), saver, balance], logger=ListLogger(model.done), log_every_n_steps=1, **arguments
    )
    used.fit(model, loader(DATA, 2, shuffle=True), loader(DATA, 6), ckpt_path=checkpoint)
    return model, saver.points, used


TRAINERS: dict[str, dict[str, Any]] = {
    "validation at the end": {},
    "validation in the middle": {"val_check_interval": 0.5},
    "validation every two batches": {"val_check_interval": 2, "accumulate_grad_batches": 3},
    "validation every three batches of the run": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "validation every second epoch": {"check_val_every_n_epoch": 2, "accumulate_grad_batches": 1},
    "no validation": {"limit_val_batches": 0},
    "limit of steps": {"max_epochs": -1, "max_steps": 7, "val_check_interval": 0.5},
    "limit of batches": {"limit_train_batches": 3, "accumulate_grad_batches": 1},
}


@pytest.mark.parametrize("arguments", TRAINERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_of_any_hook_continues(mode: str, arguments: str, tmp_path: Path) -> None:
    whole, points, used = run(mode, hooks=HOOKS, folder=tmp_path, **TRAINERS[arguments])
    hooks = {hook for hook in HOOKS if "validation" not in hook or arguments != "no validation"}
    assert {point.hook for point in points} == hooks
    faults = []
    for point in different(points):
        if point.num_steps == TRAINERS[arguments].get("max_steps"):
            continue  # the run has reached its limit, and does not go on
        resumed, _, resumed_trainer = run(mode, checkpoint=point.path, **TRAINERS[arguments])
        faults += differences(whole.done, point, resumed.done)
        if resumed_trainer.global_step != used.global_step:
            faults.append(f"{point.path.stem}: {resumed_trainer.global_step} steps")
        if resumed.layer.weight.item() != pytest.approx(whole.layer.weight.item(), rel=1e-6):
            faults.append(f"{point.path.stem}: weight")
    assert not faults, "\n".join(faults)


def different(points: list[Point]) -> list[Point]:
    """One of those whose checkpoints say the same, and from which the same has to follow."""
    found = {}
    for point in points:
        checkpoint = torch.load(point.path, weights_only=False)
        loops = {name: state for name, state in checkpoint["loops"]["fit_loop"].items() if "optim_progress" not in name}
        says = loops, checkpoint["lightning_balance"], checkpoint["lr_schedulers"], checkpoint["state_dict"]
        found.setdefault(repr((says, point.num_steps, point.num_validations, point.num_epochs)), point)
    return list(found.values())


def differences(whole: Done, point: Point, resumed: Done) -> list[str]:
    expected = {
        "batches": [batch for batch in whole.batches if batch[0] >= point.num_steps],
        "rates": [rate for rate in whole.rates if rate[0] >= point.num_steps],
        "validations": whole.validations[point.num_validations :],
        "epochs": whole.epochs[point.num_epochs :],
    }
    faults = [
        f"{point.path.stem}: {name} are {getattr(resumed, name)}, not {values}"
        for name, values in expected.items()
        if getattr(resumed, name) != values
    ]
    logged = whole.logged[len(whole.logged) - len(resumed.logged) :]
    if resumed.logged != logged:
        faults.append(f"{point.path.stem}: logged {resumed.logged}, not {logged}")
    return faults

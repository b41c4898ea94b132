"""A checkpoint may be saved in any hook: the resumed run does exactly what the uninterrupted one still had to do."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger

from lightning_balance import BalanceCallback
from tests.stopping import StopError
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

    def on_validation_end(self, trainer: Any, pl_module: Recorder) -> None:
        pl_module.done.validations.append((trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, pl_module: Recorder) -> None:
        pl_module.done.epochs.append(trainer.current_epoch)


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

    def __init__(self, folder: Path, *hooks: str) -> None:
        self.folder = folder
        self.points: list[Point] = []
        for hook in hooks:
            setattr(self, hook, lambda trainer, *_, hook=hook: self.save(trainer, hook))

    def save(self, trainer: Any, hook: str) -> None:
        calls = sum(point.hook == hook for point in self.points)
        path = self.folder / f"{hook}-{calls}.ckpt"
        trainer.save_checkpoint(path)
        self.points.append(point_of(trainer, path, hook))


def point_of(trainer: Any, path: Path, hook: str) -> Point:
    done = trainer.lightning_module.done
    return Point(hook, path, trainer.global_step, len(done.validations), len(done.epochs))


def run(
    mode: str,
    *callbacks: Callback,
    checkpoint: Path | None = None,
    is_balance_last: bool = True,
    **arguments: Any,
) -> tuple[Recorder, Trainer]:
    model = Recorder()
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **MODES[mode])
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0, **arguments}
    order = [*callbacks, balance] if is_balance_last else [balance, *callbacks]
    arguments |= {"logger": ListLogger(model.done), "log_every_n_steps": 1}
    used = trainer(callbacks=[Counts(), *order], **arguments)
    with contextlib.suppress(StopError):
        used.fit(model, loader(DATA, 2, shuffle=True), loader(DATA, 6), ckpt_path=checkpoint)
    return model, used


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


CASES = [(mode, arguments) for mode in ("rebalance", "token budget") for arguments in TRAINERS] + [
    (mode, "validation in the middle") for mode in ("filled to the budget", "lookahead")
]


@pytest.mark.parametrize(("mode", "arguments"), CASES)
def test_a_checkpoint_of_any_hook_continues(mode: str, arguments: str, tmp_path: Path) -> None:
    saves = SavesIn(tmp_path, *HOOKS)
    whole, used = run(mode, saves, **TRAINERS[arguments])
    hooks = {hook for hook in HOOKS if "validation" not in hook or arguments != "no validation"}
    assert {point.hook for point in saves.points} == hooks
    faults = []
    for point in different(saves.points):
        if point.num_steps != TRAINERS[arguments].get("max_steps"):  # else the run has reached its limit
            faults += faults_from(point, mode, whole, used, **TRAINERS[arguments])
    assert not faults, "\n".join(faults)


def faults_from(point: Point, mode: str, whole: Recorder, used: Trainer, **arguments: Any) -> list[str]:
    """What a run from a checkpoint does otherwise than the whole one."""
    resumed, its_trainer = run(mode, checkpoint=point.path, **arguments)
    faults = differences(whole.done, point, resumed.done)
    if its_trainer.global_step != used.global_step:
        faults.append(f"{point.path.stem}: {its_trainer.global_step} steps")
    if resumed.layer.weight.item() != pytest.approx(whole.layer.weight.item(), rel=1e-6):
        faults.append(f"{point.path.stem}: weight")
    return faults


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


# --- who saves, and when ----------------------------------------------------------------------------------------------


class StopIn(Callback):
    """Raises in the n-th call of a hook."""

    def __init__(self, hook: str, call: int) -> None:
        self.num_left = call
        setattr(self, hook, self.stop)

    def stop(self, *_: Any) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise StopError


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in ("on_train_end", "on_fit_end")])
@pytest.mark.parametrize("mode", ["rebalance", "token budget"])
def test_a_checkpoint_of_an_exception_continues(mode: str, hook: str, tmp_path: Path) -> None:
    arguments = {"val_check_interval": 0.5}
    whole, used = run(mode, **arguments)
    faults = []
    for call in (0, 1, 4):
        saves = SavesIn(tmp_path / str(call), "on_exception")
        run(mode, StopIn(hook, call), saves, **arguments)
        if saves.points:  # an epoch's hooks are called twice only
            faults += faults_from(saves.points[0], mode, whole, used, **arguments)
    assert not faults, "\n".join(faults)


class Keeps(ModelCheckpoint):
    """Notes how much had been done when it saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, save_top_k=-1, filename="{epoch}-{step}", **kwargs)
        self.points: list[Point] = []

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.points.append(point_of(trainer, Path(filepath), Path(filepath).stem))


SAVERS: dict[str, dict[str, Any]] = {
    "every step": {"every_n_train_steps": 1},
    "by the clock": {"train_time_interval": timedelta(microseconds=1)},
    "after validation": {"save_on_train_epoch_end": False},
    "after validation, by a metric": {"monitor": "val_loss"},
    "at an epoch's end": {"save_on_train_epoch_end": True},
}


@pytest.mark.parametrize("is_first", [True, False], ids=["before the callback", "after the callback"])
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("mode", ["rebalance", "token budget"])
def test_every_model_checkpoint_continues(mode: str, saver: str, is_first: bool, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"val_check_interval": 0.5, "enable_checkpointing": True}
    whole, used = run(mode, val_check_interval=0.5)
    keeps = Keeps(tmp_path, **SAVERS[saver])
    run(mode, keeps, is_balance_last=is_first, **arguments)
    assert len(keeps.points) >= 2
    faults = [
        fault for point in keeps.points for fault in faults_from(point, mode, whole, used, val_check_interval=0.5)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("saver", ["ModelCheckpoint", "OnExceptionCheckpoint"])
@pytest.mark.parametrize("mode", ["rebalance", "token budget"])
def test_a_run_that_was_told_to_terminate_continues(mode: str, saver: str, tmp_path: Path) -> None:
    """SIGTERM, as schedulers send it before SIGKILL: Lightning finishes the batch, raises, and saves."""
    whole, used = run(mode)
    for batch in (1, 2, 5, 6):
        folder = tmp_path / str(batch)
        if saver == "ModelCheckpoint":
            callback: Any = ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=1000, filename="saved")
        else:
            callback = OnExceptionCheckpoint(folder, filename="saved")
        terminates = Terminates(batch)
        with pytest.raises(SystemExit):
            run(mode, terminates, callback, enable_checkpointing=True)
        assert terminates.point is not None
        point = replace(terminates.point, path=folder / "saved.ckpt")
        faults = faults_from(point, mode, whole, used)
        assert not faults, "\n".join(faults)


class Terminates(Callback):
    """Sends SIGTERM to the run, and notes how much had been done when it ends."""

    point: Point | None = None

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            signal.raise_signal(signal.SIGTERM)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.point = point_of(trainer, Path(), "SIGTERM")


@pytest.mark.parametrize("after", [mode for mode in MODES if mode != "rebalance"])
def test_an_epoch_of_which_only_the_end_is_left_ends_under_other_options(after: str, tmp_path: Path) -> None:
    """Nothing of it can be planned anew; its validation and its end still come, and the next epoch is whole."""
    saves = SavesIn(tmp_path, "on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end")
    whole, _ = run("rebalance", saves)
    end = [point.hook for point in saves.points].index("on_train_epoch_end") + 1
    points = saves.points[end - 4 : end]  # the last batch's end, the validation's beginning and end, the epoch's end
    assert {point.num_steps for point in points} == {whole.done.validations[0][1]}
    for point in points:
        resumed, _ = run(after, checkpoint=point.path)
        assert [epoch for epoch, _ in resumed.done.validations] == [0, 1][point.num_validations :]
        assert resumed.done.epochs == [0, 1][point.num_epochs :]
        assert {epoch for _, epoch, _ in resumed.done.batches} == {1}
        assert {sample for _, _, samples in resumed.done.batches for sample in samples} == set(range(len(DATA)))

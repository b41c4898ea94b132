"""A run that stops at any micro-batch and continues gives what the uninterrupted run gives."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, TQDMProgressBar

from lightning_balance import BalanceCallback
from tests.distributed import run_ranks
from tests.stopping import SavesAndRaises, StopAfter, StopError
from tests.toys import ScalarModel, equal_samples, loader, trainer

DATA = equal_samples([1, 2, 3, 10, 4, 4, 7, 1, 2, 2, 5, 3])
MODES: dict[str, dict[str, Any]] = {
    "rebalance": {},
    "token budget": {"max_tokens": 12},
    "filled to the budget": {"max_tokens": 20, "step_unit": "tokens"},
    "lookahead": {"lookahead": 2},
}


class AsksForSteps(ScalarModel):
    """Makes Lightning build the loaders before the loop's progress is restored (PL#20550)."""

    def configure_optimizers(self) -> Any:
        total_steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(
    mode: str,
    accumulate: int,
    *callbacks: Callback,
    place: tuple[str, int] = ("single", 1),
    model: ScalarModel | None = None,
    checkpoint: Path | None = None,
    max_epochs: int = 3,
    loader_arguments: dict[str, Any] | None = None,
    **arguments: Any,
) -> ScalarModel:
    model = model or ScalarModel(lr=0.01)
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **MODES[mode])
    used = trainer(
        *place, max_epochs=max_epochs, accumulate_grad_batches=accumulate, callbacks=[balance, *callbacks], **arguments
    )
    train = loader(DATA, 2, shuffle=True, **(loader_arguments or {}))
    used.fit(model, train, loader(DATA, 6), ckpt_path=checkpoint)
    model.num_steps = used.global_step  # type: ignore[assignment]
    model.weight = gather(model)  # type: ignore[assignment]
    return model


def gather(model: ScalarModel) -> float:
    weight = model.layer.weight
    return float(weight.full_tensor() if hasattr(weight, "full_tensor") else weight)  # type: ignore[operator]


def check_stop_and_continue(folder: Path, num_batches: int, mode: str, accumulate: int, **arguments: Any) -> None:
    whole = run(mode, accumulate, **arguments)
    path = folder / f"{mode}-{accumulate}-{num_batches}.ckpt"
    stopped = run(mode, accumulate, StopAfter(num_batches, path), **arguments)
    assert len(stopped.served) == num_batches
    resumed = run(mode, accumulate, checkpoint=path, **arguments)
    num_kept = len(whole.served) - len(resumed.served)
    case = (mode, accumulate, num_batches, arguments)
    assert resumed.served == whole.served[num_kept:], case
    assert num_batches - accumulate - 8 < num_kept <= num_batches, case  # at the window's beginning, and not before
    assert resumed.num_steps == whole.num_steps, case
    assert resumed.weight == pytest.approx(whole.weight, rel=1e-6), case


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_continues_at_every_offset(mode: str, accumulate: int, tmp_path: Path) -> None:
    for num_batches in (1, 2, 3, 4, 5, 6, 7, 8, 12):
        if num_batches <= len(run(mode, accumulate).served):
            check_stop_and_continue(tmp_path, num_batches, mode, accumulate)


@pytest.mark.parametrize("loader_arguments", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_workers_do_not_change_where_a_run_continues(loader_arguments: dict[str, Any], tmp_path: Path) -> None:
    for num_batches in (3, 7):
        check_stop_and_continue(tmp_path, num_batches, "token budget", 2, loader_arguments=loader_arguments)


def check_ranks(strategy: str, folder: Path) -> None:
    for mode, num_batches in (("rebalance", 3), ("token budget", 2), ("token budget", 5)):
        check_stop_and_continue(folder, num_batches, mode, 2, place=(strategy, 2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_continue_as_one_does(strategy: str, tmp_path: Path) -> None:
    run_ranks(check_ranks, 2, strategy, tmp_path, timeout_s=240)


@pytest.mark.parametrize("num_batches", [2, 4, 6, 9])
def test_a_schedule_that_asks_for_steps_changes_nothing(num_batches: int, tmp_path: Path) -> None:
    whole = run("token budget", 1, model=AsksForSteps(lr=0.01))
    path = tmp_path / "stopped.ckpt"
    run("token budget", 1, StopAfter(num_batches, path), model=AsksForSteps(lr=0.01))
    resumed = run("token budget", 1, checkpoint=path, model=AsksForSteps(lr=0.01))
    assert resumed.served == whole.served[-len(resumed.served) :]
    assert resumed.weight == pytest.approx(whole.weight)


@pytest.mark.filterwarnings("error:.*compute.*method of metric")  # no figures of an epoch without steps
@pytest.mark.parametrize("mode", MODES)
def test_a_run_continues_after_the_end_of_an_epoch(mode: str, tmp_path: Path) -> None:
    """Saved at validation's end and at the epoch's end: nothing is lost or trained twice (verl#7401)."""
    whole = run(mode, 2)
    for at_epoch_end in (True, False):
        folder = tmp_path / str(at_epoch_end)
        saver = ModelCheckpoint(
            folder, save_top_k=-1, filename="{epoch}", every_n_epochs=1, save_on_train_epoch_end=at_epoch_end
        )
        run(mode, 2, saver, max_epochs=1, enable_checkpointing=True)
        resumed = run(mode, 2, checkpoint=folder / "epoch=0.ckpt")
        assert resumed.served == whole.served[-len(resumed.served) :]
        assert set(resumed.epochs) == {1, 2}
        assert resumed.num_steps == whole.num_steps
        assert resumed.num_validations == 2
        assert resumed.weight == pytest.approx(whole.weight)


def test_a_run_continues_twice_in_one_epoch(tmp_path: Path) -> None:
    whole = run("token budget", 2, max_epochs=1)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    one = run("token budget", 2, StopAfter(2, first), max_epochs=1)
    two = run("token budget", 2, StopAfter(4, second), checkpoint=first, max_epochs=1)
    three = run("token budget", 2, checkpoint=second, max_epochs=1)
    assert one.served + two.served + three.served == whole.served
    assert three.weight == pytest.approx(whole.weight)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 4}, "saved with seed=3, but this sampler has seed=4"),
        ({"max_length": 5}, "saved with lengths=.*, but this sampler has lengths="),
    ],
)
def test_what_cannot_continue_is_refused_with_both_values(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "stopped.ckpt"
    run("token budget", 1, StopAfter(3, path))
    options = {"max_tokens": 12, "seed": 3, **change}
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, **options)
    with pytest.raises(ValueError, match=sentence):
        trainer(callbacks=[balance], max_epochs=3).fit(
            ScalarModel(), loader(DATA, 2, shuffle=True), loader(DATA, 6), ckpt_path=path
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_steps", [1, 2, 4])
def test_a_run_that_ended_by_max_steps_continues_inside_its_epoch(mode: str, max_steps: int, tmp_path: Path) -> None:
    """Lightning counts the epoch as finished; the samples that were not trained would be lost."""
    whole = run(mode, 2)
    path = tmp_path / "ended.ckpt"
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **MODES[mode])
    ended = trainer(max_epochs=3, max_steps=max_steps, accumulate_grad_batches=2, callbacks=[balance])
    model = ScalarModel(lr=0.01)
    ended.fit(model, loader(DATA, 2, shuffle=True), loader(DATA, 6))
    ended.save_checkpoint(path)
    resumed = run(mode, 2, checkpoint=path)
    assert model.served + resumed.served == whole.served
    assert resumed.num_steps == whole.num_steps
    assert resumed.weight == pytest.approx(whole.weight)


def test_other_settings_may_follow_after_an_epochs_end(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True, every_n_epochs=1)
    run("token budget", 2, saver, max_epochs=1, enable_checkpointing=True)
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, max_tokens=10)
    model = ScalarModel()
    trainer(callbacks=[balance], max_epochs=2).fit(
        model, loader(DATA, 2, shuffle=True), loader(DATA, 6), ckpt_path=tmp_path / "epoch=0.ckpt"
    )
    assert sorted(index for micro_batch in model.served for index in micro_batch) == list(range(len(DATA)))
    assert set(model.epochs) == {1}


def save_on_two_ranks(folder: Path) -> None:
    saver = ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True, every_n_epochs=1)
    run("token budget", 2, saver, place=("ddp", 2), max_epochs=1, enable_checkpointing=True)


def test_another_number_of_ranks_may_follow_after_an_epochs_end(tmp_path: Path) -> None:
    run_ranks(save_on_two_ranks, 2, tmp_path)
    resumed = run("token budget", 2, checkpoint=tmp_path / "epoch=0.ckpt", max_epochs=2)
    assert sorted(index for micro_batch in resumed.served for index in micro_batch) == list(range(len(DATA)))
    assert set(resumed.epochs) == {1}


@pytest.mark.parametrize("mode", ["rebalance", "token budget"])
def test_a_run_that_ended_by_max_steps_at_an_epochs_end_trains_the_next_one(mode: str, tmp_path: Path) -> None:
    steps_per_epoch = run(mode, 1, max_epochs=1).num_steps
    whole = run(mode, 1, max_epochs=-1, max_steps=steps_per_epoch + 3)
    path = tmp_path / "ended.ckpt"
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **MODES[mode])
    ended = trainer(max_epochs=-1, max_steps=steps_per_epoch, callbacks=[balance])
    model = ScalarModel(lr=0.01)
    ended.fit(model, loader(DATA, 2, shuffle=True), loader(DATA, 6))
    ended.save_checkpoint(path)
    resumed = run(mode, 1, checkpoint=path, max_epochs=-1, max_steps=steps_per_epoch + 3)
    assert model.served + resumed.served == whole.served
    assert set(resumed.epochs) == {1}
    assert resumed.weight == pytest.approx(whole.weight)


class SavesInTheMiddleOf(Callback):
    """Saves while a micro-batch of the run is under way, as a handler of an exception would."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("mode", ["rebalance", "token budget"])
def test_a_checkpoint_inside_the_last_micro_batch_keeps_the_last_step(mode: str, tmp_path: Path) -> None:
    whole = run(mode, 2)
    last = whole.epochs.count(0) - 1
    path = tmp_path / "inside.ckpt"
    run(mode, 2, SavesInTheMiddleOf(last, path))
    resumed = run(mode, 2, checkpoint=path)
    assert resumed.served == whole.served[-len(resumed.served) :]
    assert last - 4 < len(whole.served) - len(resumed.served) <= last
    assert resumed.num_steps == whole.num_steps
    assert resumed.weight == pytest.approx(whole.weight)


class Validated(ScalarModel):
    """Notes after how many batches of all epochs each validation ended; its loader may fail once."""

    def __init__(self, loader_fails: bool = False) -> None:
        super().__init__(lr=0.01)
        self.after: list[int] = []
        self.loader_fails = loader_fails

    def val_dataloader(self) -> Any:
        if self.loader_fails:
            raise StopError
        return loader(DATA, 6)

    def on_validation_end(self) -> None:
        self.after.append(self.trainer.fit_loop.total_batch_idx)


def validate(*callbacks: Callback, checkpoint: Path | None = None, fails: bool = False, **arguments: Any) -> Validated:
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3)
    model = Validated(fails)
    used = trainer(callbacks=[balance, *callbacks], num_sanity_val_steps=0, **{"max_epochs": 2, **arguments})
    with contextlib.suppress(StopError):
        used.fit(model, loader(DATA, 2, shuffle=True), ckpt_path=checkpoint)
    return model


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start", "on_validation_batch_end"])
@pytest.mark.parametrize("second", ["on_train_start", "loader"])
def test_a_validation_that_is_due_is_not_lost_by_two_restarts(hook: str, second: str, tmp_path: Path) -> None:
    first_path, second_path = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    whole = validate()
    validate(SavesAndRaises(hook, first_path, 6 if hook == "on_train_batch_end" else 1))
    if second == "loader":
        saver = OnExceptionCheckpoint(tmp_path, filename="second")
        validate(saver, checkpoint=first_path, fails=True, enable_checkpointing=True)
    else:
        validate(SavesAndRaises(second, second_path), checkpoint=first_path)
    assert validate(checkpoint=second_path).after == whole.after == [5, 11]


def test_a_validation_that_ended_inside_a_window_is_not_repeated_by_two_restarts(tmp_path: Path) -> None:
    arguments = {"accumulate_grad_batches": 3, "val_check_interval": 1, "max_epochs": 1}
    first_path, second_path = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    whole = validate(**arguments)
    first = validate(SavesAndRaises("on_before_backward", first_path, 5), **arguments)
    second = validate(SavesAndRaises("on_before_backward", second_path), checkpoint=first_path, **arguments)
    third = validate(checkpoint=second_path, **arguments)
    assert first.after + second.after + third.after == whole.after == [0, 1, 2, 3, 4, 5]


class Totals(TQDMProgressBar):
    """Notes the bar's place and total after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.seen.append((self.train_progress_bar.n, self.train_progress_bar.total))


def test_the_progress_bar_of_a_continued_epoch_has_its_total(tmp_path: Path) -> None:
    path = tmp_path / "stopped.ckpt"
    run("rebalance", 1, StopAfter(2, path))
    bar = Totals()
    run("rebalance", 1, bar, checkpoint=path, max_epochs=2, enable_progress_bar=True)
    assert bar.seen == [(place, 6) for place in (3, 4, 5, 6, 1, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"position": 1}, "continues at batch 2 of epoch 0, but its samples are those of batch 1"),
        ({"epoch": 7}, "continues at batch 2 of epoch 0, but its samples are those of epoch 7"),
        (None, "the state must be a dictionary that state_dict made, got a str"),
    ],
)
def test_a_checkpoint_whose_state_was_changed_is_refused(
    change: dict[str, Any] | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "stopped.ckpt"
    run("rebalance", 1, StopAfter(2, path))
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["lightning_balance"]
    checkpoint["lightning_balance"] = "hello" if change is None else {**state, **change}
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=sentence):
        run("rebalance", 1, checkpoint=path)

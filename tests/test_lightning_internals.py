"""Each Lightning internal that the package uses still means what it meant; a failure here says which one moved."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.utils.data import DataLoader

import lightning_balance
from lightning_balance import _lightning
from lightning_balance.probing import _lightning as of_probing
from tests.distributed import run_ranks
from tests.toys import ScalarModel, equal_samples, loader, trainer


class At(Callback):
    """Calls functions in hooks and keeps what they return."""

    def __init__(self, **hooks: Any) -> None:
        self.found: dict[str, list[Any]] = {name: [] for name in hooks}
        for name, function in hooks.items():
            setattr(self, name, self._recorder(name, function))

    def _recorder(self, name: str, function: Any) -> Any:
        return lambda trainer, *arguments, **named: self.found[name].append(function(trainer))


def fit(*callbacks: Callback, model: ScalarModel | None = None, num_samples: int = 6, **arguments: Any) -> ScalarModel:
    model = model or ScalarModel()
    own = {"limit_val_batches": 0, **arguments}
    ckpt_path = own.pop("ckpt_path", None)
    trainer(callbacks=list(callbacks), **own).fit(
        model, loader(equal_samples([1] * num_samples), 1), ckpt_path=ckpt_path
    )
    return model


# --- when ranks wait --------------------------------------------------------------------------------------------------


def run_with_broadcasts_watched() -> tuple[bool, int, int, bool]:
    calls: list[str] = []

    def watch(run: Trainer) -> None:
        _lightning.around_broadcasts(run, lambda: calls.append("begin"), lambda: calls.append("end"))

    seen = fit(At(on_train_start=watch), strategy="ddp", num_ranks=2, accumulate_grad_batches=2)
    assert calls == ["begin", "end"] * (len(calls) // 2)
    waits = _lightning.waits_every_micro_batch(seen.trainer)
    _lightning.release_broadcasts(seen.trainer)
    return waits, len(calls) // 2, len(seen.served), _lightning.BROADCAST in vars(seen.trainer.fit_loop.epoch_loop)


def test_the_loop_of_several_ranks_waits_before_every_batch_also_inside_a_window() -> None:
    for waits, num_broadcasts, num_batches, is_watched in run_ranks(run_with_broadcasts_watched, 2):
        assert waits, "the loop does not ask all ranks any more: sync='auto' is 'step' under DDP again"
        assert num_broadcasts == num_batches == 3
        assert not is_watched


def test_one_rank_waits_for_nobody() -> None:
    assert not _lightning.waits_every_micro_batch(trainer())


# --- the training loader ----------------------------------------------------------------------------------------------


class Asks(ScalarModel):
    """Asks for the number of steps before training, which builds the loaders early."""

    def configure_optimizers(self) -> Any:
        self.asked = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(("model", "arguments", "num_requests"), [
    (ScalarModel, {}, 1),
    (Asks, {}, 1),
    (ScalarModel, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}, 3),
])  # fmt: skip
def test_the_fit_loop_requests_its_loader_from_the_data_source(
    model: type[ScalarModel], arguments: dict[str, Any], num_requests: int
) -> None:
    requested: list[Any] = []

    def transform(original: Any) -> DataLoader[Any]:
        requested.append(original)
        return loader(equal_samples([1] * 2), 1)

    seen = fit(
        At(setup=lambda trainer: _lightning.intercept_train_dataloader(trainer, transform)), model=model(), **arguments
    )
    assert len(requested) == num_requests, "fit_loop._data_source.dataloader() is not what the loop calls any more"
    assert all(isinstance(original, DataLoader) and len(original) == 6 for original in requested)
    assert len(seen.served) == 2 * arguments.get("max_epochs", 1)


def test_a_released_data_source_is_the_trainers_own_again() -> None:
    run = trainer()
    _lightning.release_train_dataloader(run)  # nothing to undo is no error
    _lightning.intercept_train_dataloader(run, lambda original: pytest.fail("was released"))
    _lightning.accept_short_epochs(run)
    _lightning.release_train_dataloader(run)
    model = ScalarModel()
    run.fit(model, loader(equal_samples([1] * 3), 1))
    assert len(model.served) == 3


def test_a_forgotten_loader_is_requested_again() -> None:
    requested: list[Any] = []

    def transform(original: Any) -> DataLoader[Any]:
        requested.append(original)
        return original

    class Forgets(Asks):
        def on_fit_start(self) -> None:  # after configure_optimizers
            _lightning.forget_train_dataloader(self.trainer)

    fit(At(setup=lambda trainer: _lightning.intercept_train_dataloader(trainer, transform)), model=Forgets())
    assert len(requested) == 2, "fit_loop._combined_loader = None does not make setup_data() build the loader again"


# --- the epoch's length -----------------------------------------------------------------------------------------------


class CountsBatches(ScalarModel):
    def on_train_epoch_start(self) -> None:
        # In place of a loader whose length changes: 2, then 4 of its 6 batches.
        _lightning.set_epoch_length(self.trainer, 2 + 2 * self.trainer.current_epoch)


def test_the_length_set_at_an_epochs_start_is_the_one_that_runs_and_validates() -> None:
    model = CountsBatches()
    trainer(max_epochs=3, num_sanity_val_steps=0).fit(
        model, loader(equal_samples([1] * 6), 1), loader(equal_samples([1]), 1)
    )
    assert [model.epochs.count(epoch) for epoch in range(3)] == [2, 4, 6], "max_batches or the loader's limits moved"
    assert model.num_validations == 3, "val_check_batch moved"


@pytest.mark.parametrize(("interval", "validations"), [(0.5, 2 + 2 + 2), (1.0, 3), (2, 1 + 2 + 3)])
def test_the_validation_interval_follows_the_length(interval: float, validations: int) -> None:
    model = CountsBatches()
    trainer(max_epochs=3, num_sanity_val_steps=0, val_check_interval=interval).fit(
        model, loader(equal_samples([1] * 6), 1), loader(equal_samples([1]), 1)
    )
    assert model.num_validations == validations


def test_time_based_validation_is_left_alone() -> None:
    model = CountsBatches()
    trainer(max_epochs=1, num_sanity_val_steps=0, val_check_interval="01:00:00:00").fit(
        model, loader(equal_samples([1] * 6), 1), loader(equal_samples([1]), 1)
    )
    assert model.trainer.val_check_batch is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("limit", "expected"), [(1.0, 10), (0.25, 2), (3, 3), (30, 10), (0, 0), (0.0, 0)])
def test_limits_are_those_of_the_loop(limit: float, expected: int) -> None:
    assert _lightning.limited_num_batches(trainer(limit_train_batches=limit), 10) == expected
    if expected:
        assert len(fit(num_samples=10, limit_train_batches=limit).served) == expected


class OtherLoaders(ScalarModel):
    """Loaders of 3, 5 and 2 batches in epochs 0, 1 and 2."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples([1] * (3, 5, 2)[self.trainer.current_epoch]), 1)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples([1]), 1)


SHORT_EPOCHS = [
    ({"val_check_interval": 3}, "must be less than or equal to the number of the training batches", [3, 5, 2], 3),
    ({"limit_train_batches": 0.4}, "0.4 \\* 2 < 1", [1, 2, 1], 3),
    ({"val_check_interval": 3, "check_val_every_n_epoch": None}, None, [3, 5, 2], 3),
    ({"val_check_interval": "01:00:00:00"}, None, [3, 5, 2], 0),
]


@pytest.mark.parametrize(("arguments", "refusal", "lengths", "num_validations"), SHORT_EPOCHS)
def test_epochs_after_the_first_may_be_short(
    arguments: dict[str, Any], refusal: str | None, lengths: list[int], num_validations: int
) -> None:
    def fit(*callbacks: Callback) -> OtherLoaders:
        model = OtherLoaders()
        reloads = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}
        trainer(callbacks=list(callbacks), **reloads, **arguments).fit(model)
        return model

    if refusal:
        with pytest.raises(Exception, match=refusal):  # else accept_short_epochs is not needed any more
            fit()
    model = fit(At(setup=_lightning.accept_short_epochs))
    assert [model.epochs.count(epoch) for epoch in range(3)] == lengths
    assert model.num_validations == num_validations
    if "01:00:00:00" not in arguments.values():  # the trainer keeps that elsewhere
        assert {name: getattr(model.trainer, name) for name in arguments} == arguments


def test_the_first_epoch_of_a_new_run_is_checked_as_ever() -> None:
    run = trainer(callbacks=[At(setup=_lightning.accept_short_epochs)], val_check_interval=4)
    with pytest.raises(ValueError, match=r"`val_check_interval` \(4\) must be less than or equal"):
        run.fit(OtherLoaders())


# --- progress ---------------------------------------------------------------------------------------------------------


def test_the_iterator_can_be_restarted_before_the_first_batch() -> None:
    class Order(list[int]):
        """A sampler that serves what it holds when it is asked."""

    order = Order([0, 1, 2])
    data = equal_samples([1] * 6)
    model = ScalarModel()

    def change(run: Trainer) -> None:
        order[:] = [5, 4, 3]
        _lightning.restart_train_iterator(run)

    run = trainer(callbacks=[At(on_train_start=change)], limit_val_batches=0)
    run.fit(
        model,
        DataLoader(data, batch_size=1, sampler=order, collate_fn=loader(data, 1).collate_fn, num_workers=1),
    )
    assert model.served == [[5], [4], [3]], "iter(fit_loop._data_fetcher) does not make a new iterator any more"


def test_batches_done_count_the_epochs_backwards() -> None:
    before = At(
        on_train_batch_start=_lightning.num_batches_done,
        on_before_backward=_lightning.num_batches_done,
        on_train_batch_end=_lightning.num_batches_done,
    )
    fit(before, num_samples=3, max_epochs=2)
    assert before.found["on_train_batch_start"][:3] == [0, 1, 2]
    assert before.found["on_before_backward"][3:] == [0, 1, 2]
    assert before.found["on_train_batch_end"] == [1, 2, 3, 1, 2, 3], "batch_progress.current.processed moved"


def test_progress_says_what_is_done_of_epochs_and_batches() -> None:
    reads = {
        "begun": lambda trainer: _lightning.has_begun(trainer, trainer.current_epoch),
        "processed": lambda trainer: _lightning.has_processed(trainer, trainer.current_epoch),
        "ending": _lightning.is_ending_batch,
        "steps": _lightning.num_logged_steps,
        "batches": _lightning.num_batches_in_all,
    }
    hooks = ("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
    at = At(**{hook: lambda trainer: {name: read(trainer) for name, read in reads.items()} for hook in hooks})
    fit(at, num_samples=2, max_epochs=2)
    second_epoch = {hook: at.found[hook][len(at.found[hook]) // 2] for hook in hooks}
    begun = {"begun": True, "processed": False, "ending": False, "steps": 2, "batches": 2}
    assert second_epoch == {
        "on_train_epoch_start": {**begun, "begun": False},
        "on_train_batch_start": begun,
        "on_train_batch_end": {**begun, "ending": True, "batches": 3},
        "on_train_epoch_end": {**begun, "processed": True, "steps": 4, "batches": 4},
    }, "fit_loop.epoch_progress, epoch_loop.batch_progress or _batches_that_stepped moved"


def test_the_pass_for_batch_norm_statistics_says_that_it_skips_backward() -> None:
    class Normalized(ScalarModel):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    starts = At(on_train_batch_start=_lightning.skips_backward)
    fit(averaging, starts, model=Normalized(), num_samples=2, max_epochs=2)
    assert starts.found["on_train_batch_start"] == [False] * 4 + [True] * 2, "fit_loop._skip_backward moved"


class HookOrder(Callback):
    """Names of hooks in the order of their calls."""

    def __init__(self) -> None:
        self.order: list[str] = []
        for name in ("train_epoch_start", "train_batch_start", "validation_start", "train_epoch_end"):
            setattr(self, f"on_{name}", self._recorder(name))

    def _recorder(self, name: str) -> Any:
        return lambda trainer, *arguments: self.order.append(name)


def validated_fit(*callbacks: Callback, **arguments: Any) -> None:
    data = loader(equal_samples([1] * 6), 1)
    own = {"val_check_interval": 3, "num_sanity_val_steps": 0, **arguments}
    ckpt_path = own.pop("ckpt_path", None)
    trainer(callbacks=list(callbacks), **own).fit(ScalarModel(), data, data, ckpt_path=ckpt_path)


Place = _lightning.LoopPlace
EPOCH_1 = ["train_epoch_start", *["train_batch_start"] * 3, "validation_start"]


@pytest.mark.parametrize(("place", "order"), [
    (Place(epoch=0, num_batches=2, num_undone=1, num_logged_steps=2), ["train_batch_start", "validation_start"]),
    (Place(epoch=0, num_batches=3, is_validation_due=True, num_logged_steps=3), ["validation_start"]),
    (
        Place(epoch=0, num_batches=3, is_validation_due=True, is_validated=True, num_logged_steps=3),
        [*["train_batch_start"] * 3, "validation_start", "train_epoch_end"],
    ),
    (
        Place(epoch=0, num_batches=6, is_last=True, is_validation_due=True, num_logged_steps=6),
        ["validation_start", "train_epoch_end", *EPOCH_1],
    ),
    (
        Place(epoch=0, num_batches=6, is_last=True, is_validation_due=True, is_validated=True, num_logged_steps=6),
        ["train_epoch_end", *EPOCH_1],
    ),
    (Place(epoch=1, num_logged_steps=6), EPOCH_1),
], ids=["rewound", "before validation", "after it", "before the last", "after the last", "an epoch"])  # fmt: skip
def test_a_checkpoint_goes_on_where_it_says(place: _lightning.LoopPlace, order: list[str], tmp_path: Path) -> None:
    class Edits(Callback):
        def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
            _lightning.continue_at(checkpoint, place)

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    validated_fit(saver, Edits(), enable_checkpointing=True, max_epochs=1)
    found = HookOrder()
    steps = At(on_train_batch_end=lambda trainer: (trainer.current_epoch, _lightning.num_logged_steps(trainer)))
    path = tmp_path / ("step=6.ckpt" if place.is_last or place.epoch else "step=3.ckpt")
    validated_fit(found, steps, max_epochs=2, ckpt_path=path)
    assert found.order[: len(order)] == order, "the loops read the progress of a checkpoint otherwise"
    assert steps.found["on_train_batch_end"][0] == (
        place.epoch + place.is_last,
        place.num_logged_steps,
    ), "the loops count steps for loggers otherwise when they restart"


def test_a_run_with_max_steps_can_begin_an_epoch(tmp_path: Path) -> None:
    class Edits(Callback):
        def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
            _lightning.continue_at(checkpoint, Place(epoch=1, num_logged_steps=6))

    saver = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, filename="{step}")
    validated_fit(saver, Edits(), enable_checkpointing=True, max_epochs=1)
    steps = At(on_train_start=_lightning.begin_restarted_epoch, on_train_batch_end=_lightning.num_logged_steps)
    validated_fit(steps, max_epochs=-1, max_steps=9, ckpt_path=tmp_path / "step=6.ckpt")
    assert steps.found["on_train_batch_end"] == [6, 7, 8], "epoch_loop.restarting does not decide this any more"


@pytest.mark.parametrize("arguments", [
    {}, {"val_check_interval": 4}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2},
    {"limit_val_batches": 0}, {"val_check_interval": 4, "check_val_every_n_epoch": None},
], ids=str)  # fmt: skip
def test_validation_comes_where_it_is_expected(arguments: dict[str, Any]) -> None:
    class Expects(Callback):
        def __init__(self) -> None:
            self.expected: list[int] = []

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            in_all = _lightning.num_batches_in_all(trainer)
            if _lightning.validates_after(trainer, batch_idx + 1, in_all):
                self.expected.append(in_all)

    expects = Expects()
    validations = At(on_validation_start=_lightning.num_batches_in_all)
    validated_fit(expects, validations, max_epochs=2, **arguments)
    assert expects.expected == validations.found["on_validation_start"], "epoch_loop._should_check_val_fx moved"


def test_a_validation_can_be_skipped() -> None:
    validations = At(on_validation_start=_lightning.num_batches_in_all)
    validated_fit(validations, At(on_train_batch_end=_lightning.skip_next_validation))
    assert not validations.found["on_validation_start"], "epoch_loop._skip_next_val moved"


# --- reading ----------------------------------------------------------------------------------------------------------


def test_callbacks_and_data_module_and_overfit_batches_are_the_trainers() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(equal_samples([1]), 1)

    own, data = Callback(), Data()
    run = trainer(callbacks=[own], overfit_batches=0.5)
    assert own in _lightning.callbacks(run)
    assert _lightning.callbacks(run) is run.callbacks, "a copy: a callback that is inserted would not run"  # type: ignore[attr-defined]
    assert _lightning.overfit_batches(run) == 0.5
    assert _lightning.train_datamodule(run) is None
    run = trainer()
    run.fit(ScalarModel(), datamodule=data)
    assert _lightning.train_datamodule(run) is data
    assert _lightning.overfit_batches(run) == 0


@pytest.mark.parametrize(("every", "expected"), [(1, [True] * 6), (3, [False, False, True] * 2), (50, [False] * 6)])
def test_whether_the_loggers_write_is_known_at_the_batchs_end(every: int, expected: list[bool]) -> None:
    end = At(on_train_batch_end=_lightning.will_log_step)
    fit(end, log_every_n_steps=every)
    assert end.found["on_train_batch_end"] == expected


def test_loggers_write_in_a_fast_dev_run() -> None:
    end = At(on_train_batch_end=_lightning.will_log_step)
    fit(end, fast_dev_run=2)
    assert end.found["on_train_batch_end"] == [True, True]


def run_groups() -> list[tuple[int, bool, int, int]]:
    found = []
    for strategy in ("ddp", "fsdp2"):
        seen = At(
            on_train_start=lambda trainer: (
                torch.distributed.get_world_size(_lightning.data_parallel_group(trainer)),
                _lightning.exchanges_every_micro_batch(trainer),
                trainer.distributed_sampler_kwargs["num_replicas"],
                trainer.distributed_sampler_kwargs["rank"],
            )
        )
        trainer(strategy, 2, callbacks=[seen], limit_val_batches=0).fit(
            ScalarModel(), loader(equal_samples([1] * 2), 1)
        )
        found += seen.found["on_train_start"]
    return found


def test_gradients_are_averaged_over_the_group_that_is_reported() -> None:
    for rank, (ddp, fsdp2) in enumerate(run_ranks(run_groups, 2)):
        assert ddp == (2, False, 2, rank)
        assert fsdp2 == (2, True, 2, rank)


def test_a_single_process_has_no_group_and_does_not_synchronise() -> None:
    run = trainer()
    assert _lightning.data_parallel_group(run) is None
    assert not _lightning.exchanges_every_micro_batch(run)
    assert run.distributed_sampler_kwargs is None


# --- what the package builds on without calling it --------------------------------------------------------------------


def test_the_loop_reads_the_accumulation_anew_at_every_batch() -> None:
    # Windows of 1, 3 and 2 batches, by the rule of lightning_balance.windows.
    values = iter([1, 3, 4, 4, 4, 6])

    def choose(run: Trainer) -> None:
        run.accumulate_grad_batches = next(values)

    model = fit(At(on_train_batch_start=choose))
    assert len(model.gradients) == 3, "_accumulated_batches_reached() does not read trainer.accumulate_grad_batches"


def test_the_estimate_takes_a_fraction_between_windows() -> None:
    from fractions import Fraction

    class Estimates(ScalarModel):
        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()
            self.trainer.accumulate_grad_batches = Fraction(6, 4)  # type: ignore[assignment]
            self.estimated = self.trainer.estimated_stepping_batches
            self.trainer.accumulate_grad_batches = 1
            return super().configure_optimizers()

    model = fit(model=Estimates(), max_epochs=2)
    assert model.estimated == 8, "estimated_stepping_batches is not ceil(batches / accumulation) * epochs any more"


def test_callbacks_states_are_restored_before_loops(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")

    class Stateful(Callback):
        epoch_at_load: int | None = None
        done_at_load: int | None = None

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.done_at_load = _lightning.num_batches_done(self.run)

        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            self.run = trainer

    fit(saver, Stateful(), enable_checkpointing=True)
    resumed = Stateful()
    fit(resumed, ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.done_at_load == 0, "callbacks are restored after the loops, or not between setup and training"


def test_the_names_that_comments_mention_exist() -> None:
    for owner, name in (
        (_FitLoop, "setup_data"),
        (_FitLoop, "is_resuming"),
        (_TrainingEpochLoop, "_accumulated_batches_reached"),
        (_TrainingEpochLoop, "_should_accumulate"),
        (_TrainingEpochLoop, "_num_ready_batches_reached"),
    ):
        assert hasattr(owner, name), f"Lightning has no {owner.__name__}.{name} any more"


def private_uses(path: Path) -> list[str]:
    """Attributes that begin with an underscore, of something that is called a trainer or comes from one."""
    uses = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in ("trainer", "fit_loop", "epoch_loop", "strategy") or ".trainer." in owner:
                uses.append(f"{path.name}:{node.lineno} {owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            uses += [f"{path.name}:{node.lineno} {a.name}" for a in node.names if a.name.startswith("_")]
    return uses


def test_only_one_module_touches_lightning_internals() -> None:
    package = Path(inspect.getfile(lightning_balance)).parent
    found = {path.name for path in package.rglob("*.py") if private_uses(path)}
    assert found == {"_lightning.py"}


# --- micro-batches outside of the loop --------------------------------------------------------------------------------


def test_a_micro_batch_runs_outside_of_the_loop_as_in_it():
    def run(trainer: Trainer) -> tuple[float, float, list[list[int]]]:
        model = trainer.lightning_module
        assert isinstance(model, ScalarModel)
        batch = next(iter(loader(equal_samples([1, 2]), 2)))
        with of_probing.outside_the_loop(trainer), of_probing.without_gradient_sync(trainer):
            loss = of_probing.run_micro_batch(trainer, of_probing.move_batch(trainer, batch))
        return loss, model.gradient(), list(model.served)

    at = At(on_train_start=run)
    fit(at)
    assert at.found["on_train_start"] == [(pytest.approx(5 / 3), pytest.approx(5 / 3), [[0, 1]])]


class Transfers(ScalarModel):
    """Changes what it is given, in the hook before a batch is moved."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * 2}


def test_a_batch_passes_the_modules_transfer_hooks():
    batch = next(iter(loader(equal_samples([1]), 1)))
    at = At(on_train_start=lambda trainer: float(of_probing.move_batch(trainer, batch)["x"]))
    fit(at, model=Transfers())
    assert at.found["on_train_start"] == [2.0]


class Logs(ScalarModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        self.log_dict({"again": loss})
        return loss


def test_outside_of_the_loop_nothing_is_logged_and_no_callback_called():
    def run(trainer: Trainer) -> tuple[int, dict[str, Any]]:
        batch = next(iter(loader(equal_samples([1]), 1)))
        with of_probing.outside_the_loop(trainer):
            of_probing.run_micro_batch(trainer, batch)
            num_callbacks = len(_lightning.callbacks(trainer))
        return num_callbacks, dict(trainer.callback_metrics)

    at = At(on_train_start=run, on_before_backward=lambda trainer: trainer.global_step)
    fit(at, model=Logs())
    assert at.found["on_train_start"] == [(0, {})]
    assert at.found["on_before_backward"] == list(range(6))


def test_callbacks_are_taken_out_of_a_run_from_setup_on():
    late = At(on_train_start=lambda trainer: trainer.global_step)

    class TakesOut(Callback):
        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            of_probing.keep_callbacks(trainer, lambda callback: callback is self)

    fit(TakesOut(), late)
    assert late.found["on_train_start"] == []

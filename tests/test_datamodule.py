"""The data module mixin: alone, with the callback, never twice, and as a good LightningDataModule."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_balance import BalanceCallback, BalancedBatchSampler, BalancedDataModuleMixin
from tests.toys import ScalarModel, TokenDataset, equal_samples, loader, trainer

LENGTHS = [9, 1, 2, 1, 7, 1, 1, 3, 1, 2, 1, 1, 5, 1, 1, 2, 4]
OPTIONS: dict[str, Any] = {"loss_reduction": "token_mean", "print_summary": False, "max_tokens": 9, "seed": 3}


class Plain(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples(LENGTHS), self.batch_size, shuffle=True)


class Left(BalancedDataModuleMixin, LightningDataModule):
    def __init__(self, batch_size: int = 2, **balance: Any) -> None:
        super().__init__(**balance)
        self.save_hyperparameters()
        self.batch_size = batch_size

    train_dataloader = Plain.train_dataloader


class Right(LightningDataModule, BalancedDataModuleMixin):
    def __init__(self, batch_size: int = 2, **balance: Any) -> None:
        super().__init__()
        BalancedDataModuleMixin.__init__(self, **balance)
        self.save_hyperparameters()
        self.batch_size = batch_size

    train_dataloader = Plain.train_dataloader


class NoConstructor(BalancedDataModuleMixin, LightningDataModule):
    """Neither the mixin's nor a constructor of its own: options go straight to the mixin."""

    train_dataloader = lambda self: loader(equal_samples(LENGTHS), 2, shuffle=True)  # noqa: E731


def fit(data: Any, *callbacks: Any, run: Trainer | None = None, **arguments: Any) -> ScalarModel:
    model = ScalarModel()
    run = run or trainer(callbacks=list(callbacks), **arguments)
    run.fit(model, datamodule=data)
    return model


def expected_batches(batch_size: int = 2, **options: Any) -> list[list[int]]:
    arguments = {"max_tokens": 9, "seed": 3, **options}
    return list(
        BalancedBatchSampler(LENGTHS, samples_per_step=batch_size, num_replicas=1, rank=0, sync="step", **arguments)
    )


def balance_callbacks(run: Trainer) -> list[BalanceCallback]:
    return [callback for callback in run.callbacks if isinstance(callback, BalanceCallback)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Left, Right, NoConstructor])
def test_the_mixin_alone_balances(kind: type) -> None:
    model = fit(kind(**OPTIONS))
    assert model.served == expected_batches()
    reference = fit(Plain(), BalanceCallback(**OPTIONS))
    assert model.served == reference.served
    assert model.gradients == reference.gradients


def test_the_mixins_gradients_are_exact() -> None:
    model = fit(Left(batch_size=17, **OPTIONS))
    assert model.gradients == pytest.approx([sum((i + 1) * n for i, n in enumerate(LENGTHS)) / sum(LENGTHS)])


@pytest.mark.parametrize("kind", [Left, Right])
def test_with_the_callback_nothing_is_balanced_or_weighted_twice(kind: type) -> None:
    callback = BalanceCallback(**OPTIONS)
    run = trainer(callbacks=[callback])
    model = fit(kind(loss_reduction="token_mean"), run=run)
    assert balance_callbacks(run) == [callback]
    reference = fit(Plain(), BalanceCallback(**OPTIONS))
    assert model.served == reference.served
    assert model.gradients == reference.gradients


def test_options_that_are_ignored_are_named() -> None:
    with pytest.warns(UserWarning, match="a BalanceCallback of its own, so the balancing options of Left are ignored"):
        fit(Left(max_tokens=5), BalanceCallback(**OPTIONS))


def test_a_mixin_without_options_beside_a_callback_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Left(), BalanceCallback(**OPTIONS))
    assert not [
        str(w.message) for w in caught if "BalanceCallback" in str(w.message) and "labels" not in str(w.message)
    ]


def test_two_fits_attach_one_callback() -> None:
    run, data = trainer(), Left(**OPTIONS)
    first = fit(data, run=run)
    run.fit_loop.max_epochs = 2
    fit(data, run=run)
    assert len(balance_callbacks(run)) == 1
    assert first.served == expected_batches()


def test_one_data_module_in_two_trainers_balances_in_both() -> None:
    data = Left(**OPTIONS)
    assert fit(data).served == fit(data).served == expected_batches()


def test_another_data_module_in_the_same_trainer_takes_over() -> None:
    run = trainer()
    fit(Left(**OPTIONS), run=run)
    run.fit_loop.epoch_progress.reset()
    model = fit(Left(**{**OPTIONS, "max_tokens": 20}), run=run)
    assert len(balance_callbacks(run)) == 1
    assert model.served == expected_batches(max_tokens=20)


def test_a_plain_data_module_after_a_balanced_one_is_left_alone() -> None:
    run = trainer()
    fit(Left(**OPTIONS), run=run)
    run.fit_loop.max_epochs = 2
    model = fit(Plain(batch_size=3), run=run)
    assert [len(indices) for indices in model.served] == [3, 3, 3, 3, 3, 2]
    assert sorted(itertools.chain(*model.served)) == list(range(17))


def test_a_loader_passed_to_fit_after_a_balanced_data_module_is_left_alone() -> None:
    run, model = trainer(), ScalarModel()
    fit(Left(**OPTIONS), run=run)
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(equal_samples(LENGTHS), 3))
    assert model.served == [list(range(i, min(i + 3, 17))) for i in range(0, 17, 3)]


# --- where the loader comes from --------------------------------------------------------------------------------------


class OwnLoader(ScalarModel):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples(LENGTHS), 2, shuffle=True)


def test_loader_argument_module_and_data_module_are_balanced_alike() -> None:
    argument, module = ScalarModel(), OwnLoader()
    trainer(callbacks=[BalanceCallback(**OPTIONS)]).fit(argument, loader(equal_samples(LENGTHS), 2, shuffle=True))
    trainer(callbacks=[BalanceCallback(**OPTIONS)]).fit(module)
    data = fit(Plain(), BalanceCallback(**OPTIONS))
    assert argument.served == module.served == data.served == expected_batches()
    assert argument.gradients == module.gradients == data.gradients


class OwnSampler(Plain):
    """Brings a balanced sampler of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        batches = BalancedBatchSampler(LENGTHS, samples_per_step=6, max_tokens=9, num_replicas=1, rank=0)
        return DataLoader(
            equal_samples(LENGTHS), batch_sampler=batches, collate_fn=loader(equal_samples([1]), 1).collate_fn
        )


def test_a_sampler_in_the_loader_is_adopted_and_weighted() -> None:
    model = fit(OwnSampler(), BalanceCallback(loss_reduction="token_mean", print_summary=True))
    batches = BalancedBatchSampler(LENGTHS, samples_per_step=6, max_tokens=9, num_replicas=1, rank=0)
    assert model.served == list(batches)
    steps = [batches.plan.step(i) for i in range(3)]
    expected = []
    for step in steps:
        indices = [int(i) for slot in range(step.num_slots) for i in step.micro_batch(0, slot)]
        expected.append(sum((i + 1) * LENGTHS[i] for i in indices) / sum(LENGTHS[i] for i in indices))
    assert model.gradients == pytest.approx(expected, rel=1e-5)


def test_options_beside_a_sampler_with_options_of_its_own_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"BalanceCallback has max_tokens, but the DataLoader has a BalancedBatchSampler"
    ):
        fit(OwnSampler(), BalanceCallback(max_tokens=9))


def test_lengths_of_the_data_module_are_found() -> None:
    class WithLengths(Left):
        lengths = LENGTHS

        def train_dataloader(self) -> DataLoader[Any]:
            data = TokenDataset([[float(i + 1)] * length for i, length in enumerate(LENGTHS)])
            del data.lengths
            return loader(data, self.batch_size, shuffle=True)

    assert fit(WithLengths(**OPTIONS)).served == expected_batches()


# --- a good LightningDataModule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Left, Right])
def test_hyperparameters_round_trip(kind: type) -> None:
    data = kind(batch_size=3, max_tokens=9, loss_reduction="token_mean", print_summary=False)
    again = kind(**data.hparams)
    assert dict(again.hparams) == dict(data.hparams)
    assert again.settings.differing_options(data.settings) == []
    assert fit(again).served == fit(data).served


@pytest.mark.parametrize("kind", [Left, Right])
def test_it_is_restored_from_a_checkpoint(kind: type, tmp_path: Path) -> None:
    data = kind(batch_size=3, max_tokens=9, loss_reduction="token_mean", print_summary=False)
    fit(data, ModelCheckpoint(tmp_path, save_last=True), enable_checkpointing=True)
    again = kind.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.settings.max_tokens == 9
    assert again.batch_size == 3


def test_the_mixins_state_is_saved_and_continued_without_a_callback_by_hand(tmp_path: Path) -> None:
    whole = fit(Left(**OPTIONS))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    fit(Left(**OPTIONS), saver, enable_checkpointing=True)
    model = ScalarModel()
    trainer().fit(model, datamodule=Left(**OPTIONS), ckpt_path=tmp_path / "step=2.ckpt")
    steps = [whole.gradients[2:], model.gradients]
    assert steps[0] == steps[1]
    assert whole.served[-len(model.served) :] == model.served


class RightBySuper(LightningDataModule, BalancedDataModuleMixin):
    """LightningDataModule.__init__ takes any arguments and drops them (PL#16206)."""

    def __init__(self, **balance: Any) -> None:
        super().__init__(**balance)

    train_dataloader = Plain.train_dataloader
    batch_size = 2


def test_options_that_the_data_module_drops_are_not_lost_silently() -> None:
    try:
        data = RightBySuper(**OPTIONS)
    except (TypeError, ValueError):
        return
    assert data.settings.max_tokens == 9


def test_trainer_can_be_set_and_read_as_lightning_does() -> None:
    data = Left(**OPTIONS)
    assert data.trainer is None
    run = trainer()
    fit(data, run=run)
    assert data.trainer is run
    data.trainer = None
    assert data.trainer is None


def test_a_copy_does_not_share_the_trainers_callback() -> None:
    data = Left(**OPTIONS)
    twin = copy.copy(data)
    assert fit(twin).served == fit(data).served


def test_a_mixin_whose_constructor_was_skipped_says_so() -> None:
    class Forgot(BalancedDataModuleMixin, LightningDataModule):
        def __init__(self) -> None:
            LightningDataModule.__init__(self)

        train_dataloader = Plain.train_dataloader
        batch_size = 2

    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"BalancedDataModuleMixin\.__init__"):
        fit(Forgot())


def test_fast_dev_run_and_several_epochs_work_with_the_mixin() -> None:
    assert len(fit(Left(**OPTIONS), fast_dev_run=2).served) == 2
    model = fit(Left(**OPTIONS), max_epochs=3)
    for epoch in range(3):
        served = [i for indices, seen in zip(model.served, model.epochs, strict=True) if seen == epoch for i in indices]
        assert set(served) == set(range(17))

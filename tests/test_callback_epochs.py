"""Every epoch serves every sample once, is as long as it says, and is another shuffle, in a real trainer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_balance import BalanceCallback, BalancedBatchSampler, BalancedDataModuleMixin
from tests.distributed import run_ranks
from tests.toys import ScalarModel, TokenDataset, collate, equal_samples, loader, trainer
from tests.trainer_flags import LONG_TAIL, MODES, TWO_SIXES

THREE_FIVE_TWO = MODES["filled to the budget"].options  # micro-batches in epochs 0, 1 and 2 of TWO_SIXES


class Seen(ScalarModel):
    """Keeps the lengths of epochs as the trainer says them."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.planned.append(int(self.trainer.num_training_batches))

    def served_in(self, epoch: int) -> list[list[int]]:
        return [indices for indices, seen in zip(self.served, self.epochs, strict=True) if seen == epoch]

    def num_batches_per_epoch(self) -> list[int]:
        return [len(self.served_in(epoch)) for epoch in range(max(self.epochs) + 1)]


def flat(micro_batches: Sequence[Sequence[int]]) -> list[int]:
    return list(itertools.chain(*micro_batches))


def fit(
    dataset: TokenDataset,
    batch_size: int,
    *,
    model: Seen | None = None,
    loader_arguments: dict[str, Any] | None = None,
    strategy: str = "single",
    num_ranks: int = 1,
    options: dict[str, Any] | None = None,
    ckpt_path: Any = None,
    **trainer_arguments: Any,
) -> Seen:
    model = model or Seen()
    callback = BalanceCallback(loss_reduction="token_mean", **{"print_summary": False, **(options or {})})
    arguments = {"callbacks": [callback], "limit_val_batches": 1, "num_sanity_val_steps": 0, **trainer_arguments}
    arguments["callbacks"] = [callback, *trainer_arguments.get("callbacks", [])]
    train = loader(dataset, batch_size, **{"shuffle": True, **(loader_arguments or {})})
    trainer(strategy, num_ranks, **arguments).fit(model, train, loader(dataset, 1), ckpt_path=ckpt_path)
    return model


# --- one process ------------------------------------------------------------------------------------------------------


def test_three_epochs_are_three_orders_of_all_samples() -> None:
    model = fit(equal_samples([1] * 8), 2, max_epochs=3)
    assert model.epochs == [0] * 4 + [1] * 4 + [2] * 4
    orders = [flat(model.served_in(epoch)) for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(8))] * 3
    # Micro-batches are sorted by length and dealt, so compare which samples form a step.
    memberships = [{frozenset(step) for step in model.served_in(epoch)} for epoch in range(3)]
    assert memberships[0] != memberships[1] != memberships[2] != memberships[0]


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 12}])
def test_the_first_epoch_after_a_resume_is_that_of_the_uninterrupted_run(
    arguments: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    data = equal_samples([1, 5, 2, 3, 1, 1, 4, 2])
    whole = fit(data, 2, max_epochs=3, options=options)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    saved = {"enable_checkpointing": True, "callbacks": [saver]}
    first = fit(data, 2, max_epochs=2, loader_arguments=arguments, options=options, **saved)
    resumed = fit(data, 2, max_epochs=3, loader_arguments=arguments, options=options, ckpt_path=tmp_path / "last.ckpt")
    assert first.served == whole.served_in(0) + whole.served_in(1)
    assert set(resumed.epochs) == {2}
    assert resumed.served == whole.served_in(2)


def test_a_second_fit_of_one_trainer_goes_on_with_the_next_epoch() -> None:
    data = equal_samples([1, 5, 2, 3, 1, 1, 4, 2])
    whole = fit(data, 2, max_epochs=3, options={"max_tokens": 8})
    model = Seen()
    again = trainer(callbacks=[BalanceCallback(loss_reduction="token_mean", max_tokens=8, print_summary=False)])
    train = loader(data, 2, shuffle=True)
    for max_epochs in (1, 3):
        again.fit_loop.max_epochs = max_epochs
        again.fit(model, train)
    assert model.served == whole.served
    assert again.accumulate_grad_batches == 1


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_longer_and_shorter_epochs_are_whole_with_workers(workers: dict[str, Any]) -> None:
    data = equal_samples(TWO_SIXES)
    plain = fit(data, 1, max_epochs=3, options=THREE_FIVE_TWO)
    model = fit(data, 1, max_epochs=3, options=THREE_FIVE_TWO, loader_arguments=workers)
    assert model.served == plain.served


class OtherDataEveryEpoch(LightningDataModule):
    """3, 5 and 2 samples, each a micro-batch, in epochs 0, 1 and 2."""

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return loader(equal_samples([2] * (3, 5, 2)[self.trainer.current_epoch]), 1, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples([1]), 1)


def test_a_reloaded_loader_with_other_data_gives_each_epoch_its_own_length() -> None:
    model = Seen()
    trainer(
        callbacks=[BalanceCallback(print_summary=False)],
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
    ).fit(model, datamodule=OtherDataEveryEpoch())
    assert model.num_batches_per_epoch() == [3, 5, 2]
    assert model.num_validations == 3


class FailsOnce(Seen):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise OSError("the machine is going down")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"max_tokens": 9, "samples_per_step": 4}])
def test_a_checkpoint_saved_by_a_failing_run_continues_behind_its_last_step(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = equal_samples(LONG_TAIL)
    whole = fit(data, 2, options=options)
    saver = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(OSError, match="going down"):
        fit(data, 2, model=FailsOnce(), options=options, callbacks=[saver], enable_checkpointing=True)
    resumed = fit(data, 2, options=options, ckpt_path=saver.ckpt_path)
    # What was done before is done, what was not is done now: the same steps in all, each with its true gradient.
    assert resumed.gradients == whole.gradients[-len(resumed.gradients) :]
    assert resumed.trainer.global_step == len(whole.gradients)


@pytest.mark.parametrize("options", [{}, {"max_tokens": 9, "samples_per_step": 4}])
def test_a_checkpoint_of_an_unbalanced_run_inside_an_epoch_never_gives_wrong_gradients(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = equal_samples(LONG_TAIL)
    whole = fit(data, 2, options=options)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer(callbacks=[saver], enable_checkpointing=True, limit_val_batches=0).fit(
        ScalarModel(), loader(data, 2, shuffle=True)
    )
    refusal = ""
    try:
        resumed = fit(data, 2, options=options, ckpt_path=tmp_path / "step=3.ckpt")
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "checkpoint" in refusal
        return
    assert resumed.served == whole.served[3:]
    num_whole_steps = len(resumed.gradients) - 1  # the first may have begun before the checkpoint
    assert resumed.gradients[-num_whole_steps:] == whole.gradients[-num_whole_steps:]


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffle_false_serves_the_datas_order_in_every_epoch(workers: int) -> None:
    model = fit(equal_samples([1] * 8), 2, max_epochs=2, loader_arguments={"shuffle": False, "num_workers": workers})
    steps = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert model.served == steps * 2


class SeedsByIndex(Dataset[dict[str, Any]]):
    """Refuses an index that is no Python int, as torch.Generator does."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        x = torch.rand(1 + index % 4, generator=generator)
        return {"index": index, "x": x, "labels": torch.ones_like(x, dtype=torch.long)}


@pytest.mark.parametrize("options", [{}, {"max_tokens": 4}, {"max_tokens": 4, "step_unit": "tokens"}])
def test_indices_are_python_ints(options: dict[str, Any]) -> None:
    callback = BalanceCallback(lengths=lambda sample: len(sample["x"]), print_summary=False, **options)
    model = Seen()
    trainer(callbacks=[callback]).fit(model, DataLoader(SeedsByIndex(), batch_size=2, collate_fn=collate, shuffle=True))
    assert sorted(flat(model.served)) == list(range(9))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_len_is_what_iterating_gives_for_any_lengths(seed: int, num_ranks: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 30, 23 + seed)
    for arguments in (
        {"batch_size": 3},
        {"batch_size": 2, "num_slots": 2},
        {"samples_per_step": 7, "max_tokens": 31},
        {"max_tokens": 40},
        {"max_tokens": 40, "num_slots": 2},
        {"samples_per_step": 5, "max_tokens": 30, "lookahead": 3},
    ):
        for rank in range(num_ranks):
            sampler = BalancedBatchSampler(lengths, num_replicas=num_ranks, rank=rank, seed=seed, **arguments)  # type: ignore[arg-type]
            for epoch in range(2):
                sampler.set_epoch(epoch)
                assert len(sampler) == len(list(sampler))


# --- two ranks --------------------------------------------------------------------------------------------------------


class BalancedData(BalancedDataModuleMixin, LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples([2] * 16), 2, shuffle=True)


def run_on_two_ranks(strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run(name: str, data: TokenDataset, batch_size: int, **arguments: Any) -> Seen:
        model = fit(data, batch_size, strategy=strategy, num_ranks=2, **arguments)
        batches, epochs = model.num_batches_per_epoch(), range(max(model.epochs) + 1)
        found[name] = {
            "served": [model.served_in(epoch) for epoch in epochs],
            "batches": batches,
            "planned": model.planned,
            "validations": model.num_validations,
            "gradients": model.gradients,
        }
        return model

    for use in (True, False):
        run(f"sixteen, use_distributed_sampler {use}", equal_samples([2] * 16), 2, use_distributed_sampler=use)
    model = Seen()
    trainer(strategy, 2, limit_val_batches=0).fit(model, datamodule=BalancedData(print_summary=False))
    found["mixin"] = model.served
    run("no shuffle", equal_samples([1] * 8), 1, loader_arguments={"shuffle": False}, max_epochs=2)
    run("set_epoch", equal_samples([1] * 8), 2, max_epochs=3)
    run("one sample", TokenDataset([[4.0, 6.0]]), 1)
    run("five micro-batches", equal_samples([4] * 10), 5, options={"max_tokens": 8}, max_epochs=2)
    torch.manual_seed(torch.distributed.get_rank())
    run("seeded by rank", equal_samples([2] * 16), 2)
    return found


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(run_on_two_ranks, 2, request.param, timeout_s=200)


def served(ranks: list[dict[str, Any]], name: str, epoch: int = 0) -> list[list[list[int]]]:
    return [rank[name]["served"][epoch] for rank in ranks]


def test_trainer_defaults_serve_every_sample_once_over_ranks(ranks: list[dict[str, Any]]) -> None:
    one, other = (served(ranks, f"sixteen, use_distributed_sampler {use}") for use in (True, False))
    assert one == other
    assert sorted(flat(flat(one))) == list(range(16))
    assert [len(rank) for rank in one] == [4, 4]


def test_the_mixin_serves_what_the_callback_does(ranks: list[dict[str, Any]]) -> None:
    assert [rank["mixin"] for rank in ranks] == served(ranks, "sixteen, use_distributed_sampler True")


def test_a_rank_dependent_torch_seed_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert served(ranks, "seeded by rank") == served(ranks, "sixteen, use_distributed_sampler True")


def test_ranks_read_the_datas_order_step_by_step(ranks: list[dict[str, Any]]) -> None:
    for epoch in range(2):
        per_rank = served(ranks, "no shuffle", epoch)
        steps = [sorted(flat(step)) for step in zip(*per_rank, strict=True)]
        assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_epochs_differ_and_are_whole_over_ranks(ranks: list[dict[str, Any]]) -> None:
    epochs = [served(ranks, "set_epoch", epoch) for epoch in range(3)]
    assert [sorted(flat(flat(epoch))) for epoch in epochs] == [list(range(8))] * 3
    memberships = [{frozenset(flat(step)) for step in zip(*epoch, strict=True)} for epoch in epochs]
    assert memberships[0] != memberships[1] != memberships[2] != memberships[0]


def test_fewer_samples_than_ranks_is_one_micro_batch_on_each(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["one sample"]["served"] == [[[0]]]
        assert rank["one sample"]["gradients"] == pytest.approx([5.0])


def test_five_micro_batches_are_served_as_six_and_validated_every_epoch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["five micro-batches"]["batches"] == rank["five micro-batches"]["planned"] == [3, 3]
        assert rank["five micro-batches"]["validations"] == 2
    for epoch in range(2):
        indices = flat(flat(served(ranks, "five micro-batches", epoch)))
        assert sorted(set(indices)) == list(range(10))

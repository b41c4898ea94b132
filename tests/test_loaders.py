"""Everything that a user gave his DataLoader stays, but for the choice of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_balance import BalanceCallback, BalancedBatchSampler, BalancedDataModuleMixin
from lightning_balance.loaders import check_loader, read_order, with_batch_sampler
from tests.toys import ScalarModel, collate, equal_samples, trainer

LENGTHS = [4, 1, 2, 3, 1, 2, 5, 1, 1, 2]
OURS = {"batch_sampler", "sampler", "batch_size", "drop_last", "_iterator"}


class InitOfWorker:
    """A worker_init_fn that can be told apart and travels to other start methods."""

    def __call__(self, worker_id: int) -> None:
        torch.manual_seed(worker_id)


def all_arguments(generator: torch.Generator) -> dict[str, Any]:
    return {
        "batch_size": 4,
        "shuffle": True,
        "drop_last": True,
        "collate_fn": collate,
        "num_workers": 2,
        "pin_memory": torch.cuda.is_available(),
        "timeout": 30,
        "worker_init_fn": InitOfWorker(),
        "multiprocessing_context": "fork",
        "generator": generator,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": True,
    }


def balanced(loader: DataLoader[Any]) -> DataLoader[Any]:
    return with_batch_sampler(loader, BalancedBatchSampler(LENGTHS, batch_size=2, num_replicas=1, rank=0))


def test_every_argument_but_the_choice_of_samples_is_kept() -> None:
    loader = DataLoader(equal_samples(LENGTHS), **all_arguments(torch.Generator()))
    rebuilt = balanced(loader)
    assert rebuilt is not loader
    assert type(rebuilt) is DataLoader
    for name, value in loader.__dict__.items():
        if name not in OURS:
            assert rebuilt.__dict__[name] is value, name
    assert rebuilt.num_workers == 2
    assert rebuilt.prefetch_factor == 3
    assert rebuilt.timeout == 30
    assert rebuilt.multiprocessing_context.get_start_method() == "fork"


def test_the_rebuilt_loader_serves_the_batch_sampler() -> None:
    sampler = BalancedBatchSampler(LENGTHS, batch_size=2, num_replicas=1, rank=0)
    rebuilt = with_batch_sampler(DataLoader(equal_samples(LENGTHS), batch_size=7, collate_fn=collate), sampler)
    assert [batch["index"].tolist() for batch in rebuilt] == list(sampler)
    assert len(rebuilt) == len(sampler)


def test_the_original_is_left_as_it_was() -> None:
    loader = DataLoader(
        equal_samples(LENGTHS), batch_size=4, collate_fn=collate, num_workers=1, persistent_workers=True
    )
    list(loader)  # has workers now
    before = dict(loader.__dict__)
    rebuilt = balanced(loader)
    assert [len(batch["index"]) for batch in rebuilt]
    assert rebuilt._iterator is not loader._iterator
    assert loader.__dict__ == before
    assert len(list(loader)) == 3


class Seen(ScalarModel):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.loader = self.trainer.train_dataloader


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def train_dataloader(self) -> DataLoader[Any]:
        self.loader = DataLoader(equal_samples(LENGTHS), **all_arguments(self.generator))
        return self.loader


class MixedData(BalancedDataModuleMixin, Data):
    pass


@pytest.mark.parametrize("through", ["callback", "mixin"])
def test_a_loader_with_every_argument_trains(through: str) -> None:
    data = Data() if through == "callback" else MixedData(print_summary=False, loss_reduction="token_mean")
    callbacks = [BalanceCallback(print_summary=False, loss_reduction="token_mean")] if through == "callback" else []
    model = Seen()
    trainer(callbacks=callbacks, max_epochs=2).fit(model, datamodule=data)
    for name in ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "generator", "dataset",
                 "prefetch_factor", "persistent_workers"):  # fmt: skip
        assert getattr(model.loader, name) is getattr(data.loader, name), name
    assert model.loader.multiprocessing_context.get_start_method() == "fork"
    assert [len(indices) for indices in model.served].count(0) == 0
    for epoch in range(2):  # 10 samples, 4 a step, drop_last
        served = [i for indices, seen in zip(model.served, model.epochs, strict=True) if seen == epoch for i in indices]
        assert len(served) == len(set(served)) == 8


# --- subclasses -------------------------------------------------------------------------------------------------------


class NamedLoader(DataLoader[Any]):
    """Has a constructor of its own, an attribute of its own and a method of its own."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(equal_samples(LENGTHS), batch_size=size, shuffle=True, collate_fn=collate)
        self.name = name
        self.extra = {"a": 1}

    def describe(self) -> str:
        return f"{self.name}, {len(self)} batches"


def test_a_subclass_keeps_class_attributes_and_methods() -> None:
    rebuilt = balanced(NamedLoader("mine", 4))
    assert isinstance(rebuilt, NamedLoader)
    assert rebuilt.extra == {"a": 1}
    assert rebuilt.describe() == "mine, 5 batches"


class Doubling(NamedLoader):
    """Changes what it serves, after the batches were chosen."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield {**batch, "x": batch["x"] * 2}


@pytest.mark.parametrize("kind", [NamedLoader, Doubling])
def test_subclasses_train_through_the_callback(kind: type[NamedLoader]) -> None:
    model = Seen()
    trainer(callbacks=[BalanceCallback(print_summary=False, loss_reduction="token_mean")]).fit(model, kind("mine", 5))
    assert isinstance(model.loader, kind)
    assert sorted(i for indices in model.served for i in indices) == list(range(10))
    expected = sum((i + 1) * n for i, n in enumerate(LENGTHS)) / sum(LENGTHS)
    weights = [sum(LENGTHS[i] for i in indices) / sum(LENGTHS) for indices in model.served]
    mean = sum(w * g for w, g in zip(weights, model.gradients, strict=True))
    assert mean == pytest.approx(expected * (2 if kind is Doubling else 1))


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shuffle", "drop_last"),
    [
        ({"batch_size": 2}, False, False),
        ({"batch_size": 2, "shuffle": True}, True, False),
        ({"batch_size": 2, "drop_last": True}, False, True),
        ({"batch_size": 2, "sampler": SequentialSampler(LENGTHS)}, False, False),
        ({"batch_size": 2, "sampler": RandomSampler(LENGTHS)}, True, False),
        ({"batch_size": 2, "sampler": DistributedSampler(LENGTHS, num_replicas=2, rank=0)}, True, False),  # type: ignore[arg-type]
        ({"batch_size": 2, "sampler": DistributedSampler(LENGTHS, 2, 0, shuffle=False)}, False, False),  # type: ignore[arg-type]
        ({"batch_sampler": BatchSampler(RandomSampler(LENGTHS), 2, drop_last=True)}, True, True),
    ],
)
def test_batch_size_shuffle_and_drop_last_are_read(arguments: dict[str, Any], shuffle: bool, drop_last: bool) -> None:
    order = read_order(DataLoader(LENGTHS, **arguments))  # type: ignore[arg-type]
    assert (order.batch_size, order.shuffle, order.drop_last) == (2, shuffle, drop_last)


class OwnSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1])

    def __len__(self) -> int:
        return 2


class OwnRandomSampler(RandomSampler):
    pass


class OwnBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"sampler": OwnSampler()}, "the sampler OwnSampler"),
        ({"sampler": OwnRandomSampler(LENGTHS)}, "the sampler OwnRandomSampler"),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "the sampler WeightedRandomSampler"),
        ({"sampler": SubsetRandomSampler([0, 1])}, "the sampler SubsetRandomSampler"),
        ({"sampler": [3, 4]}, "the sampler list"),
        ({"sampler": RandomSampler(LENGTHS, replacement=True)}, r"RandomSampler\(replacement=True, num_samples=10\)"),
        ({"sampler": RandomSampler(LENGTHS, num_samples=3)}, r"RandomSampler\(replacement=False, num_samples=3\)"),
        ({"batch_sampler": OwnBatchSampler(OwnSampler(), 2, False)}, "the batch sampler OwnBatchSampler"),
        ({"batch_sampler": [[0], [1]]}, "the batch sampler list"),
    ],
)
def test_a_choice_of_samples_that_balancing_would_override_is_refused(arguments: dict[str, Any], expected: str) -> None:
    loader = DataLoader(LENGTHS, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"^the training DataLoader has {expected}.*(use|give).*remove the callback$"):
        read_order(loader)


def test_a_sampler_over_other_indices_is_not_taken_for_the_whole_dataset() -> None:
    # A RandomSampler or SequentialSampler over another object may have another length than the dataset.
    for sampler in (SequentialSampler(range(3)), RandomSampler(range(3))):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="sampler"):
            read_order(DataLoader(LENGTHS, batch_size=2, sampler=sampler))  # type: ignore[arg-type]


def test_no_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size=None.*give it a batch_size"):
        read_order(DataLoader(LENGTHS, batch_size=None))  # type: ignore[arg-type]


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> list[int]:
        return [index]


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match=r"lengths need a dataset with a length, but len\(Endless\) fails: .*map-style"):
        read_order(DataLoader(Endless()))


class Getitems(Dataset[Any]):
    """Reads whole batches at once, as torch asks datasets that can."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(type(index) is int for index in indices)
        return [equal_samples(LENGTHS)[index] for index in indices]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are read by __getitems__")


def test_datasets_that_read_whole_batches_are_asked_for_whole_batches() -> None:
    model = ScalarModel()
    callback = BalanceCallback(lengths=LENGTHS, print_summary=False, loss_reduction="token_mean", max_tokens=6)
    trainer(callbacks=[callback]).fit(model, DataLoader(Getitems(), batch_size=3, collate_fn=collate))
    assert {i for indices in model.served for i in indices} == set(range(10))


@pytest.mark.parametrize("loader", [[1, 2], iter([]), {"a": 1}, range(3)])
def test_anything_but_a_dataloader_is_refused_by_its_kind(loader: Any) -> None:
    with pytest.raises(TypeError, match=f"balances one training DataLoader, got a {type(loader).__name__}"):
        check_loader(loader)

"""Bad input is one clear sentence, on every rank, before training starts."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_balance import BalanceCallback, BalancedDataModuleMixin, CostModel
from tests.distributed import run_ranks
from tests.toys import ScalarModel, TokenDataset, collate, equal_samples, loader, trainer

QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False
}  # fmt: skip


class Untrained(ScalarModel):
    """Fails the test if training starts."""

    def on_train_start(self) -> None:
        raise AssertionError("training started")


def fit(train: Any, *, module: LightningModule | None = None, options: Any = None, **trainer_arguments: Any) -> None:
    callback = BalanceCallback(**{"print_summary": False, "loss_reduction": "token_mean", **(options or {})})
    arguments = {"callbacks": [callback, *trainer_arguments.pop("callbacks", [])], **trainer_arguments}
    trainer(**arguments).fit(module or Untrained(), train)


def message_of(attempt: Callable[[], Any]) -> str:
    """Type and text of the user error that `attempt` raises."""
    try:
        attempt()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def assert_is_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert "  " not in message
    assert not re.search(r"[.!?] [A-Z]", message), f"more than one sentence: {message}"


# --- options, at construction -----------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "ValueError: max_tokens must be an integer >= 1, got 0"),
    ({"max_tokens": -5}, "ValueError: max_tokens must be an integer >= 1, got -5"),
    ({"max_tokens": 8.5}, "TypeError: max_tokens must be an integer >= 1, got 8.5 (float)"),
    ({"max_tokens": True}, "TypeError: max_tokens must be an integer >= 1, got True (bool)"),
    ({"max_tokens": "8k"}, "TypeError: max_tokens must be an integer >= 1, got '8k' (str)"),
    ({"max_tokens": 10**20}, "ValueError: max_tokens must be an integer from 1 to 9223372036854775807, got 1000000"),
    ({"samples_per_step": 0}, "ValueError: samples_per_step must be an integer >= 1, got 0"),
    ({"max_length": 0}, "ValueError: max_length must be an integer >= 1, got 0"),
    ({"pad_to_multiple_of": 0}, "ValueError: pad_to_multiple_of must be an integer >= 1, got 0"),
    ({"lookahead": 0}, "ValueError: lookahead must be an integer >= 1, got 0"),
    ({"max_shapes": 0}, "ValueError: max_shapes must be an integer >= 1, got 0"),
    ({"oversize": "drop"}, "ValueError: oversize must be one of 'single', 'error', 'skip', got 'drop'"),
    ({"sync": "never"}, "ValueError: sync must be one of 'auto', 'micro_batch', 'step', got 'never'"),
    ({"step_unit": "words"}, "ValueError: step_unit must be one of 'samples', 'tokens', got 'words'"),
    ({"step_unit": "tokens"}, "needs max_tokens"),
    ({"seed": -1}, "ValueError: seed must be an integer >= 0 or None (take it from seed_everything), got -1"),
    ({"seed": 1.5}, "seed must be an integer >= 0 or None (take it from seed_everything), got 1.5"),
    (
        {"loss_reduction": "median"},
        "ValueError: loss_reduction must be one of 'sample_mean', 'token_mean', 'causal_token_mean', 'sum', a function"
        " batch -> units, or the dotted path of one, got 'median'",
    ),
    ({"loss_reduction": 3}, "got 3"),
    ({"loss_reduction": None}, "got None"),
    ({"loss_reduction": "no.such.function"}, "loss_reduction='no.such.function' is not an importable function"),
    ({"loss_reduction": "os.path.nothing"}, "loss_reduction='os.path.nothing' is not an importable function"),
    ({"loss_reduction": "os.sep"}, "loss_reduction='os.sep' must name a function, but it is a str"),
    ({"cost": "no.such.function"}, "cost='no.such.function' is not an importable function"),
    ({"cost": "cheap"}, "TypeError: cost must be a CostModel, a function (num_samples, padded_length) -> cost"),
    ({"cost": 3.0}, "got 3.0"),
    (
        {"max_tokens": "auto", "memory_fraction": "0.5"},
        "TypeError: memory_fraction must be a number above 0 and at most 1, got '0.5' (str)",
    ),
    ({"max_tokens": "auto", "memory_fraction": None}, "got None (NoneType)"),
    (
        {"max_tokens": "auto", "memory_limit_gib": "2"},
        "TypeError: memory_limit_gib must be a finite number above 0, or None, got '2' (str)",
    ),
    ({"max_tokens": "auto", "memory_limit_gib": True}, "got True (bool)"),
    ({"seed": True}, "seed must be an integer >= 0 or None (take it from seed_everything), got True"),
    ({"ignore_index": "-100"}, "TypeError: ignore_index must be an integer, got '-100' (str)"),
    ({"ignore_index": 0.5}, "TypeError: ignore_index must be an integer, got 0.5 (float)"),
    ({"label_key": 5}, "TypeError: label_key must be a string, the key of a batch's labels, got 5 (int)"),
    ({"print_summary": "no"}, "TypeError: print_summary must be True or False, got 'no' (str)"),
    ({"lengths_cache_dir": 7}, "TypeError: lengths_cache_dir must be the path of a folder, or None, got 7 (int)"),
]


@pytest.mark.parametrize(("options", "expected"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_named_with_its_value(options: dict[str, Any], expected: str) -> None:
    message = message_of(lambda: BalanceCallback(**options))
    assert expected in message
    assert_is_one_sentence(message)


@pytest.mark.parametrize(("options", "expected"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_the_mixin_refuses_the_same_options(options: dict[str, Any], expected: str) -> None:
    class Data(BalancedDataModuleMixin, LightningDataModule):
        pass

    assert expected in message_of(lambda: Data(**options))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        BalanceCallback(max_token=5)  # type: ignore[call-arg]


# --- data, before training --------------------------------------------------------------------------------------------


class Words(Dataset[str]):
    """Samples of which only the user knows what a length is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return "word" * (index + 1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


class NoSize(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


BAD_LENGTHS: list[tuple[Any, str]] = [
    ([1, 2, 3], "ValueError: lengths has 3 entries but the dataset has 4 samples"),
    ([1, 2, 3, 4, 5], "ValueError: lengths has 5 entries but the dataset has 4 samples"),
    ([1, -2, 3, 4], "ValueError: lengths[1] is -2; every length must be at least 1"),
    ([1, 0, 3, 4], "ValueError: lengths[1] is 0; every length must be at least 1"),
    ([0, 0, 0, 0], "all lengths are zero"),
    ([1.0, float("nan"), 1.0, 1.0], "ValueError: lengths[1] is nan; every length must be a whole number"),
    ([1.0, float("inf"), 1.0, 1.0], "ValueError: lengths[1] is inf; every length must be a whole number"),
    ([1, 2.5, 3, 4], "ValueError: lengths[1] is 2.5; every length must be a whole number"),
    (["a", "b", "c", "d"], "TypeError: lengths must be numbers"),
    ([None, 1, 2, 3], "TypeError: lengths must be numbers"),
    ([[1, 2], [3, 4], [1, 1], [2, 2]], "lengths must be 1-D"),
    (torch.tensor([1, 2, 0, 4]), "lengths[2] is 0"),
    (np.array([1.0, 2.0, 3.0, np.nan]), "lengths[3] is nan"),
    ([], "lengths"),
    ("no_such_column", "lengths='no_such_column' is neither an attribute of the dataset nor a key of sample 0"),
    (lambda sample: 0, "lengths[0] is 0"),
    (lambda sample: len(sample["x"]) / 2, "the callable in lengths"),
    (lambda sample: None, "the callable in lengths"),
    (7, "lengths must be 1-D"),
]


@pytest.mark.parametrize(("lengths", "expected"), BAD_LENGTHS)
def test_bad_lengths_are_named_with_their_value(lengths: Any, expected: str) -> None:
    data = equal_samples([1, 2, 3, 4])
    message = message_of(lambda: fit(loader(data, 2), options={"lengths": lengths}))
    assert expected in message
    assert_is_one_sentence(message)


def test_bad_lengths_of_the_dataset_say_where_they_come_from() -> None:
    data = equal_samples([1, 2, 3, 4])
    data.lengths = [1, 2, 3]
    message = message_of(lambda: fit(loader(data, 2)))
    assert "3 entries but the dataset has 4 samples" in message
    assert "TokenDataset.lengths" in message


def test_an_unknown_column_lists_the_columns() -> None:
    import datasets

    data = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    message = message_of(lambda: fit(DataLoader(data, batch_size=2), options={"lengths": "tokens"}))
    assert message == "ValueError: lengths='tokens' is not a column of the dataset; its columns are 'text', 'n'"


def test_samples_without_a_length_name_the_way_out() -> None:
    class Numbers(Words):
        def __getitem__(self, index: int) -> Any:
            return {"a": [1], "b": [1, 2]}

    message = message_of(lambda: fit(DataLoader(Numbers(), batch_size=2)))
    assert "lengths were not found: sample 0 has the keys 'a', 'b'" in message


BAD_LOADERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: DataLoader(Stream(), batch_size=2), "cannot balance the IterableDataset Stream"),
    (lambda: [loader(equal_samples([1]), 1)] * 2, "balances one training DataLoader, got a list"),
    (lambda: {"a": loader(equal_samples([1]), 1)}, "balances one training DataLoader, got a dict"),
    (lambda: CombinedLoader([loader(equal_samples([1]), 1)]), "got a CombinedLoader"),
    (lambda: [[1], [2]], "balances one training DataLoader, got a list"),
    (lambda: DataLoader(equal_samples([1, 2]), batch_size=None), "has batch_size=None"),
    (
        lambda: DataLoader(equal_samples([1, 2]), sampler=WeightedRandomSampler([1.0, 1.0], 2)),
        "has the sampler WeightedRandomSampler",
    ),
    (
        lambda: DataLoader(
            equal_samples([1, 2]), sampler=RandomSampler(equal_samples([1, 2]), replacement=True, num_samples=4)
        ),
        "RandomSampler(replacement=True, num_samples=4)",
    ),
    (lambda: DataLoader(equal_samples([1, 2]), batch_sampler=[[0], [1]]), "has the batch sampler list"),
    (lambda: DataLoader(NoSize(), batch_size=2), "NoSize"),
]


@pytest.mark.parametrize(("make", "expected"), BAD_LOADERS, ids=[text for _, text in BAD_LOADERS])
def test_a_loader_that_cannot_be_balanced_is_refused(make: Callable[[], Any], expected: str) -> None:
    message = message_of(lambda: fit(make()))
    assert expected in message
    assert_is_one_sentence(message)


def test_an_iterable_dataset_of_the_mixin_is_refused() -> None:
    class Data(BalancedDataModuleMixin, LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=2)

    with pytest.raises(TypeError, match="IterableDataset"):
        trainer().fit(Untrained(), datamodule=Data())


def test_an_empty_dataset_is_refused_in_words() -> None:
    message = message_of(lambda: fit(loader(TokenDataset([]), 2)))
    assert "at least one sample" in message


def test_a_nonpositive_batch_size_of_the_loader_is_torchs_own_error() -> None:
    with pytest.raises(ValueError, match="batch_size should be a positive integer value, but got batch_size=0"):
        loader(equal_samples([1, 2]), 0)


def test_fewer_samples_than_a_step_with_drop_last_is_an_error_not_an_empty_epoch() -> None:
    message = message_of(lambda: fit(loader(equal_samples([1, 2]), 4, drop_last=True)))
    assert "drop_last" in message
    assert "samples_per_step" in message or "batch_size" in message
    assert_is_one_sentence(message)


def test_labels_that_are_not_there_name_the_option() -> None:
    data = equal_samples([1, 2])
    message = message_of(lambda: fit(loader(data, 2), module=ScalarModel(), options={"label_key": "targets"}))
    assert "label_key='targets'" in message
    assert "loss_reduction='token_mean'" in message
    assert_is_one_sentence(message)


# --- trainers and modules ---------------------------------------------------------------------------------------------


def test_a_callback_added_after_the_first_is_refused() -> None:
    run = trainer(callbacks=[BalanceCallback()])
    run.callbacks.append(BalanceCallback())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the trainer has 2 BalanceCallbacks, which would weight twice: keep one"):
        run.fit(Untrained(), loader(equal_samples([1, 2]), 1))


class Manual(Untrained):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_after_a_refusal_the_same_trainer_can_train() -> None:
    run = trainer(callbacks=[BalanceCallback(print_summary=False, loss_reduction="token_mean")])
    with pytest.raises(TypeError, match="IterableDataset"):
        run.fit(Untrained(), DataLoader(Stream(), batch_size=2))
    model = ScalarModel()
    run.fit(model, loader(equal_samples([1, 2, 3]), 1))
    assert sorted(index for indices in model.served for index in indices) == [0, 1, 2]


# --- every rank -------------------------------------------------------------------------------------------------------


class FailsOnRank(TokenDataset):
    """Reading fails on one rank only; without `lengths` it has to be read."""

    def __init__(self, failing_rank: int) -> None:
        super().__init__([[1.0]] * 4)
        del self.lengths
        self.failing_rank = failing_rank

    def __getitem__(self, index: int) -> dict[str, Any]:
        if int(os.environ["RANK"]) == self.failing_rank:
            raise OSError(f"disk of rank {self.failing_rank} is gone")
        return super().__getitem__(index)


class LengthsFailOnRank(TokenDataset):
    def __init__(self, failing_rank: int) -> None:
        super().__init__([[1.0]] * 4)
        if int(os.environ["RANK"]) == failing_rank:
            self.lengths = [1, 1, 1]


def without_lengths(data: TokenDataset) -> TokenDataset:
    del data.lengths
    return data


def run_bad_input_on_two_ranks() -> dict[str, str]:
    rank = int(os.environ["RANK"])
    found: dict[str, str] = {}

    def run(name: str, train: Callable[[], Any], **arguments: Any) -> None:
        os.environ.pop("PL_GLOBAL_SEED", None)
        try:
            fit(train(), strategy="ddp", num_ranks=2, **arguments)
            found[name] = "no error"
        except AssertionError:
            found[name] = "training started"
        except Exception as error:  # noqa: BLE001 - every kind is compared below
            found[name] = f"{type(error).__name__}: {error}"

    good = equal_samples([1, 2, 3, 4])
    run("negative length", lambda: loader(good, 1), options={"lengths": [1, 2, -3, 4]})
    run("list of loaders", lambda: [loader(good, 1)])
    run("iterable dataset", lambda: DataLoader(Stream(), batch_size=2))
    run("manual optimization", lambda: loader(good, 1), module=Manual())
    run("option differs", lambda: loader(good, 1), options={"max_tokens": 8 + rank})
    run("option on one rank", lambda: loader(good, 1), options={"max_tokens": 8} if rank else {})
    run("seed differs", lambda: loader(good, 1, shuffle=True), options={"seed": rank})
    run("batch size differs", lambda: loader(good, 1 + rank, shuffle=True))
    run("shuffle differs", lambda: loader(good, 1, shuffle=rank == 1))
    run("cost differs", lambda: loader(good, 1), options={"cost": CostModel(alpha=rank)})
    run("data differ", lambda: loader(equal_samples([1, 2, 3, 4 + rank]), 1))
    run("order differs", lambda: loader(equal_samples([1, 2] if rank else [2, 1]), 1))
    run("sizes differ", lambda: loader(equal_samples([1] * (4 + rank)), 1))
    run("lengths of one rank are bad", lambda: loader(LengthsFailOnRank(1), 1))
    run("one rank has an iterable dataset", lambda: DataLoader(Stream() if rank else good, batch_size=1))
    run("one rank has another module", lambda: loader(good, 1), module=Manual() if rank else None)
    run("reading fails on rank 0", lambda: loader(FailsOnRank(0), 1))

    def seeded() -> Any:
        seed_everything(rank)
        return loader(good, 1, shuffle=True)

    run("seed_everything(rank)", seeded)
    return found


def run_scanned_data_that_differ() -> str:
    """Rank 0 reads the samples; rank 1 has fewer of them."""
    rank = int(os.environ["RANK"])
    data = without_lengths(equal_samples([1] * (6 - 2 * rank)))
    try:
        fit(loader(data, 1), strategy="ddp", num_ranks=2, module=ScalarModel(), options={"lengths": "x"})
    except Exception as error:  # noqa: BLE001 - every kind is compared below
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, str]]:
    return run_ranks(run_bad_input_on_two_ranks, 2, timeout_s=120)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("negative length", "ValueError: lengths[2] is -3; every length must be at least 1"),
        ("list of loaders", "TypeError: BalanceCallback balances one training DataLoader, got a list"),
        ("iterable dataset", "TypeError: BalanceCallback cannot balance the IterableDataset Stream"),
        ("manual optimization", "ValueError: BalanceCallback does not weight manual optimization"),
        ("option differs", "ValueError: max_tokens differs between ranks: rank 0 has 8, rank 1 has 9"),
        ("option on one rank", "ValueError: max_tokens differs between ranks: rank 0 has None, rank 1 has 8"),
        ("seed differs", "ValueError: seed differs between ranks: rank 0 has 0, rank 1 has 1"),
        ("seed_everything(rank)", "ValueError: seed differs between ranks: rank 0 has 0, rank 1 has 1"),
        ("batch size differs", "differs between ranks: rank 0 has"),
        ("shuffle differs", "differs between ranks: rank 0 has"),
        ("cost differs", "differs between ranks: rank 0 has"),
        ("data differ", "ValueError: the lengths' fingerprint differs between ranks"),
        ("order differs", "ValueError: the lengths' fingerprint differs between ranks"),
        ("sizes differ", "ValueError: the number of samples differs between ranks: rank 0 has 4, rank 1 has 5"),
    ],
)
def test_every_rank_raises_the_same_sentence(ranks: list[dict[str, str]], name: str, expected: str) -> None:
    messages = [rank[name] for rank in ranks]
    assert messages[0] == messages[1]
    assert expected in messages[0]
    assert_is_one_sentence(messages[0])


@pytest.mark.parametrize("name", ["batch size differs", "shuffle differs"])
def test_what_differs_between_loaders_is_named(ranks: list[dict[str, str]], name: str) -> None:
    assert name.removesuffix(" differs").replace(" ", "_") in ranks[0][name].replace(" ", "_")


@pytest.mark.parametrize(
    ("name", "failing", "expected"),
    [
        ("lengths of one rank are bad", 1, "lengths has 3 entries but the dataset has 4 samples"),
        ("one rank has an iterable dataset", 1, "cannot balance the IterableDataset Stream"),
        ("one rank has another module", 1, "does not weight manual optimization"),
        ("reading fails on rank 0", 0, "disk of rank 0 is gone"),
    ],
)
def test_what_fails_on_one_rank_is_raised_on_all(
    ranks: list[dict[str, str]], name: str, failing: int, expected: str
) -> None:
    own, other = ranks[failing][name], ranks[1 - failing][name]
    assert expected in own
    assert expected in other
    assert f"rank {failing} failed: " in other
    assert own.split(":")[0] == other.split(":")[0], "the kinds of the errors differ"


def test_other_samples_on_a_rank_that_did_not_read_them_are_noticed() -> None:
    for message in run_ranks(run_scanned_data_that_differ, 2, timeout_s=40):
        assert "the number of samples differs between ranks" in message or "rank 1 failed" in message


def test_samples_per_step_beside_a_step_in_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"samples_per_step=8 .* step_unit='tokens' .* give one of them"):
        BalanceCallback(max_tokens=9, step_unit="tokens", samples_per_step=8)


class Ids(ScalarModel):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step({**batch, "x": batch["input_ids"]}, batch_idx)


@pytest.mark.parametrize(("lengths", "is_warned"), [([3, 1, 4, 2], False), ([3, 1, 2, 2], True)])
def test_lengths_that_the_collate_function_does_not_pad_to_are_noticed(lengths: list[int], is_warned: bool) -> None:
    data = equal_samples([3, 1, 4, 2])

    def with_ids(samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(samples)
        return {**batch, "input_ids": batch["x"]}

    train = DataLoader(data, batch_size=4, collate_fn=with_ids)
    balance = BalanceCallback(lengths=lengths, loss_reduction="token_mean", print_summary=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(callbacks=[balance]).fit(Ids(), train)
    found = [str(one.message) for one in caught if "is padded to 4 tokens, but the plan says 3" in str(one.message)]
    assert bool(found) == is_warned


def run_disagreeing(what: str) -> str:
    rank = int(os.environ["RANK"])
    data = equal_samples([1, 2, 3, 4] if rank == 0 or what != "data" else [1, 2, 4, 4])
    options: dict[str, Any] = {"print_summary": False}
    if what == "data":
        del data.lengths  # rank 0 scans for all
        options["lengths"] = "x"
    elif what == "loss_reduction":
        options["loss_reduction"] = "token_mean" if rank else "sample_mean"
    else:
        options["label_key"] = f"labels{rank}"
    try:
        trainer("ddp", 2, callbacks=[BalanceCallback(**options)]).fit(ScalarModel(), loader(data, 2))
    except ValueError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("what", ["data", "loss_reduction", "label_key"])
def test_ranks_that_differ_where_only_one_looks_are_noticed(what: str) -> None:
    for sentence in run_ranks(run_disagreeing, 2, what, timeout_s=60):
        assert f"{what} differs between ranks" in sentence
        assert "every rank needs the same data" in sentence

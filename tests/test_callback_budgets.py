"""Budgets and tails as a user of the callback or the sampler meets them."""

from __future__ import annotations

import itertools
import time
import tracemalloc
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_balance import BalanceCallback, BalancedBatchSampler
from lightning_balance.lengths_of_ranks import NUM_COMPARED
from tests.distributed import run_ranks
from tests.toys import ScalarModel, TokenDataset, collate, equal_samples, loader, trainer

LONG_TAIL = [9, 1, 2, 1, 7, 1, 1, 3, 1, 2, 1, 1, 5, 1, 1, 2, 4]


def flat(micro_batches: Sequence[Sequence[int]]) -> list[int]:
    return list(itertools.chain(*micro_batches))


def fit(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    strategy: str = "single",
    num_ranks: int = 1,
    accumulate: int = 1,
    loader_arguments: dict[str, Any] | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    **options: Any,
) -> ScalarModel:
    model = ScalarModel()
    callback = BalanceCallback(**{"loss_reduction": "token_mean", "print_summary": False, **options})
    arguments = {"accumulate_grad_batches": accumulate, "limit_val_batches": 0, **(trainer_arguments or {})}
    train = loader(dataset, batch_size, **{"shuffle": True, **(loader_arguments or {})})  # type: ignore[arg-type]
    trainer(strategy, num_ranks, callbacks=[callback], **arguments).fit(model, train)
    return model


def samplers(lengths: Any, num_ranks: int, **arguments: Any) -> list[BalancedBatchSampler]:
    return [BalancedBatchSampler(lengths, num_replicas=num_ranks, rank=rank, **arguments) for rank in range(num_ranks)]


def served(lengths: Any, num_ranks: int, **arguments: Any) -> list[list[list[int]]]:
    return [list(sampler) for sampler in samplers(lengths, num_ranks, **arguments)]


# --- the tail ---------------------------------------------------------------------------------------------------------


def run_tails(strategy: str, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    data = TokenDataset([[float(i)] * (1 + i % 3) for i in range(18)])
    for accumulate, drop_last in itertools.product((1, 2), (False, True)):
        model = fit(
            data,
            16 // (num_ranks * accumulate),
            strategy=strategy,
            num_ranks=num_ranks,
            accumulate=accumulate,
            loader_arguments={"drop_last": drop_last, "shuffle": False},
        )
        found[f"{accumulate} {drop_last}"] = (model.served, model.gradients)
    return found


TwoRanks = tuple[dict[str, Any], tuple[list[int], list[str]]]


def run_on_two_ranks() -> TwoRanks:
    return run_tails("ddp", 2), run_scans("ddp", 2)


@pytest.fixture(scope="module")
def two_ranks() -> list[TwoRanks]:
    return run_ranks(run_on_two_ranks, 2)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2)])
def test_the_tail_is_kept_once_and_is_the_mean_over_its_own_samples(
    strategy: str, num_ranks: int, two_ranks: list[TwoRanks]
) -> None:
    ranks = [tails for tails, _ in two_ranks] if num_ranks > 1 else [run_tails("single", 1)]
    values = [[float(i)] * (1 + i % 3) for i in range(18)]
    for accumulate in (1, 2):
        first, last = flat(values[:16]), flat(values[16:])
        kept = [rank[f"{accumulate} False"] for rank in ranks]
        assert kept[0][1] == pytest.approx([sum(first) / len(first), sum(last) / len(last)])
        indices = flat([flat(micro_batches) for micro_batches, _ in kept])
        num_fillers = len(indices) - 18
        assert set(indices) == set(range(18))
        assert num_fillers == max(0, accumulate * num_ranks - 2)  # the tail's two samples fill only two micro-batches
        dropped = [rank[f"{accumulate} True"] for rank in ranks]
        assert sorted(flat([flat(micro_batches) for micro_batches, _ in dropped])) == list(range(16))
        assert dropped[0][1] == pytest.approx([sum(first) / len(first)])


def test_a_tail_over_three_ranks() -> None:
    lengths = [1] * 10
    dropped_sets = set()
    for epoch in range(4):
        dropping = samplers(lengths, 3, batch_size=2, drop_last=True)
        for sampler in dropping:
            sampler.set_epoch(epoch)
        assert [len(sampler) for sampler in dropping] == [1, 1, 1]
        indices = flat(flat([list(sampler) for sampler in dropping]))
        assert len(indices) == len(set(indices)) == 6
        dropped_sets.add(frozenset(range(10)) - frozenset(indices))
    assert len(dropped_sets) > 1
    keeping = samplers(lengths, 3, batch_size=2)
    assert [len(sampler) for sampler in keeping] == [2, 2, 2]
    assert sorted(set(flat(flat([list(sampler) for sampler in keeping])))) == list(range(10))


def test_fewer_samples_than_a_step_make_one_short_step() -> None:
    model = fit(TokenDataset([[1.0], [3.0], [8.0]]), 16)
    assert sorted(flat(model.served)) == [0, 1, 2]
    assert model.gradients == pytest.approx([4.0])


# --- the cap ----------------------------------------------------------------------------------------------------------


def test_the_cap_is_a_cap() -> None:
    assert [
        [len(micro_batch) for micro_batch in rank] for rank in served([7] * 8, 1, samples_per_step=8, max_tokens=8)
    ] == [[1] * 8]
    two = served([7] * 8, 2, samples_per_step=8, max_tokens=8)
    assert [[len(micro_batch) for micro_batch in rank] for rank in two] == [[1] * 4] * 2


class PaddedSizes(ScalarModel):
    """Keeps the padded tokens of what really arrives in training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(batch["x"].numel())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({"max_tokens": 9}, 1),
        ({"max_tokens": 12, "samples_per_step": 8}, 1),
        ({"max_tokens": 18, "step_unit": "tokens"}, 2),
        ({"max_tokens": 12, "samples_per_step": 6, "lookahead": 2}, 1),
        ({"max_tokens": 12, "max_shapes": 3}, 1),
    ],
)
def test_no_batch_that_arrives_exceeds_the_budget(options: dict[str, Any], accumulate: int) -> None:
    model = PaddedSizes()
    trainer(
        callbacks=[BalanceCallback(loss_reduction="token_mean", print_summary=False, **options)],
        accumulate_grad_batches=accumulate,
        max_epochs=2,
    ).fit(model, loader(equal_samples(LONG_TAIL), 3, shuffle=True))
    assert max(model.sizes) <= options["max_tokens"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batch_size", "accumulate"), [(3, 1), (2, 2), (8, 1)])
def test_without_a_budget_the_peak_does_not_rise(seed: int, batch_size: int, accumulate: int) -> None:
    lengths = np.clip(np.random.default_rng(seed).lognormal(1.5, 1.0, 40), 1, 60).astype(int)
    model = PaddedSizes()
    trainer(
        callbacks=[BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=seed)],
        accumulate_grad_batches=accumulate,
    ).fit(model, loader(equal_samples(lengths.tolist()), batch_size, shuffle=True))
    assert max(model.sizes) <= batch_size * lengths.max()


def test_many_short_samples_are_not_one_long_one() -> None:
    # 186 samples of 806 next to one of 16,384: plain batches of 8 could reach 8 * 16,384 = 131,072 padded tokens.
    lengths = [16_384] + [806] * 255
    for sync in ("micro_batch", "step"):
        for rank in served(lengths, 8, batch_size=8, num_slots=4, sync=sync):
            for micro_batch in rank:
                assert len(micro_batch) * max(lengths[i] for i in micro_batch) <= 8 * 16_384


def test_a_rounded_up_batch_stays_within_the_budget() -> None:
    lengths = [3, 5, 9, 2, 4, 8, 1]
    for rank in served(lengths, 2, samples_per_step=7, max_tokens=16, pad_to_multiple_of=8):
        for micro_batch in rank:
            assert len(micro_batch) * -(-max(lengths[i] for i in micro_batch) // 8) * 8 <= 16


def test_the_number_of_slots_is_rounded_up_over_ranks() -> None:
    three = samplers([8, 8, 8], 2, samples_per_step=3, max_tokens=8)
    assert [len(sampler) for sampler in three] == [2, 2]
    step = three[0].plan.step(0)
    assert sum(step.is_filler(rank, slot) for rank in range(2) for slot in range(2)) == 1
    four = samplers([4, 4, 8, 8], 2, samples_per_step=4, max_tokens=8)
    assert [len(sampler) for sampler in four] == [2, 2]
    assert sorted(flat(flat([list(sampler) for sampler in four]))) == [0, 1, 2, 3]


def test_len_counts_the_served_micro_batches() -> None:
    ranks = samplers([4] * 10, 2, samples_per_step=10, max_tokens=8)
    assert [len(sampler) for sampler in ranks] == [3, 3]
    assert [len(list(sampler)) for sampler in ranks] == [3, 3]


def test_cost_and_cap_hold_together() -> None:
    lengths = [100] + [1] * 7
    for rank in served(lengths, 2, samples_per_step=8, max_tokens=100):
        for micro_batch in rank:
            assert len(micro_batch) * max(lengths[i] for i in micro_batch) <= 100


# --- one sample over the budget ---------------------------------------------------------------------------------------


def test_a_sample_over_the_budget_is_an_error_that_names_it() -> None:
    data = equal_samples([513, 100, 100])
    with pytest.raises(ValueError, match="513") as error:
        fit(data, 3, max_tokens=512, oversize="error")
    message = str(error.value)
    assert "513" in message
    assert "512" in message
    assert "sample 0" in message or "lengths[0]" in message or "index 0" in message
    assert "\n" not in message


def test_a_sample_over_the_budget_runs_alone() -> None:
    model = fit(equal_samples([513, 100, 100]), 3, max_tokens=512)
    assert sorted(map(sorted, model.served)) == [[0], [1, 2]]


def test_a_sample_over_the_budget_is_left_out_and_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit(
            equal_samples([513, 100, 100]), 3, max_tokens=512, oversize="skip", trainer_arguments={"max_epochs": 3}
        )
    assert [sorted(indices) for indices in model.served] == [[1, 2]] * 3
    said = [str(warning.message) for warning in caught if "512" in str(warning.message)]
    assert len(said) == 1
    assert "1 " in said[0]
    assert "skip" in said[0]


# --- lengths without reading ------------------------------------------------------------------------------------------


class Unreadable(Dataset[Any]):
    """Samples cannot be read until `readable` is set."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.sizes, self.readable = lengths, False

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        assert self.readable, f"sample {index} was read before training"
        return equal_samples(self.sizes)[index]


class Readable(ScalarModel):
    def on_train_start(self) -> None:
        self.trainer.train_dataloader.dataset.readable = True


@pytest.mark.parametrize("options", [{}, {"max_tokens": 9}])
def test_given_lengths_are_used_without_reading_the_data(options: dict[str, Any]) -> None:
    data = Unreadable(LONG_TAIL)
    model = Readable()
    trainer(
        callbacks=[BalanceCallback(lengths=LONG_TAIL, print_summary=False, loss_reduction="token_mean", **options)]
    ).fit(model, DataLoader(data, batch_size=2, collate_fn=collate, shuffle=True))
    assert set(flat(model.served)) == set(range(len(LONG_TAIL)))


class Counting(TokenDataset):
    def __init__(self) -> None:
        super().__init__([[1.0] * length for length in LONG_TAIL])
        del self.lengths
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return super().__getitem__(index)


def run_scans(strategy: str, num_ranks: int) -> tuple[list[int], list[str]]:
    """How often each sample was read in 2 epochs whose loader is requested anew, and the warnings about it."""
    data = Counting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            data,
            1,
            strategy=strategy,
            num_ranks=num_ranks,
            lengths="x",
            trainer_arguments={"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
        )
    return data.reads, [str(w.message) for w in caught if "one by one" in str(w.message)]


def test_a_scan_reads_each_sample_once_per_run_and_warns_once() -> None:
    reads, said = run_scans("single", 1)
    assert reads[: len(LONG_TAIL)] == list(range(len(LONG_TAIL)))
    assert sorted(reads) == sorted(list(range(len(LONG_TAIL))) * 3)  # the scan and two epochs
    assert len(said) == 1


def test_only_rank_zero_scans_and_others_read_a_few_to_compare(two_ranks: list[TwoRanks]) -> None:
    counts = [len(reads) for _, (reads, _) in two_ranks]
    # both then serve equally many micro-batches of one sample
    assert counts[0] - len(LONG_TAIL) == counts[1] - NUM_COMPARED
    assert [len(said) for _, (_, said) in two_ranks] == [1, 0]


# --- membership -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_tokens": 300}, {"max_tokens": 300, "step_unit": "tokens"}])
def test_membership_is_redrawn_every_epoch(options: dict[str, Any]) -> None:
    data = equal_samples([3 * i + 1 for i in range(64)])
    model = fit(data, 4, trainer_arguments={"max_epochs": 2}, **options)
    memberships: list[set[frozenset[int]]] = [set(), set()]
    for indices, epoch in zip(model.served, model.epochs, strict=True):
        memberships[epoch].add(frozenset(indices))
    assert len(memberships[1] - memberships[0]) > len(memberships[1]) / 2


@pytest.mark.parametrize("options", [{}, {"max_tokens": 60}])
def test_a_step_has_the_samples_of_the_plain_shuffle(options: dict[str, Any]) -> None:
    class Steps(ScalarModel):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[list[int]] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            done = sum(map(len, self.steps))
            self.steps.append(flat(self.served)[done:])

    model = Steps()
    trainer(callbacks=[BalanceCallback(seed=7, print_summary=False, loss_reduction="token_mean", **options)]).fit(
        model, loader(equal_samples(list(range(1, 31))), 6, shuffle=True)
    )
    order = np.random.default_rng([7, 0]).permutation(30)
    assert [sorted(step) for step in model.steps] == [sorted(order[i : i + 6].tolist()) for i in range(0, 30, 6)]


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_million_lengths_on_64_ranks_are_planned_in_seconds_and_little_memory() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 1_000_000), 1, 8192).astype(np.int64)
    tracemalloc.start()
    start = time.process_time()
    sampler = BalancedBatchSampler(lengths, samples_per_step=4096, max_tokens=8192, num_replicas=64, rank=3)
    num_micro_batches = len(sampler)
    first = next(iter(sampler))
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_micro_batches > 0
    assert first
    assert peak < 200 * 2**20
    assert seconds < 20  # memory tracing alone costs about half of it

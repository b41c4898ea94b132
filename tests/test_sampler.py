"""The batch sampler: exact lengths, no side effects, positions that say what they are, never sharded twice."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_balance import BalancedBatchSampler
from tests.distributed import run_ranks
from tests.toys import ScalarModel, collate, equal_samples, trainer

LENGTHS = [9, 1, 2, 1, 7, 1, 1, 3, 1, 2, 1, 1, 5, 1, 1, 2, 4]
CUTS: list[dict[str, Any]] = [
    {"batch_size": 2},
    {"batch_size": 2, "num_slots": 3},
    {"samples_per_step": 6, "max_tokens": 9},
    {"max_tokens": 9},
    {"max_tokens": 9, "num_slots": 2},
    {"samples_per_step": 4, "max_tokens": 9, "lookahead": 2},
]


def flat(micro_batches: Sequence[Sequence[int]]) -> list[int]:
    return list(itertools.chain(*micro_batches))


def sampler(rank: int = 0, num_replicas: int = 1, **arguments: Any) -> BalancedBatchSampler:
    return BalancedBatchSampler(LENGTHS, **{"num_replicas": num_replicas, "rank": rank, **arguments})


# --- lengths and indices ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from(CUTS),
    st.booleans(),
    st.integers(0, 3),
)
def test_len_is_exact_equal_on_ranks_and_every_sample_is_served(
    lengths: list[int], num_ranks: int, cut: dict[str, Any], shuffle: bool, epoch: int
) -> None:
    ranks = [
        BalancedBatchSampler(lengths, num_replicas=num_ranks, rank=rank, shuffle=shuffle, **cut)
        for rank in range(num_ranks)
    ]
    for one in ranks:
        one.set_epoch(epoch)
    served = [list(one) for one in ranks]
    assert len({len(one) for one in ranks}) == 1
    assert [len(micro_batches) for micro_batches in served] == [len(one) for one in ranks]
    assert set(flat(flat(served))) == set(range(len(lengths)))
    assert all(micro_batch for micro_batches in served for micro_batch in micro_batches)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 3), st.sampled_from(CUTS))
def test_only_fillers_repeat_a_sample(lengths: list[int], num_ranks: int, cut: dict[str, Any]) -> None:
    ranks = [BalancedBatchSampler(lengths, num_replicas=num_ranks, rank=rank, **cut) for rank in range(num_ranks)]
    plan = ranks[0].plan
    real = []
    for rank, one in enumerate(ranks):
        for position, micro_batch in enumerate(one):
            step, slot = plan.locate(position)
            if plan.step(step).is_filler(rank, slot):
                assert len(micro_batch) == 1
            else:
                real += micro_batch
    assert sorted(real) == list(range(len(lengths)))


@pytest.mark.parametrize("cut", CUTS)
def test_indices_are_python_ints_in_lists(cut: dict[str, Any]) -> None:
    for micro_batch in sampler(**cut):
        assert type(micro_batch) is list
        assert all(type(index) is int for index in micro_batch)


def test_arrays_and_tensors_are_taken_and_not_copied_to_lists() -> None:
    one = BalancedBatchSampler(np.array(LENGTHS), batch_size=2, num_replicas=1, rank=0)
    assert isinstance(one.lengths, np.ndarray)
    assert list(one) == list(sampler(batch_size=2))


# --- side effects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_iterating_and_measuring_twice_changes_nothing(cut: dict[str, Any]) -> None:
    one = sampler(**cut)
    first, length = list(one), len(one)
    assert list(one) == first
    assert len(one) == length
    interrupted = iter(one)
    next(interrupted)
    assert list(one) == first
    assert list(sampler(**cut)) == first


def test_two_iterators_at_once_do_not_disturb_each_other() -> None:
    one = sampler(batch_size=2)
    expected = list(one)
    assert list(zip(one, one, strict=True)) == list(zip(expected, expected, strict=True))


def test_no_global_random_state_is_read_or_changed() -> None:
    np.random.seed(1)  # noqa: NPY002 - this is the state that must not matter
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    first = list(sampler(batch_size=2))
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert list(sampler(batch_size=2)) == first


def test_epochs_and_seeds_are_other_orders_and_not_each_others() -> None:
    orders = {}
    for seed, epoch in itertools.product(range(3), range(3)):
        one = sampler(batch_size=1, seed=seed)
        one.set_epoch(epoch)
        orders[seed, epoch] = tuple(flat(list(one)))
    assert len(set(orders.values())) == 9  # seed 1, epoch 0 is not seed 0, epoch 1


def test_a_set_epoch_holds_from_the_next_iteration() -> None:
    one, other = sampler(batch_size=2), sampler(batch_size=2)
    other.set_epoch(1)
    running = iter(one)
    first = [next(running)]
    one.set_epoch(1)
    assert one.epoch == 1
    assert [*first, *running] == list(sampler(batch_size=2))
    assert list(one) == list(other)


def test_set_epoch_on_the_inner_sampler_is_the_same() -> None:
    # Lightning calls it there and never on the batch sampler.
    one, other = sampler(batch_size=2), sampler(batch_size=2)
    one.sampler.set_epoch(2)  # type: ignore[union-attr]
    other.set_epoch(2)
    assert one.epoch == 2
    assert list(one) == list(other)


def test_shuffle_false_is_the_same_in_every_epoch() -> None:
    one = sampler(batch_size=2, shuffle=False)
    first = list(one)
    one.set_epoch(3)
    assert list(one) == first
    assert [sorted(micro_batch) for micro_batch in first] == [[i, i + 1] for i in range(0, 16, 2)] + [[16]]


def test_it_travels_to_workers_and_other_processes() -> None:
    one = sampler(max_tokens=9)
    one.set_epoch(1)
    assert list(pickle.loads(pickle.dumps(one))) == list(one)
    served = DataLoader(equal_samples(LENGTHS), batch_sampler=one, collate_fn=collate, num_workers=2)
    assert [batch["index"].tolist() for batch in served] == list(one)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_every_position_continues_with_exactly_the_rest(cut: dict[str, Any]) -> None:
    whole = sampler(**cut)
    whole.set_epoch(1)
    expected = list(whole)
    for position in range(len(expected) + 1):
        running = sampler(**cut)
        running.set_epoch(1)
        iterator = iter(running)
        for _ in range(position):
            next(iterator)
        state = running.state_dict()
        assert state["position"] == position
        resumed = sampler(**cut)
        before = dict(state)
        resumed.load_state_dict(state)
        assert state == before
        assert resumed.epoch == 1
        assert list(resumed) == expected[position:]
        assert len(resumed) == len(expected)  # the full epoch's, as of the run that was not interrupted
        resumed.set_epoch(2)
        whole.set_epoch(2)
        assert list(resumed) == list(whole)
        whole.set_epoch(1)


def test_a_skip_is_applied_once() -> None:
    running = sampler(batch_size=2)
    iterator = iter(running)
    next(iterator)
    resumed = sampler(batch_size=2)
    resumed.load_state_dict(running.state_dict())
    list(resumed)
    resumed.set_epoch(1)
    assert sorted(flat(list(resumed))) == list(range(17))


def test_the_state_is_plain_data_that_says_what_it_depends_on() -> None:
    state = sampler(batch_size=2, seed=5).state_dict()
    assert set(state) >= {"version", "epoch", "position", "seed", "num_replicas", "num_slots", "digest", "served"}
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 99}, "version.* is 99, but this release reads version 2"),
        ({"version": None}, "version.* is None, but this release reads version 2"),
        ({"seed": 4}, "saved with seed=4, but this sampler has seed=0"),
        ({"shuffle": False}, "saved with shuffle=False, but this sampler has shuffle=True"),
        ({"lengths": "00"}, "saved with lengths='00', but this sampler has lengths="),
    ],
)
def test_a_state_of_another_order_or_other_data_is_refused_with_both_values(
    change: dict[str, Any], expected: str
) -> None:
    state = {**sampler(batch_size=2).state_dict(), **change}
    with pytest.raises(ValueError, match=expected):
        sampler(batch_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (None, "the state must be a dictionary that state_dict made, got a NoneType"),
        ({"digest": ...}, "the state lacks digest, so it is not as state_dict made it"),
        ({"num_samples": ..., "served": ...}, "the state lacks num_samples, served"),
        ({"position": -3}, r"state\['position'\] must be an integer in \[0, 9\], .* got -3"),
        ({"position": 10**6}, r"state\['position'\] must be an integer in \[0, 9\], .* got 1000000"),
        ({"position": "2"}, r"state\['position'\] must be an integer in \[0, 9\], .* got '2'"),
    ],
)
def test_what_is_no_state_is_refused_in_one_sentence(change: dict[str, Any] | None, sentence: str) -> None:
    state: Any = {**sampler(batch_size=2).state_dict(), **(change or {})}
    state = None if change is None else {name: value for name, value in state.items() if value is not ...}
    with pytest.raises(ValueError, match=sentence + ".*continue from another checkpoint, or start without the state"):
        sampler(batch_size=2).load_state_dict(state)


def test_a_refused_state_changes_nothing() -> None:
    one = sampler(batch_size=2)
    expected = list(one)
    with pytest.raises(ValueError, match="seed"):
        one.load_state_dict({**one.state_dict(), "epoch": 1, "position": 2, "seed": 9})
    assert one.epoch == 0
    assert list(one) == expected


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": 2.0}, "batch_size must be an integer >= 1, got 2.0"),
        ({"batch_size": 2, "samples_per_step": 4}, "batch_size=2 and samples_per_step=4 both set the step"),
        ({}, "samples_per_step is None"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"batch_size": 2, "rank": 1}, r"rank must be in \[0, num_replicas=1\), got 1"),
        ({"batch_size": 2, "rank": -1}, r"rank must be in \[0, num_replicas=1\), got -1"),
        ({"batch_size": 2, "num_replicas": 0}, "num_replicas must be an integer >= 1, got 0"),
        ({"batch_size": 2, "num_slots": 0}, "num_slots must be an integer >= 1, got 0"),
        ({"batch_size": 2, "sync": "auto"}, "sync must be one of"),
        ({"batch_size": 2, "oversize": "no"}, "oversize must be one of"),
        ({"batch_size": 2, "seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"batch_size": 2, "step_unit": "tokens"}, "max_tokens"),
        ({"batch_size": 40, "drop_last": True}, "drop_last"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises((TypeError, ValueError), match=expected):
        sampler(**arguments)


def test_without_a_process_group_it_serves_one_rank() -> None:
    one = BalancedBatchSampler(LENGTHS, batch_size=2)
    assert (one.num_replicas, one.rank) == (1, 0)


# --- in a DDP trainer, without the callback ---------------------------------------------------------------------------


class InTheHook(LightningDataModule):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def train_dataloader(self) -> DataLoader[Any]:
        batches = BalancedBatchSampler([2] * 16, batch_size=2, **self.arguments)
        return DataLoader(equal_samples([2] * 16), batch_sampler=batches, collate_fn=collate)


def run_sampler_in_ddp() -> dict[str, Any]:
    import os

    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}

    def run(name: str, *train: Any, datamodule: Any = None, **trainer_arguments: Any) -> None:
        model = ScalarModel()
        try:
            trainer("ddp", 2, max_epochs=2, **trainer_arguments).fit(model, *train, datamodule=datamodule)
        except Exception as error:  # noqa: BLE001 - compared below
            found[name] = f"{type(error).__name__}: {error}"
            return
        found[name] = [[i for i, seen in zip(model.served, model.epochs, strict=True) if seen == e] for e in range(2)]

    def loader(**arguments: Any) -> DataLoader[Any]:
        batches = BalancedBatchSampler([2] * 16, batch_size=2, **arguments)
        return DataLoader(equal_samples([2] * 16), batch_sampler=batches, collate_fn=collate)

    ranks = {"rank": rank, "num_replicas": 2}
    for use in (True, False):
        run(f"hook, explicit ranks, {use}", datamodule=InTheHook(**ranks), use_distributed_sampler=use)
        run(f"hook, {use}", datamodule=InTheHook(), use_distributed_sampler=use)
    run("argument, explicit ranks, False", loader(**ranks), use_distributed_sampler=False)
    run("argument, explicit ranks, True", loader(**ranks))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_sampler_in_ddp, 2, timeout_s=60)


@pytest.mark.parametrize(
    "name",
    [
        "hook, explicit ranks, True",
        "hook, explicit ranks, False",
        "hook, True",
        "hook, False",
        "argument, explicit ranks, True",
        "argument, explicit ranks, False",
    ],
)
def test_in_a_ddp_trainer_nothing_is_sharded_twice(ranks: list[dict[str, Any]], name: str) -> None:
    expected = [BalancedBatchSampler([2] * 16, batch_size=2, num_replicas=2, rank=rank) for rank in range(2)]
    for epoch in range(2):
        for one in expected:
            one.set_epoch(epoch)
        assert not isinstance(ranks[0][name], str), ranks[0][name]
        assert [rank[name][epoch] for rank in ranks] == [list(one) for one in expected]


def test_options_that_changed_are_named_with_both_values() -> None:
    state = BalancedBatchSampler([4] * 12, batch_size=2, num_replicas=1, rank=0).state_dict()
    other = BalancedBatchSampler([4] * 12, batch_size=3, num_replicas=2, rank=0, max_tokens=8)
    assert other.changes_since(state) == {
        "num_replicas": (1, 2), "samples_per_step": (2, 6), "max_tokens": (None, 8)
    }  # fmt: skip


def test_the_position_is_that_of_the_current_epoch() -> None:
    one = sampler(batch_size=2)
    list(one)
    one.set_epoch(1)
    assert (one.state_dict()["epoch"], one.state_dict()["position"]) == (1, 0)


def test_a_state_of_other_data_says_so() -> None:
    state = BalancedBatchSampler([4] * 12, batch_size=2, num_replicas=1, rank=0).state_dict()
    with pytest.raises(ValueError, match="saved with num_samples=12, but this sampler has num_samples=13"):
        BalancedBatchSampler([4] * 13, batch_size=2, num_replicas=1, rank=0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with lengths='.*', but this sampler has lengths='.*'"):
        BalancedBatchSampler([4] * 11 + [5], batch_size=2, num_replicas=1, rank=0).load_state_dict(state)

"""The plan of an epoch: membership, tails, budgets, fairness, and how lazily it works."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lightning_balance.cost import CostModel
from lightning_balance.epoch import plan_epoch
from lightning_balance.lookahead import LOW_CAPS, TIME_FOR_LOW_PEAK, deal_slots, slots_of_steps
from lightning_balance.partition import turn_of
from lightning_balance.shuffle import LARGEST_DRAWN_AT_ONCE, EpochOrder

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 500), 4, 600).astype(np.int64)


def served(plan):
    """Dataset indices of each step, read micro-batch by micro-batch."""
    return [
        np.concatenate(
            [
                step.micro_batch(rank, slot)
                for slot in range(step.num_slots)
                for rank in range(step.num_ranks)
                if not step.is_filler(rank, slot)
            ]
        )
        for step in map(plan.step, range(plan.num_steps))
    ]


def test_the_samples_of_a_step_are_the_slice_of_the_plain_shuffle():
    plan = plan_epoch(LENGTHS, samples_per_step=32, num_ranks=2, num_slots=2, seed=3, epoch=5)
    order = np.random.default_rng([3, 5]).permutation(len(LENGTHS))
    for index, samples in enumerate(served(plan)):
        assert set(samples.tolist()) == set(order[index * 32 : (index + 1) * 32].tolist())


def test_without_shuffling_steps_follow_the_dataset():
    """PL#20326: eight equal lengths on two ranks are read 0..7 in step order, both epochs alike."""
    for epoch in (0, 1):
        plan = plan_epoch([4] * 8, samples_per_step=4, num_ranks=2, num_slots=2, shuffle=False, epoch=epoch)
        assert [sorted(samples.tolist()) for samples in served(plan)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("num_ranks", "num_slots"), [(1, 1), (2, 2)])
def test_the_tail_is_kept_once(num_ranks, num_slots):
    """HF#47340."""
    arguments = {"samples_per_step": 16, "num_ranks": num_ranks, "num_slots": num_slots}
    plan = plan_epoch(LENGTHS[:18], **arguments)
    steps = served(plan)
    assert sorted(np.concatenate(steps).tolist()) == list(range(18))
    assert len(steps[-1]) == 2
    assert plan.num_samples == 18
    shorter = plan_epoch(LENGTHS[:18], drop_last=True, **arguments)
    assert (shorter.num_steps, shorter.num_samples) == (1, 16)


def test_fewer_samples_than_a_step_give_one_short_step():
    plan = plan_epoch([5, 6, 7], samples_per_step=16, num_ranks=2, num_slots=2)
    assert plan.num_steps == 1
    assert sorted(served(plan)[0].tolist()) == [0, 1, 2]


def test_fewer_samples_than_a_step_are_an_error_with_drop_last():
    with pytest.raises(ValueError, match="an epoch would be empty: 3 samples are fewer than samples_per_step=16"):
        plan_epoch([5, 6, 7], samples_per_step=16, num_ranks=2, drop_last=True)


def test_a_tail_across_ranks_is_whole_or_left_out():
    """lhotse#1277: 10 samples, batch 2, 3 ranks."""
    arguments = {"samples_per_step": 6, "num_ranks": 3}
    dropped = []
    for epoch in range(4):
        plan = plan_epoch(LENGTHS[:10], drop_last=True, epoch=epoch, **arguments)
        assert plan.num_micro_batches == 1
        used = np.concatenate(served(plan)).tolist()
        assert len(set(used)) == len(used) == 6
        dropped.append(frozenset(range(10)) - set(used))
    assert len(set(dropped)) > 1
    whole = plan_epoch(LENGTHS[:10], **arguments)
    assert whole.num_micro_batches == 2
    assert sorted(np.concatenate(served(whole)).tolist()) == list(range(10))


def test_length_is_exact_with_a_budget():
    """PL#2351: ten samples of 4 under a budget of 8 on two ranks: 5 real micro-batches, 6 served, 3 on each rank."""
    plan = plan_epoch([4] * 10, samples_per_step=10, num_ranks=2, max_tokens=8)
    assert plan.num_micro_batches == 3
    assert plan.step(0).num_samples.sum() == 10


def test_membership_is_redrawn_every_epoch():
    """lhotse#562: more than half of the micro-batches differ as sets."""
    lengths = np.arange(1, 65)
    epochs = []
    for epoch in (0, 1):
        plan = plan_epoch(lengths, samples_per_step=16, num_ranks=2, num_slots=2, epoch=epoch)
        steps = map(plan.step, range(plan.num_steps))
        epochs.append(
            {frozenset(s.micro_batch(rank, slot).tolist()) for s in steps for rank in (0, 1) for slot in (0, 1)}
        )
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) / 2


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_no_rank_is_always_the_heaviest(sync):
    """speculators#867: each rank leads 15-35 % of the micro-steps, and mean costs agree within 3 %."""
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1, 4096), 16, 1024).astype(np.int64)
    plan = plan_epoch(lengths, samples_per_step=64, num_ranks=4, num_slots=4, sync=sync)
    costs = np.concatenate([plan.step(index).costs for index in range(plan.num_steps)])
    share = np.bincount(costs.argmax(axis=1), minlength=4) / len(costs)
    assert share.min() >= 0.15
    assert share.max() <= 0.35
    means = costs.mean(axis=0)
    assert means.max() / means.min() <= 1.03


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_steps_of_tokens_lose_nothing_and_hold_the_cap(lookahead, num_slots):
    plan = plan_epoch(LENGTHS, num_ranks=2, num_slots=num_slots, max_tokens=1200, lookahead=lookahead)
    assert sorted(np.concatenate(served(plan)).tolist()) == list(range(len(LENGTHS)))
    for index in range(plan.num_steps):
        assert plan.step(index).padded_tokens.max() <= 1200
        assert plan.step(index).num_slots == num_slots


def test_a_step_of_tokens_takes_the_longest_prefix_that_fits():
    plan = plan_epoch(LENGTHS, num_ranks=2, num_slots=2, max_tokens=1200)
    order = np.random.default_rng([0, 0]).permutation(len(LENGTHS))
    begin = 0
    for index, samples in enumerate(served(plan)[:-1]):
        assert set(samples.tolist()) == set(order[begin : begin + len(samples)].tolist())
        one_more = LENGTHS[order[begin : begin + len(samples) + 1]]
        too_full = plan_epoch(one_more, samples_per_step=len(one_more), num_ranks=2, num_slots=2, max_tokens=1200)
        with pytest.raises(ValueError, match="does not hold"):
            too_full.step(0)
        begin += len(samples)
        assert index < plan.num_steps


def test_steps_of_tokens_drop_a_last_step_that_is_not_full():
    lengths = [4] * 27  # four micro-batches of three: two steps and a quarter
    full = plan_epoch(lengths, num_ranks=2, num_slots=2, max_tokens=12)
    dropped = plan_epoch(lengths, num_ranks=2, num_slots=2, max_tokens=12, drop_last=True)
    assert (full.num_steps, full.num_samples) == (3, 27)
    assert (dropped.num_steps, dropped.num_samples) == (2, 24)
    with pytest.raises(ValueError, match="an epoch would be empty"):
        plan_epoch([4, 4], num_ranks=2, num_slots=2, max_tokens=100, drop_last=True)


def test_lookahead_exchanges_samples_only_inside_its_window():
    order = np.random.default_rng([0, 0]).permutation(len(LENGTHS))
    plan = plan_epoch(LENGTHS, samples_per_step=32, num_ranks=2, num_slots=2, lookahead=4)
    steps = served(plan)
    for begin in range(0, plan.num_steps, 4):
        window = np.concatenate(steps[begin : begin + 4])
        assert set(window.tolist()) == set(order[begin * 32 : (begin + 4) * 32].tolist())


def test_lookahead_saves_time_and_spreads_samples_evenly():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 4096), 16, 1024).astype(np.int64)
    times, counts = {}, {}
    for lookahead in (1, 8):
        plan = plan_epoch(lengths, samples_per_step=256, num_ranks=8, num_slots=4, lookahead=lookahead)
        steps = [plan.step(index) for index in range(plan.num_steps)]
        times[lookahead] = sum(step.modelled_time() for step in steps)
        counts[lookahead] = [int(step.num_samples.sum()) for step in steps]
    assert times[8] < 0.96 * times[1]
    assert max(counts[8]) < 1.6 * 256
    assert min(counts[8]) > 0.6 * 256


def test_long_samples_of_a_window_fill_no_micro_batch_where_others_have_room(monkeypatch):
    lengths = np.clip(np.random.default_rng(2).lognormal(5.5, 0.8, 1024), 16, 1024).astype(np.int64)
    times, largest = {}, {}
    for shares in ((), LOW_CAPS):
        monkeypatch.setattr("lightning_balance.lookahead.LOW_CAPS", shares)
        plan = plan_epoch(lengths, samples_per_step=32, num_ranks=2, num_slots=2, lookahead=8)
        steps = [plan.step(index) for index in range(plan.num_steps)]
        times[shares] = sum(step.modelled_time() for step in steps)
        largest[shares] = max(step.padded_tokens.max() for step in steps) / (8 * lengths.max())
    assert largest[()] > 0.9
    assert largest[LOW_CAPS] <= 0.75
    assert times[LOW_CAPS] <= (1 + TIME_FOR_LOW_PEAK) * times[()]


def test_every_step_of_a_window_has_a_sample_also_where_samples_are_few():
    plan = plan_epoch([5] * 9, samples_per_step=3, num_ranks=4, num_slots=2, lookahead=3)
    assert [len(samples) for samples in served(plan)] == [3, 3, 3]


def test_ranks_that_wait_once_a_step_are_rebalanced_inside_a_window():
    arguments = {"samples_per_step": 64, "num_ranks": 4, "num_slots": 4, "lookahead": 4}
    by_slot, by_step = (plan_epoch(LENGTHS, sync=sync, **arguments) for sync in ("micro_batch", "step"))
    times = [sum(plan.step(i).modelled_time("step") for i in range(plan.num_steps)) for plan in (by_slot, by_step)]
    assert times[1] < times[0]
    assert [sorted(a.tolist()) for a in served(by_slot)] == [sorted(b.tolist()) for b in served(by_step)]


def test_slots_are_shared_out_evenly():
    assert slots_of_steps(7, 3).tolist() == [3, 2, 2]
    dealt = deal_slots(np.arange(1, 8), 3, np.random.default_rng(0))
    assert sorted(np.concatenate(dealt).tolist()) == list(range(7))
    assert [len(slots) for slots in dealt] == [3, 2, 2]


def test_skipped_samples_are_dataset_indices_and_never_served():
    lengths = LENGTHS.copy()
    lengths[[7, 300]] = 5000
    plan = plan_epoch(lengths, samples_per_step=32, num_ranks=2, max_tokens=700, oversize="skip")
    assert plan.skipped.tolist() == [7, 300]
    assert sorted(np.concatenate(served(plan)).tolist()) == sorted(set(range(500)) - {7, 300})
    order = np.random.default_rng([0, 0]).permutation(500)
    first = [index for index in order.tolist() if index not in (7, 300)][:32]
    assert set(served(plan)[0].tolist()) == set(first)


def test_an_oversize_sample_is_reported_before_any_step():
    lengths = [5] * 40 + [513]
    with pytest.raises(ValueError, match=r"lengths\[40\] is 513.*max_tokens=512"):
        plan_epoch(lengths, samples_per_step=4, num_ranks=2, max_tokens=512, oversize="error")


def test_the_default_cap_is_what_plain_batches_could_reach_in_every_step():
    lengths = np.concatenate([np.full(400, 20), np.full(8, 1000)])
    plan = plan_epoch(lengths, samples_per_step=32, num_ranks=2, num_slots=2, lookahead=4)
    peak = max(plan.step(index).padded_tokens.max() for index in range(plan.num_steps))
    assert peak <= 8 * 1000


@pytest.mark.parametrize(
    "arguments",
    [
        {"samples_per_step": 32, "num_slots": 2},
        {"samples_per_step": 32, "max_tokens": 700},
        {"samples_per_step": 32, "max_tokens": 700, "cost": CostModel(intercept=300.0)},
        {"samples_per_step": 32, "max_tokens": 700, "lookahead": 3},
        {"samples_per_step": 32, "max_tokens": 700, "lookahead": 3, "cost": CostModel(intercept=300.0)},
        {"max_tokens": 700, "num_slots": 2},
    ],
)
def test_the_number_of_slots_of_every_step_is_exact(arguments):
    plan = plan_epoch(LENGTHS, num_ranks=2, **arguments)
    told = plan.num_slots_per_step.tolist()
    assert told == [plan.step(index).num_slots for index in range(plan.num_steps)]
    assert plan.num_micro_batches == sum(told)


def test_locate_finds_every_micro_batch():
    plan = plan_epoch(LENGTHS, samples_per_step=32, num_ranks=2, max_tokens=700)
    places = [(step, slot) for step, count in enumerate(plan.num_slots_per_step) for slot in range(count)]
    assert [plan.locate(index) for index in range(plan.num_micro_batches)] == places
    for index in (-1, plan.num_micro_batches):
        with pytest.raises(IndexError, match="micro_batch_index must be in"):
            plan.locate(index)


def test_a_step_that_does_not_exist_is_an_error():
    plan = plan_epoch(LENGTHS, samples_per_step=32, num_ranks=2)
    for index in (-1, plan.num_steps):
        with pytest.raises(IndexError, match=r"step must be in \[0, 16\)"):
            plan.step(index)


def test_steps_come_out_alike_in_any_order():
    forward, backward = (plan_epoch(LENGTHS, num_ranks=2, num_slots=2, max_tokens=900, lookahead=2) for _ in range(2))
    steps = [forward.step(index) for index in range(forward.num_steps)]
    for index in reversed(range(backward.num_steps)):
        np.testing.assert_array_equal(backward.step(index).order, steps[index].order)
        np.testing.assert_array_equal(backward.step(index).starts, steps[index].starts)


def test_max_shapes_limits_the_padded_lengths_of_the_whole_epoch():
    plan = plan_epoch(LENGTHS, samples_per_step=32, num_ranks=2, num_slots=2, max_shapes=4, pad_to_multiple_of=8)
    shapes = np.unique(np.concatenate([plan.step(index).padded_lengths.ravel() for index in range(plan.num_steps)]))
    assert len(shapes) <= 4
    assert (shapes % 8 == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "samples_per_step is None"),
        ({"samples_per_step": 0}, "samples_per_step must be an integer >= 1"),
        ({"samples_per_step": 4, "step_unit": "tokens"}, "give max_tokens"),
        ({"samples_per_step": 4, "step_unit": "words"}, "step_unit must be one of 'samples', 'tokens'"),
        ({"samples_per_step": 10**20}, "samples_per_step must be an integer from 1 to 9223372036854775807, got 1"),
        ({"samples_per_step": 4, "pad_to_multiple_of": 2**41}, "pad_to_multiple_of must be an integer from 1 to 10995"),
        ({"samples_per_step": 4, "lookahead": 0}, "lookahead must be an integer >= 1"),
        ({"samples_per_step": 4, "seed": -1}, "seed must be an integer >= 0"),
        ({"samples_per_step": 4, "epoch": -1}, "epoch must be an integer >= 0"),
        ({"samples_per_step": 4, "num_ranks": 0}, "num_ranks must be an integer >= 1"),
        ({"max_tokens": 3, "oversize": "skip"}, "all 5 samples are longer than max_tokens=3"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_epoch([5] * 5, **{"num_ranks": 2, **arguments})


def test_a_setting_that_is_not_used_is_said():
    with pytest.warns(UserWarning, match="samples_per_step is not used"):
        plan_epoch([5] * 5, samples_per_step=2, num_ranks=1, max_tokens=10, step_unit="tokens")


def test_the_order_of_a_very_large_epoch_is_a_permutation():
    num = LARGEST_DRAWN_AT_ONCE + 12_345
    order = EpochOrder(num, seed=1, epoch=2, shuffle=True)
    everything = order.slice(0, num)
    assert np.bincount(everything, minlength=num).max() == 1
    np.testing.assert_array_equal(order.slice(1000, 1100), everything[1000:1100])
    other = EpochOrder(num, seed=1, epoch=3, shuffle=True).slice(0, 10_000)
    assert (other != everything[:10_000]).mean() > 0.99
    # places and values are not correlated, and every tenth of the values is hit alike
    assert abs(np.corrcoef(np.arange(num), everything)[0, 1]) < 0.005
    tenths = np.bincount(everything[:100_000] * 10 // num, minlength=10)
    assert np.abs(tenths - 10_000).max() < 500


def test_the_first_step_of_a_long_epoch_is_planned_alone():
    calls = 0

    def cost(num_samples, padded_length):
        nonlocal calls
        calls += 1
        return num_samples * padded_length

    lengths = np.random.default_rng(0).choice([10, 20, 50, 70], 300_000)
    plan = plan_epoch(lengths, samples_per_step=64, num_ranks=4, num_slots=4, cost=cost)
    plan.step(0)
    assert calls < plan.num_steps / 4


def test_a_callable_is_asked_only_for_micro_batches_that_the_cap_allows():
    largest = 0

    def cost(num_samples, padded_length):
        nonlocal largest
        largest = max(largest, int(np.max(num_samples * padded_length)))
        return num_samples * padded_length

    plan_epoch([10] * 5000, samples_per_step=64, num_ranks=4, num_slots=4, cost=cost).step(0)
    assert largest <= (4 + 1) * 10  # one sample more is asked about before the cap forbids it


def test_a_million_samples_under_a_budget_stay_small_in_memory():
    """fairchem#267."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 1_000_000), 16, 1024).astype(np.int64)
    tracemalloc.start()
    plan = plan_epoch(lengths, num_ranks=64, num_slots=4, max_tokens=8192)
    assert plan.num_samples == 1_000_000
    assert (plan.num_slots_per_step == 4).all()
    plan.step(plan.num_steps - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


@pytest.mark.parametrize("num_ranks", [2, 3, 7, 64, 512])
def test_any_few_steps_spread_the_heaviest_place_over_the_ranks(num_ranks):
    turn = turn_of(num_ranks)
    assert len({turn * step % num_ranks for step in range(num_ranks)}) == num_ranks
    num_steps = min(num_ranks, 8)
    heavy = np.sort([turn * step % num_ranks for step in range(num_steps)])
    gaps = np.diff(np.append(heavy, heavy[0] + num_ranks))
    assert gaps.max() <= max(3 * num_ranks / num_steps, 1)


@pytest.mark.parametrize("lookahead", [1, 4])
def test_counting_the_micro_batches_of_a_priced_budget_plans_nothing_twice(lookahead, monkeypatch):
    arguments = {"samples_per_step": 32, "max_tokens": 700, "lookahead": lookahead, "num_ranks": 2}
    priced = CostModel(intercept=300.0)
    fresh = plan_epoch(LENGTHS, cost=priced, **arguments)
    expected = [micro_batches(fresh.step(index)) for index in range(fresh.num_steps)]
    counted = plan_epoch(LENGTHS, cost=priced, **arguments)
    num_slots = counted.num_slots_per_step
    monkeypatch.setattr("lightning_balance.lookahead.cut_within_budget", None)  # all cuts are known by now
    steps = [counted.step(index) for index in range(counted.num_steps)]
    assert [step.num_slots for step in steps] == num_slots.tolist()
    assert [micro_batches(step) for step in steps] == expected


def micro_batches(step):
    """Every micro-batch of a step, slot by slot."""
    return [step.micro_batch(rank, slot).tolist() for slot in range(step.num_slots) for rank in range(step.num_ranks)]

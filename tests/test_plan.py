"""The plan of one step: cases from public reports, the figures it gives, and what it says about bad input."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest

from lightning_balance.cost import CostModel
from lightning_balance.plan import plan_step
from lightning_balance.validation import check_choice, check_positive_int, validate_lengths


def micro_batches(plan):
    return [plan.micro_batch(rank, slot).tolist() for slot in range(plan.num_slots) for rank in range(plan.num_ranks)]


def num_fillers(plan):
    return sum(plan.is_filler(rank, slot) for slot in range(plan.num_slots) for rank in range(plan.num_ranks))


class TestOneSampleOverTheBudget:
    """fairseq#2063: max_tokens 512, lengths 513, 100, 100."""

    def test_single_is_a_micro_batch_of_its_own(self):
        assert sorted(micro_batches(plan_step([513, 100, 100], num_ranks=1, max_tokens=512))) == [[0], [1, 2]]

    def test_error_names_index_length_and_budget(self):
        with pytest.raises(ValueError, match=r"lengths\[0\] is 513.*max_tokens=512"):
            plan_step([513, 100, 100], num_ranks=1, max_tokens=512, oversize="error")

    def test_skip_leaves_it_out_and_says_so(self):
        plan = plan_step([513, 100, 100], num_ranks=1, max_tokens=512, oversize="skip")
        assert micro_batches(plan) == [[1, 2]]
        assert plan.skipped.tolist() == [0]

    def test_skipping_everything_is_an_error(self):
        with pytest.raises(ValueError, match="leaves no sample"):
            plan_step([513, 600], num_ranks=1, max_tokens=512, oversize="skip")

    def test_padding_counts(self):
        with pytest.raises(ValueError, match=r"lengths\[1\] is 510 \(padded to 520\), above max_tokens=512"):
            plan_step([8, 510], num_ranks=1, max_tokens=512, pad_to_multiple_of=8 * 5, oversize="error")


def test_the_cap_is_a_cap():
    """verl#7553: eight samples of 7 under a cap of 8, never 14 tokens."""
    plan = plan_step([7] * 8, num_ranks=2, max_tokens=8)
    assert plan.num_slots == 4
    assert (plan.padded_tokens == 7).all()
    assert num_fillers(plan) == 0


def test_slots_are_rounded_up_over_ranks_with_a_filler():
    """OpenRLHF#1287."""
    plan = plan_step([8, 8, 8], num_ranks=2, max_tokens=8)
    assert (plan.num_slots, plan.num_ranks) == (2, 2)
    assert num_fillers(plan) == 1


def test_real_micro_batches_are_split_before_fillers_are_added():
    """OpenRLHF#1287."""
    plan = plan_step([4, 4, 8, 8], num_ranks=2, max_tokens=8)
    assert plan.num_slots == 2
    assert num_fillers(plan) == 0
    assert sorted(micro_batches(plan)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_cost_and_cap_hold_together(sync):
    """miles#1938."""
    plan = plan_step([100, *[1] * 7], num_ranks=2, max_tokens=100, sync=sync)
    assert plan.padded_tokens.max() <= 100
    assert plan.num_samples.sum() == 8


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_balancing_does_not_raise_the_peak(sync):
    """A published sampler put 186 samples of 806 into one micro-batch where plain batches reach 131,072 tokens."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        lengths = np.concatenate([rng.integers(20, 800, 250), rng.integers(8_000, 16_384, 6)])
        plan = plan_step(lengths, num_ranks=8, num_slots=4, sync=sync)
        assert plan.padded_tokens.max() <= 8 * lengths.max()


def test_fewer_samples_than_ranks_give_fillers_that_copy_the_shortest():
    """PL#9785."""
    plan = plan_step([9, 4], num_ranks=4)
    fillers = [rank for rank in range(4) if plan.is_filler(rank, 0)]
    assert len(fillers) == 2
    assert all(plan.micro_batch(rank, 0).tolist() == [1] for rank in fillers)
    assert (plan.costs > 0).all()
    assert sorted(plan.num_samples.ravel().tolist()) == [0, 0, 1, 1]
    assert plan.real_tokens.sum() == 13
    assert plan.padded_tokens.sum() == 9 + 4 + 4 + 4


def test_a_fixed_number_of_slots_stays_also_with_one_sample():
    plan = plan_step([5], num_ranks=2, num_slots=3)
    assert plan.costs.shape == (3, 2)
    assert num_fillers(plan) == 5


def test_slots_that_do_not_fit_name_what_would_do():
    lengths = [8] * 6
    with pytest.raises(ValueError, match=r"use num_slots >= 3 or max_tokens >= 16") as error:
        plan_step(lengths, num_ranks=2, num_slots=2, max_tokens=8)
    assert "max_tokens=8 does not hold 6 samples in num_slots=2 on num_ranks=2" in str(error.value)
    assert plan_step(lengths, num_ranks=2, num_slots=3, max_tokens=8).num_slots == 3
    assert plan_step(lengths, num_ranks=2, num_slots=2, max_tokens=16).num_slots == 2


def test_a_budget_uses_the_fewest_slots_where_micro_batches_have_no_price():
    lengths = np.random.default_rng(1).integers(1, 100, 64)
    plan = plan_step(lengths, num_ranks=2, max_tokens=400)
    with pytest.raises(ValueError, match=f"num_slots >= {plan.num_slots}"):
        plan_step(lengths, num_ranks=2, num_slots=plan.num_slots - 1, max_tokens=400)


def test_a_budget_uses_more_slots_where_they_save_more_padding_than_they_cost():
    # one slot would pad everything to 100; a second one costs 2 but saves nearly all of that
    lengths = [100, *[1] * 9]
    cost = CostModel(intercept=2.0, alpha=0.0)
    plan = plan_step(lengths, num_ranks=1, max_tokens=1000, cost=cost)
    assert plan.num_slots == 2
    assert plan.modelled_time() == pytest.approx(100 + 9 + 2 * 2)
    expensive = plan_step(lengths, num_ranks=1, max_tokens=1000, cost=CostModel(intercept=1e4, alpha=0.0))
    assert expensive.num_slots == 1


def test_figures_equal_those_of_the_micro_batches():
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 300, 70)
    model = CostModel(intercept=11.0, alpha=0.02)
    plan = plan_step(lengths, num_ranks=3, num_slots=4, cost=model, pad_to_multiple_of=16)
    for slot in range(4):
        for rank in range(3):
            own = lengths[plan.micro_batch(rank, slot)]
            padded = -(-own.max() // 16) * 16
            assert plan.num_samples[slot, rank] == len(own)
            assert plan.padded_lengths[slot, rank] == padded
            assert plan.padded_tokens[slot, rank] == padded * len(own)
            assert plan.real_tokens[slot, rank] == own.sum()
            assert plan.costs[slot, rank] == pytest.approx(model.cost(len(own), padded))


def test_modelled_time_follows_where_ranks_wait():
    plan = plan_step(np.random.default_rng(3).integers(1, 300, 70), num_ranks=3, num_slots=4)
    assert plan.modelled_time("micro_batch") == pytest.approx(plan.costs.max(axis=1).sum())
    assert plan.modelled_time("step") == pytest.approx(plan.costs.sum(axis=0).max())


def test_rotation_moves_every_micro_batch_to_another_rank():
    plan = plan_step([9, 7, 5, 3, 2, 1], num_ranks=3, num_slots=2)
    turned = plan.rotated(4)
    for slot in range(2):
        for rank in range(3):
            np.testing.assert_array_equal(turned.micro_batch((rank + 1) % 3, slot), plan.micro_batch(rank, slot))
    assert turned.modelled_time() == plan.modelled_time()


def test_samples_of_equal_length_keep_their_order():
    plan = plan_step([5] * 12, num_ranks=2, num_slots=2)
    assert plan.order.tolist() == list(range(12))
    for batch in micro_batches(plan):
        assert batch == sorted(batch)


def test_max_shapes_limits_the_padded_lengths():
    lengths = np.random.default_rng(4).integers(1, 1000, 200)
    plan = plan_step(lengths, num_ranks=4, num_slots=4, max_shapes=3, pad_to_multiple_of=8)
    assert len(np.unique(plan.padded_lengths)) <= 3
    assert (plan.padded_lengths % 8 == 0).all()
    longest = np.array([[lengths[plan.micro_batch(rank, slot)].max() for rank in range(4)] for slot in range(4)])
    assert (plan.padded_lengths >= longest).all()


def test_a_callable_gives_the_plan_of_the_model_it_computes():
    lengths = np.random.default_rng(5).integers(1, 300, 60)
    model = CostModel(intercept=20.0, alpha=0.01)
    by_model = plan_step(lengths, num_ranks=3, num_slots=3, cost=model)
    by_callable = plan_step(lengths, num_ranks=3, num_slots=3, cost=lambda n, length: model.cost(n, length))
    assert by_callable.modelled_time() == pytest.approx(by_model.modelled_time(), rel=0.01)


def test_a_cost_that_is_not_linear_in_the_count_is_followed():
    # hardware that runs up to 8 samples at once for the price of one
    plan = plan_step([10] * 32, num_ranks=2, num_slots=2, cost=lambda n, length: np.ceil(n / 8) * length)
    assert (plan.num_samples == 8).all()


def test_a_plan_is_the_same_every_time():
    lengths = np.random.default_rng(6).integers(1, 300, 500)
    first, second = (plan_step(lengths, num_ranks=8, num_slots=4) for _ in range(2))
    np.testing.assert_array_equal(first.order, second.order)
    np.testing.assert_array_equal(first.starts, second.starts)


def test_planning_leaves_lengths_and_global_randomness_alone():
    lengths = np.arange(1, 50)
    kept, state = lengths.copy(), np.random.get_state()[1].copy()  # noqa: NPY002
    plan_step(lengths, num_ranks=4, num_slots=2)
    np.testing.assert_array_equal(lengths, kept)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be an integer >= 1, got 0"),
        ({"num_slots": 0}, "num_slots must be an integer >= 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"pad_to_multiple_of": -8}, "pad_to_multiple_of must be an integer >= 1, got -8"),
        ({"max_shapes": 0}, "max_shapes must be an integer >= 1, got 0"),
        ({"sync": "epoch"}, "sync must be one of 'micro_batch', 'step', got 'epoch'"),
        ({"oversize": "drop"}, "oversize must be one of 'single', 'error', 'skip', got 'drop'"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_step([1, 2], **{"num_ranks": 1, **arguments})


@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_a_number_of_ranks_that_is_no_integer_is_refused(value):
    with pytest.raises(TypeError, match="num_ranks must be an integer"):
        plan_step([1, 2], num_ranks=value)


@pytest.mark.parametrize(("rank", "slot", "name"), [(2, 0, "rank"), (-1, 0, "rank"), (0, 1, "slot")])
def test_a_place_that_does_not_exist_is_an_error(rank, slot, name):
    with pytest.raises(IndexError, match=f"{name} must be in"):
        plan_step([1, 2], num_ranks=2).micro_batch(rank, slot)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths is empty"),
        ([3, -1, 2], r"lengths\[1\] is -1; every length must be at least 1"),
        ([3, 0, 2], r"lengths\[1\] is 0.*1 of 3"),
        ([0, 0], "all lengths are zero"),
        ([3.0, float("nan")], r"lengths\[1\] is nan; every length must be a whole number"),
        ([3.0, 2.5], r"lengths\[1\] is 2.5; every length must be a whole number"),
        ([3.0, float("inf")], r"lengths\[1\] is inf"),
        ([[1, 2], [3, 4]], r"1-D.*\(2, 2\)"),
        ([[1, 2], [3]], "1-D"),
        ([1, [2, 3]], r"1-D.*lengths\[1\] is \[2, 3\] \(list\)"),
        ({"a": 3}, r"1-D.*got {'a': 3}"),
        ([2**50], r"lengths\[0\]"),
    ],
)
def test_bad_lengths_are_named(lengths, message):
    with pytest.raises(ValueError, match=message):
        validate_lengths(lengths)


@pytest.mark.parametrize("lengths", [["a", "b"], [True, False], [None, 3]])
def test_lengths_that_are_no_numbers_are_refused(lengths):
    with pytest.raises(TypeError, match="lengths must be numbers"):
        validate_lengths(lengths)


@pytest.mark.parametrize(
    ("lengths", "index", "value"),
    [
        ([1, None, 3], 1, "None (NoneType)"),
        ([1, 2, "x"], 2, "'x' (str)"),
        (("1", 2), 0, "'1' (str)"),
        ([3, True], 1, "True (bool)"),
        ([1, 2, np.True_], 2, f"{np.True_!r} ({type(np.True_).__name__})"),
        ([1, 2j], 1, "2j (complex)"),
        ([1, 10**20], 1, "100000000000000000000 (int)"),
        ([1, date(2026, 1, 2)], 1, "datetime.date(2026, 1, 2) (date)"),
        (np.array([3, [4]], dtype=object), 1, "[4] (list)"),
        (np.array(["2026-01-02"], dtype="datetime64[D]"), 0, "np.datetime64('2026-01-02') (datetime64)"),
    ],
    ids=str,
)
def test_the_first_length_that_is_no_number_is_named_as_it_was_given(lengths, index, value):
    with pytest.raises(TypeError) as caught:
        validate_lengths(lengths)
    shown = str(caught.value).replace("numpy.datetime64", "np.datetime64")  # before NumPy 2
    assert f"lengths must be numbers, but lengths[{index}] is {value}; give one whole number from 1 to" in shown


def test_a_long_value_is_named_by_its_beginning():
    with pytest.raises(ValueError, match=r"lengths\[0\] is \[0, 1, 2, .*\.\.\.\] \(list\)") as caught:
        validate_lengths([list(range(1000)), [3]])
    assert len(str(caught.value)) < 150


def test_a_wrong_number_of_lengths_names_both():
    with pytest.raises(ValueError, match="lengths has 3 entries but the dataset has 4 samples"):
        validate_lengths([1, 2, 3], num_samples=4)


def test_whole_numbers_in_any_container_are_taken():
    arrays = [np.array([3, 1], dtype=dtype) for dtype in (np.uint16, np.float64, object)]
    for lengths in ([3, 1], (3, 1), range(3, 5), *arrays):
        assert validate_lengths(lengths).dtype == np.int64


def test_checks_return_what_they_checked():
    assert check_positive_int("n", np.int32(3)) == 3
    assert check_choice("c", "a", ("a", "b")) == "a"

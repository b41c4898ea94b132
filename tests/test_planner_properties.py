"""What holds for every plan, whatever the lengths and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_balance.cost import CostModel
from lightning_balance.epoch import EpochPlan, plan_epoch
from lightning_balance.plan import StepPlan, plan_step

MODEL = CostModel(intercept=30.0, alpha=0.02)


def saturating_cost(num_samples: Any, padded_length: Any) -> Any:
    """A cost that no closed form inverts: small micro-batches do not fill the device."""
    return np.maximum(num_samples * padded_length, 64.0) + 0.01 * num_samples * padded_length**1.5


def scalar_cost(num_samples: float, padded_length: float) -> float:
    """The same for single numbers only."""
    return max(num_samples * padded_length, 64.0) + 0.01 * num_samples * padded_length**1.5


lengths_lists = st.one_of(
    st.lists(st.integers(1, 200), min_size=1, max_size=80),
    st.lists(st.sampled_from([1, 7, 7, 8, 150]), min_size=1, max_size=80),
    st.integers(1, 60).flatmap(lambda length: st.lists(st.just(length), min_size=1, max_size=60)),
)
common_settings = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 7),
        "cost": st.sampled_from([None, MODEL, CostModel(alpha=0.0), saturating_cost, scalar_cost]),
        "sync": st.sampled_from(["micro_batch", "step"]),
        "pad_to_multiple_of": st.sampled_from([1, 1, 8]),
        "oversize": st.sampled_from(["single", "skip"]),
        "max_shapes": st.sampled_from([None, None, 1, 3]),
    }
)
cuts = st.one_of(
    st.fixed_dictionaries({"num_slots": st.integers(1, 5)}), st.fixed_dictionaries({"max_tokens": st.integers(1, 900)})
)


def places(plan: StepPlan) -> list[tuple[int, int]]:
    return [(rank, slot) for slot in range(plan.num_slots) for rank in range(plan.num_ranks)]


def check_step(plan: StepPlan, lengths: np.ndarray, options: dict[str, Any], cap: int | None) -> list[int]:
    """Check one step against its definition and return the samples it serves."""
    samples: list[int] = []
    cost = options["cost"] or CostModel()
    for rank, slot in places(plan):
        own = plan.micro_batch(rank, slot)
        assert own.dtype == np.int64
        assert len(own) > 0
        padded = int(plan.padded_lengths[slot, rank])
        assert padded >= lengths[own].max()
        if options["max_shapes"] is None:
            step = options["pad_to_multiple_of"]
            assert padded == -(-lengths[own].max() // step) * step
        assert plan.padded_tokens[slot, rank] == padded * len(own)
        assert plan.costs[slot, rank] == pytest.approx(float(cost(len(own), padded)))
        if cap is not None:
            assert padded * len(own) <= cap or len(own) == 1
            assert padded <= cap or options["oversize"] == "single"
        if plan.is_filler(rank, slot):
            assert len(own) == 1
            assert plan.num_samples[slot, rank] == plan.real_tokens[slot, rank] == 0
            assert lengths[own[0]] == lengths[plan.order].min()
        else:
            assert plan.num_samples[slot, rank] == len(own)
            assert plan.real_tokens[slot, rank] == lengths[own].sum()
            assert (np.diff(lengths[own]) <= 0).all()
            samples += own.tolist()
    return samples


def step_or_none(lengths: np.ndarray, **arguments: Any) -> StepPlan | None:
    try:
        return plan_step(lengths, **arguments)
    except ValueError as error:
        if "leaves no sample" in str(error):
            return None
        raise


@settings(max_examples=250, deadline=None)
@given(lengths=lengths_lists, options=common_settings, cut=cuts)
def test_a_step_serves_every_sample_once_within_the_cap_at_the_cost_it_says(lengths, options, cut):
    lengths = np.array(lengths)
    plan = step_or_none(lengths, **options, **cut)
    if plan is None:
        assert options["oversize"] == "skip"
        return
    samples = check_step(plan, lengths, options, cut.get("max_tokens"))
    assert sorted(samples + plan.skipped.tolist()) == list(range(len(lengths)))
    has_filler = bool((plan.num_samples == 0).any())
    assert has_filler == (len(samples) < plan.num_slots * plan.num_ranks)
    if "num_slots" in cut:
        assert plan.num_slots == cut["num_slots"]
    if options["max_shapes"] is not None:
        assert len(np.unique(plan.padded_lengths)) <= options["max_shapes"]


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists, options=common_settings, num_slots=st.integers(1, 5))
def test_without_a_budget_no_micro_batch_is_larger_than_a_plain_one_could_be(lengths, options, num_slots):
    plan = plan_step(lengths, num_slots=num_slots, **options)
    batch_size = -(-len(lengths) // (num_slots * options["num_ranks"]))
    assert plan.padded_tokens.max() <= batch_size * plan.padded_lengths.max()


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists, options=common_settings, num_slots=st.integers(1, 5), max_tokens=st.integers(1, 900))
def test_a_budget_with_fixed_slots_is_held_or_the_error_names_what_would_do(lengths, options, num_slots, max_tokens):
    options = options | {"oversize": "single"}
    try:
        plan = plan_step(lengths, num_slots=num_slots, max_tokens=max_tokens, **options)
    except ValueError as error:
        more = int(str(error).split("num_slots >= ")[1].split()[0])
        budget = int(str(error).split("max_tokens >= ")[1])
        assert more > num_slots
        assert budget > max_tokens
        assert plan_step(lengths, num_slots=more, max_tokens=max_tokens, **options).num_slots == more
        assert plan_step(lengths, num_slots=num_slots, max_tokens=budget, **options).num_slots == num_slots
        for fewer, less in ((more - 1, max_tokens), (num_slots, budget - 1)):
            with pytest.raises(ValueError, match="does not hold"):
                plan_step(lengths, num_slots=fewer, max_tokens=less, **options)
    else:
        check_step(plan, np.array(lengths), options, max_tokens)


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 99), count=st.integers(1, 60), options=common_settings, cut=cuts)
def test_samples_of_equal_length_keep_their_order(length, count, options, cut):
    options = options | {"oversize": "single"}
    plan = plan_step([length] * count, **options, **cut)
    assert plan.order.tolist() == list(range(count))


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, options=common_settings, cut=cuts, order=st.randoms(use_true_random=False))
def test_the_time_of_a_step_does_not_depend_on_the_order_of_its_samples(lengths, options, cut, order):
    options = options | {"oversize": "single"}
    shuffled = list(lengths)
    order.shuffle(shuffled)
    first, second = (plan_step(each, **options, **cut) for each in (lengths, shuffled))
    assert first.modelled_time(options["sync"]) == second.modelled_time(options["sync"])


epoch_settings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "epoch": st.integers(0, 3),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "lookahead": st.integers(1, 4),
    }
)
epoch_cuts = st.one_of(
    st.fixed_dictionaries({"samples_per_step": st.integers(1, 40), "num_slots": st.integers(1, 4)}),
    st.fixed_dictionaries({"samples_per_step": st.integers(1, 40), "max_tokens": st.integers(1, 900)}),
    st.fixed_dictionaries({"num_slots": st.integers(1, 4), "max_tokens": st.integers(1, 900)}),
)


def plan_or_none(lengths, **arguments) -> EpochPlan | None:
    try:
        return plan_epoch(lengths, **arguments)
    except ValueError as error:
        if "would be empty" in str(error):
            return None
        raise


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_lists, options=common_settings, cut=epoch_cuts, epoch=epoch_settings)
def test_an_epoch_serves_every_sample_once_in_as_many_micro_batches_as_it_says(lengths, options, cut, epoch):
    lengths = np.array(lengths)
    plan = plan_or_none(lengths, **options, **cut, **epoch)
    if plan is None:
        return
    samples: list[int] = []
    for index in range(plan.num_steps):
        step = plan.step(index)
        assert step.num_ranks == options["num_ranks"]
        assert step.num_slots == plan.num_slots_per_step[index]
        of_step = check_step(step, lengths, options, cut.get("max_tokens"))
        assert sorted(of_step) == sorted(step.order.tolist())
        assert of_step
        samples += of_step
    assert len(samples) == len(set(samples)) == plan.num_samples
    assert not set(samples) & set(plan.skipped.tolist())
    if not epoch["drop_last"]:
        assert len(samples) + len(plan.skipped) == len(lengths)
    assert plan.num_micro_batches == plan.num_slots_per_step.sum()
    assert plan.locate(plan.num_micro_batches - 1) == (plan.num_steps - 1, plan.num_slots_per_step[-1] - 1)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, options=common_settings, epoch=epoch_settings, size=st.integers(1, 40))
def test_without_lookahead_a_step_is_a_slice_of_the_plain_shuffle(lengths, options, epoch, size):
    options = options | {"oversize": "single"}
    epoch = epoch | {"lookahead": 1, "shuffle": True, "drop_last": False}
    plan = plan_epoch(lengths, samples_per_step=size, num_slots=2, **options, **epoch)
    order = np.random.default_rng([epoch["seed"], epoch["epoch"]]).permutation(len(lengths))
    for index in range(plan.num_steps):
        assert set(plan.step(index).order.tolist()) == set(order[index * size : (index + 1) * size].tolist())


BASE: dict[str, Any] = {"samples_per_step": 8, "num_ranks": 2, "num_slots": 2}
LENGTHS = list(range(3, 43))


def test_equal_inputs_have_equal_digests():
    digest = plan_epoch(LENGTHS, **BASE).digest
    assert plan_epoch(np.array(LENGTHS, dtype=np.int32), cost=CostModel(), **BASE).digest == digest
    assert len(digest) == 16
    int(digest, 16)


@pytest.mark.parametrize(
    "changed",
    [
        {"samples_per_step": 9},
        {"num_ranks": 3},
        {"num_slots": 3},
        {"max_tokens": 500},
        {"seed": 1},
        {"epoch": 1},
        {"shuffle": False},
        {"drop_last": True},
        {"cost": CostModel(alpha=0.002)},
        {"cost": CostModel(intercept=1.0)},
        {"cost": saturating_cost},
        {"sync": "step"},
        {"pad_to_multiple_of": 2},
        {"oversize": "skip"},
        {"max_tokens": 500, "step_unit": "tokens", "samples_per_step": None},
        {"lookahead": 2},
        {"max_shapes": 4},
        {"lengths": [*LENGTHS[:-1], 43]},
        {"lengths": LENGTHS[::-1]},
        {"lengths": LENGTHS[:-1]},
    ],
)
def test_any_changed_input_changes_the_digest(changed):
    arguments = {"lengths": LENGTHS, **BASE}
    assert plan_epoch(**{**arguments, **changed}).digest != plan_epoch(**arguments).digest


def test_seed_and_epoch_are_not_interchangeable():
    digests = {plan_epoch(LENGTHS, seed=seed, epoch=epoch, **BASE).digest for seed in range(4) for epoch in range(4)}
    assert len(digests) == 16


def test_a_changed_callable_changes_the_digest():
    def cost_with(weight):
        return lambda n, length: n * length * weight

    first, second = (plan_epoch(LENGTHS, cost=cost_with(weight), **BASE).digest for weight in (1.0, 2.0))
    assert first != second


EXTREME_COSTS = {
    "linear": CostModel(alpha=0.0),
    "dear micro-batches": CostModel(intercept=1e9),
    "attention only": CostModel(alpha=1e3),
    "nothing": lambda n, length: 0.0 * n * length,
    "constant": lambda n, length: 1.0,
    "count": lambda n, length: n + 0.0 * length,
    "length": lambda n, length: length + 0.0 * n,
    "in eights": lambda n, length: np.ceil(n / 8) * length,
}
EXTREME_LENGTHS = {
    "one giant": np.concatenate([[2**40], np.ones(99, dtype=np.int64)]),
    "all giants": np.full(100, 2**39),
    "all tiny": np.ones(100, dtype=np.int64),
    "two lengths": np.arange(100) % 2 + 1,
}


@pytest.mark.parametrize("cost", EXTREME_COSTS.values(), ids=EXTREME_COSTS.keys())
@pytest.mark.parametrize("lengths", EXTREME_LENGTHS.values(), ids=EXTREME_LENGTHS.keys())
@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_extreme_lengths_and_costs_are_planned(lengths, cost, sync):
    for num_ranks, num_slots in ((4, 3), (33, 3), (3, 33), (1, 20), (20, 1), (50, 2)):
        plan = plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, cost=cost, sync=sync)
        assert plan.num_samples.sum() == 100
        assert (plan.num_samples > 0).all()
    budgeted = plan_step(lengths, num_ranks=7, max_tokens=3 * int(lengths.max()), cost=cost, sync=sync)
    assert budgeted.padded_tokens.max() <= 3 * lengths.max()

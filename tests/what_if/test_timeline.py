"""Who waits for whom: against a slow simulation of ranks that wait for each other; which steps and ranks are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_balance.what_if import compare
from lightning_balance.what_if.histogram import histogram_of
from lightning_balance.what_if.timeline import lane_of, timeline_of
from tests.what_if.inputs import LENGTHS, exact_comparison, run_options


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_ranks_start_when_the_slowest_before_is_done(sync) -> None:
    batches = exact_comparison(sync).rebalance
    lane = lane_of(batches, sync)
    clocks, slot = [0.0] * 4, 0
    for num_slots in batches.num_slots_per_step.tolist():
        for number in range(num_slots):
            assert lane.starts[slot].tolist() == pytest.approx(clocks)
            clocks = [clock + cost for clock, cost in zip(clocks, batches.costs[slot].tolist(), strict=True)]
            if sync == "micro_batch" or number == num_slots - 1:
                clocks = [max(clocks)] * 4
            slot += 1
    assert lane.end == pytest.approx(clocks[0])
    assert lane.end == pytest.approx(batches.step_times(sync).sum())
    assert lane.waiting_share == pytest.approx(1 - batches.costs.sum() / (4 * lane.end))
    assert lane.synchronisations.tolist() == pytest.approx(np.cumsum(batches.step_times(sync)).tolist())


@pytest.mark.parametrize(("num_slots", "num_steps"), [(1, 4), (2, 2), (3, 2), (4, 1), (5, 1)])
def test_consecutive_steps_with_at_least_four_slots_are_drawn(num_slots, num_steps) -> None:
    timeline = timeline_of(compare(LENGTHS, run_options(num_slots=num_slots, batch_size=2), num_steps=4))
    first = timeline.step_indices[0]
    assert timeline.step_indices == list(range(first, first + num_steps))
    assert len(timeline.plain.costs) == len(timeline.rebalance.costs) == num_steps * num_slots


def test_both_sides_have_the_samples_of_the_same_typical_steps() -> None:
    comparison = exact_comparison()
    timeline = timeline_of(comparison)
    ratio = timeline.plain.end / timeline.rebalance.end
    assert ratio == pytest.approx(comparison.outcomes[2].speed_up, rel=0.25)
    places = np.searchsorted(comparison.plain.step_indices, timeline.step_indices)
    ours, plain = comparison.rebalance.select(places), comparison.plain.select(places)
    assert sorted(ours.lengths.tolist()) == sorted(plain.lengths.tolist())


def test_an_epoch_of_one_short_step_is_drawn_too() -> None:
    timeline = timeline_of(compare(np.array([5, 3]), run_options()))
    assert timeline.step_indices == [0]


def test_up_to_64_ranks_are_all_drawn_and_of_more_the_slowest_ones() -> None:
    few = timeline_of(compare(LENGTHS, run_options(num_ranks=64, batch_size=1)))
    assert few.ranks.tolist() == list(range(64))
    many = timeline_of(compare(LENGTHS, run_options(num_ranks=150, batch_size=1), num_steps=1))
    assert len(many.ranks) <= 64
    assert {0, 149} <= set(many.ranks.tolist())
    for lane in (many.plain, many.rebalance):
        assert set((lane.starts + lane.costs).argmax(axis=1).tolist()) <= set(many.ranks.tolist())


@pytest.mark.parametrize(
    "lengths", [LENGTHS, np.full(9, 512), np.array([1]), np.arange(1, 50), np.array([1] * 99 + [5000])], ids=len
)
def test_the_histogram_counts_every_sample_and_token_once(lengths) -> None:
    histogram = histogram_of(lengths)
    assert 1 <= len(histogram.num_samples) <= 48 + 1
    assert histogram.num_samples.sum() == len(lengths)
    assert histogram.num_tokens.sum() == lengths.sum()
    assert (np.diff(histogram.edges) > 0).all()
    assert histogram.edges[0] <= lengths.min() < histogram.edges[1]
    assert histogram.edges[-2] < lengths.max() <= histogram.edges[-1]

"""Windows of any length come out of Lightning's rule for one accumulation value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_balance.windows import Accumulation, BetweenWindows, batch_role


def walk(windows: list[int]) -> tuple[list[int], list[int]]:
    """Batches at which the loop's rule steps, and those before which gradients are zeroed, by it or by hand."""
    steps, zeroed = [], []
    batch = 0
    for window in windows:
        for slot in range(window):
            role = batch_role(batch, slot, window)
            if batch % role.accumulation == 0 or role.zero_grad:
                zeroed.append(batch)
            if (batch + 1) % role.accumulation == 0:
                steps.append(batch)
            batch += 1
    return steps, zeroed


def starts_and_ends(windows: list[int]) -> tuple[list[int], list[int]]:
    ends = [end - 1 for end in itertools.accumulate(windows)]
    return ends, [0, *(end + 1 for end in ends[:-1])]


@pytest.mark.parametrize(
    "windows", [[1], [2], [1, 1], [1, 2], [1, 3, 2, 5], [2, 2, 2], [5, 1, 1, 4], [1, 5, 1], [3, 1], [1, 1, 7]]
)
def test_steps_and_zeroing_fall_on_the_windows_ends_and_starts(windows: list[int]) -> None:
    assert walk(windows) == starts_and_ends(windows)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_windows_are_possible(windows: list[int]) -> None:
    assert walk(windows) == starts_and_ends(windows)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_gradients_are_zeroed_by_hand_in_one_place_only(windows: list[int]) -> None:
    first_batches = [0, *itertools.accumulate(windows)][:-1]
    by_hand = [b for b, n in zip(first_batches, windows, strict=True) if batch_role(b, 0, n).zero_grad]
    assert by_hand == [b for b, n in zip(first_batches, windows, strict=True) if b == 1 and n > 1]


@given(st.integers(0, 500), st.integers(1, 20), st.data())
def test_the_accumulation_value_is_a_positive_int(batch: int, window: int, data: st.DataObject) -> None:
    slot = data.draw(st.integers(0, min(window - 1, batch)))
    assert batch_role(batch, slot, window).accumulation >= 1


@pytest.mark.parametrize(("batch", "slot", "window"), [(3, 2, 2), (3, -1, 2), (0, 1, 2), (4, 0, 0)])
def test_a_slot_outside_of_its_window_is_refused(batch: int, slot: int, window: int) -> None:
    with pytest.raises(ValueError, match=f"slot must be in .*num_slots={window}.* got {slot}"):
        batch_role(batch, slot, window)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 10_000))
def test_a_trainer_estimates_the_steps_of_all_epochs_at_any_time(steps_per_epoch: list[int], batches: int) -> None:
    def count_steps(num_epochs: int) -> int:
        return sum(steps_per_epoch[:num_epochs])

    for accumulate in (BetweenWindows(count_steps), Accumulation(1, count_steps), Accumulation(7, count_steps)):
        num_epochs = len(steps_per_epoch)
        estimate = math.ceil(batches / accumulate) * num_epochs  # as Trainer.estimated_stepping_batches computes it
        assert estimate == sum(steps_per_epoch)
        assert type(estimate) is int


@given(st.integers(1, 20), st.integers(0, 10_000))
def test_in_all_else_an_accumulation_is_its_value(value: int, batches: int) -> None:
    accumulate = Accumulation(value, lambda num_epochs: num_epochs)
    assert accumulate == value
    assert (batches % accumulate, batches // accumulate) == (batches % value, batches // value)
    assert int(batches / accumulate) == int(batches / value)
    assert float(torch.tensor(float(batches)) / accumulate) == float(torch.tensor(float(batches)) / value)


def test_between_windows_nothing_is_accumulated() -> None:
    accumulate = BetweenWindows(lambda num_epochs: num_epochs)
    assert all(batch % accumulate == 0 for batch in range(5))
    assert accumulate == 1

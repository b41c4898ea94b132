"""What a run's figures are read from, and when, with an accelerator that this machine may not have."""

from __future__ import annotations

import torch

from lightning_balance import plan_step
from lightning_balance.fitting import Place
from lightning_balance.monitor import RunMonitor
from tests.allocator import Allocator

UNREADABLE = torch.device("meta")
"""A device whose values cannot be read, not even by waiting for it."""


def test_the_peak_is_that_inside_micro_batches(allocator: Allocator) -> None:
    monitor = RunMonitor(rank=0, sync="step", device=UNREADABLE)
    peaks = []
    for gib in (4, 1):
        allocator.use(9)  # the search for a budget, validation, a checkpoint
        monitor.begin_micro_batch()
        allocator.use(gib)
        monitor.end_micro_batch()
        allocator.use(8)
        peaks.append(monitor.step_values()["balance/peak_memory_gib"])
    assert peaks == [4.0, 1.0]
    assert monitor.rank_figures().peaks == {"peak allocated memory": 4.0}


def test_one_process_reads_no_value_from_its_device(allocator: Allocator) -> None:
    monitor = RunMonitor(rank=0, sync="step", device=UNREADABLE)
    monitor.begin_micro_batch()
    allocator.use(2)
    monitor.end_micro_batch()
    monitor.end_step(Place(plan=plan_step([3, 1], num_ranks=1, num_slots=1), slot=0, num_slots=1))
    assert monitor.step_values()["balance/pad_efficiency"] == 4 / 6
    assert monitor.epoch_values() == {
        "balance/pad_efficiency_epoch": float(torch.tensor(4 / 6)),
        "balance/cost_spread_epoch": 0.0,
        "balance/peak_memory_gib_epoch": 2.0,
    }

"""The times of a run's own micro-batches, where they are one rank's or one slot's alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_balance.calibration.online import OnlineCost
from lightning_balance.fitting import Place


class Stopwatch:
    """Times micro-batches for :class:`OnlineCost`, waiting for the device before and after.

    What is timed depends on when ranks wait for each other:

    - one rank, or FSDP: forward and backward of every slot. Under FSDP, which exchanges inside of them, the time is
      that of the slot's slowest rank.
    - DDP: forward and backward of every slot but the window's last, whose backward waits for the other ranks. A window
      of one slot is timed by its forward alone.

    Args:
        online: takes the times.
        device: what to wait for.
        rank: this data-parallel rank.
        is_alone: whether there is no other rank.
        exchanges_every_micro_batch: whether ranks exchange inside every forward and backward.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        online: OnlineCost,
        *,
        device: torch.device,
        rank: int,
        is_alone: bool,
        exchanges_every_micro_batch: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._online = online
        self._device = device
        self._rank = rank
        self._waits_in_last_slot = not is_alone and not exchanges_every_micro_batch
        self._clock = clock
        self._place: Place | None = None
        self._started = 0.0

    def start(self, place: Place) -> None:
        """Begin a micro-batch."""
        self._place = place
        self._started = self._now()

    def forward_done(self) -> None:
        """The forward is over and backward has not begun."""
        if self._place is not None and self._waits_in_last_slot and self._place.is_last:
            if self._place.num_slots == 1:
                self._stop(self._place)
            self._place = None

    def backward_done(self) -> None:
        """Backward is over; counted once per micro-batch, also if an optimizer runs it again."""
        if self._place is not None:
            self._stop(self._place)
            self._place = None

    def _stop(self, place: Place) -> None:
        where = place.slot, self._rank
        # A filler runs a real sample, which has no count in the plan: its cost is that of one.
        num_samples = max(int(place.plan.num_samples[where]), 1)
        self._online.add(num_samples, int(place.plan.padded_lengths[where]), self._now() - self._started)

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return self._clock()

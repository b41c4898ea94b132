"""How long a rank waits for others inside its micro-batches, where that can be read without a device (layer 2)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def can_measure_waiting(device: torch.device) -> bool:
    """Whether :class:`WaitClock` tells waiting from work: on the CPU, where a thread in a collective does not run.

    On an accelerator the host runs ahead of the device and collectives keep the device busy: nothing is measured there,
    because what could be would need a synchronisation.
    """
    return device.type == "cpu"


class WaitClock:
    """Counts the time that a micro-batch takes and its thread does not run.

    With ranks on cores of their own that is waiting for the slowest of them, and for the exchange of gradients. Where
    ranks share cores it also holds the time that others had them.

    Args:
        clock: seconds, monotonic.
        busy_clock: seconds that the thread has run.

    Example:
        >>> times, busy = iter([0.0, 5.0]), iter([0.0, 3.0])
        >>> wait = WaitClock(clock=lambda: next(times), busy_clock=lambda: next(busy))
        >>> wait.start()
        >>> wait.stop()
        2.0
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, busy_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._busy_clock = clock, busy_clock
        self._started: tuple[float, float] | None = None

    def start(self) -> None:
        """A micro-batch begins."""
        self._started = self._clock(), self._busy_clock()

    def stop(self) -> float:
        """Seconds waited since :meth:`start`; 0 without one."""
        if self._started is None:
            return 0.0
        started, busy_before = self._started
        self._started = None
        return max(self._clock() - started - (self._busy_clock() - busy_before), 0.0)

"""The peak memory of what is run, and the limit that it may reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from math import inf

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_balance.calibration.error import CalibrationError
from lightning_balance.memory import GIB, has_accelerator_peak, read_accelerator_peak, restart_accelerator_peak
from lightning_balance.probing.live_bytes import LiveBytes
from lightning_balance.probing.prober import Prober


class PeakMeter:
    """Measures the peak memory of micro-batches against a limit.

    On an accelerator the peak is its allocator's (``max_memory_allocated``), and the limit a share of what this process
    can have: the device's memory without what other processes and the driver hold. Elsewhere the peak is counted by
    :class:`LiveBytes`, against a limit that has to be stated.

    Args:
        prober: runs the micro-batches.
        memory_fraction: share of the limit that may be used, in (0, 1].
        memory_limit_gib: the limit in GiB; on an accelerator the smaller of it and the device's.

    Raises:
        CalibrationError: the device does not know its memory, and no limit is given.
    """

    def __init__(self, prober: Prober, *, memory_fraction: float, memory_limit_gib: float | None) -> None:
        self._prober = prober
        self.limit_bytes: float
        self._has_allocator = prober.device.type != "cpu" and has_accelerator_peak()
        limit: float | None = None if memory_limit_gib is None else memory_limit_gib * GIB
        if self._has_allocator:
            available = self._available()
            limit = available if limit is None else min(limit, available)
        if limit is None:
            raise CalibrationError(
                f"finding max_tokens on {prober.device.type!r} needs memory_limit_gib, the memory that a rank may use"
                " for tensors, because this device does not tell its own: set it, or give max_tokens a number"
            )
        self.limit_bytes = limit * memory_fraction

    def share(self, run: Callable[[], bool]) -> float:
        """Run something and return its peak as a share of the limit, with what was allocated before.

        Infinite where it returns False: memory ran out.
        """
        if not self._has_allocator:
            trainer = self._prober.trainer
            with LiveBytes(standing_tensors(trainer.lightning_module, trainer.optimizers)) as live:
                has_memory = run()
            return float(live.peak / self.limit_bytes) if has_memory else inf
        self._prober.synchronise()
        restart_accelerator_peak()
        has_memory = run()
        self._prober.synchronise()
        peak = read_accelerator_peak()
        assert peak is not None
        return peak / self.limit_bytes if has_memory else inf

    def _available(self) -> float:
        device = torch.get_device_module(self._prober.device)
        free, _ = device.mem_get_info()
        return float(free + device.memory_reserved())


def standing_tensors(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """What is in memory between micro-batches: parameters, buffers, gradients and the state of the optimizers."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

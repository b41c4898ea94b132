"""Run single micro-batches through the user's module under its real strategy, outside of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from lightning.pytorch.utilities.seed import isolate_rng
from torch.distributed.fsdp import FSDPModule

from lightning_balance import _lightning
from lightning_balance.probing.snapshot import Snapshot


class Prober:
    """Runs micro-batches of a trainer whose strategy, module and optimizers are set up, as training would.

    Use it inside :meth:`leaving_no_trace`. Gradients are not synchronised where the strategy allows that (DDP): most
    micro-batches of an accumulation window are such, and a rank that runs out of memory leaves no other in a
    collective.

    Args:
        trainer: a trainer inside ``fit``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.device: torch.device = trainer.strategy.root_device

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Afterwards weights, buffers, gradients, optimizers, attributes and random numbers are as before.

        Nothing is logged, and no callback is called in between.
        """
        with isolate_rng(), _lightning.outside_the_loop(self.trainer):
            snapshot = Snapshot(self.trainer.lightning_module, self.trainer.optimizers)
            try:
                self.clear_gradients()
                yield
            finally:
                snapshot.restore()
                self.clean_up()

    def to_device(self, batch: Any) -> Any:
        """Move a batch as the loop does, with the module's and the data module's transfer hooks."""
        return _lightning.move_batch(self.trainer, batch)

    def forward_backward(self, batch: Any) -> float:
        """Run ``training_step`` and backward, and return the loss; gradients add up."""
        with torch.enable_grad(), _lightning.without_gradient_sync(self.trainer):
            return _lightning.run_micro_batch(self.trainer, batch)

    def optimizer_step(self, batch: Any) -> None:
        """Run one micro-batch and step the optimizers, so that their state exists."""

        def closure() -> float:
            self.clear_gradients()
            return self.forward_backward(batch)

        for optimizer in self.trainer.optimizers:
            optimizer.step(closure)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self.trainer.lightning_module.parameters():
            parameter.grad = None

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def clean_up(self) -> None:
        """Give memory back after a micro-batch, also after one that ran out of it."""
        for module in self.trainer.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        garbage_collection_cuda()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on the accelerator or on the host.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("no"))
        (True, False)
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_oom_error(error)

"""Run single micro-batches through the user's module under its real strategy, outside of the training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_balance._lightning import exchanges_every_micro_batch
from lightning_balance.agreement import gather_objects, on_every_rank
from lightning_balance.probing import _lightning
from lightning_balance.probing.snapshot import Snapshot

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


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
        self._ranks_wait_inside = exchanges_every_micro_batch(trainer) or any(
            isinstance(module, nn.SyncBatchNorm) for module in trainer.lightning_module.modules()
        )

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Afterwards weights, buffers, gradients, optimizers, attributes and random numbers are as before.

        A collective call. The module's own hooks of a beginning run and epoch are called first, as a ``training_step``
        may rely on them. Nothing is logged, and no callback is called in between.
        """
        module = self.trainer.lightning_module
        with isolate_rng(), _lightning.outside_the_loop(self.trainer):
            snapshot = Snapshot(module, self.trainer.optimizers)
            try:
                self.clear_gradients()
                with snapshot.undoing_new_hooks(module):
                    on_every_rank(lambda: _lightning.begin_epoch_of_module(self.trainer))
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # what went wrong first is what to tell
                    snapshot.restore()
                raise
            else:
                snapshot.restore()
            finally:
                self.clean_up()

    def together(self, run: Callable[[], Result]) -> Result:
        """Run micro-batches on every rank; an error of one is raised on all. A collective call.

        Where ranks wait for each other inside a micro-batch (FSDP, SyncBatchNorm) an error is raised at once, on its
        own rank alone: the others cannot be asked, they wait for data of this one. Elsewhere it is logged before they
        are asked: a ``training_step`` may have collectives of its own.
        """
        return run() if self._ranks_wait_inside else on_every_rank(lambda: self._logging_errors(run))

    def _logging_errors(self, run: Callable[[], Result]) -> Result:
        try:
            return run()
        except Exception as error:
            if self.trainer.world_size > 1:
                _log.error(f"rank {self.trainer.global_rank} failed: {type(error).__name__}: {error}")
            raise

    def fits(self, make: Callable[[], Any], run: Callable[[Any], object]) -> bool:
        """Make a batch, move it and run it; False, on all ranks, where memory ran out on any. A collective call.

        No rank runs its batch before all have made theirs: ranks may wait for each other inside (FSDP, and the buffers
        of DDP), and one that has no batch would never come.

        Args:
            make: collates the batch.
            run: what to do with it on the device.
        """
        made: list[Any] = []

        def prepare() -> None:
            made.append(self.to_device(make()))

        return all(gather_objects(on_every_rank(lambda: _has_memory(prepare)))) and all(
            gather_objects(self.together(lambda: _has_memory(lambda: run(made[0]))))
        )

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
            with _without_step_hooks(optimizer):
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


def _has_memory(run: Callable[[], object]) -> bool:
    """Whether something runs without running out of memory."""
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


@contextlib.contextmanager
def _without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Keep the user's hooks of ``step`` (averaged weights, counters) from running."""
    registries: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    kept = [registry.copy() for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.update(hooks)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on the accelerator or on the host.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("no"))
        (True, False)
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_oom_error(error)

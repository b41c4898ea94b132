"""Callbacks that end a run at some place and save it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback


class StopError(RuntimeError):
    """Ends a run from inside."""


class StopAfter(Callback):
    """Saves and stops after so many micro-batches of the run."""

    def __init__(self, num_batches: int, path: Path) -> None:
        self.num_batches, self.path = num_batches, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.num_batches:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class StopAtStep(Callback):
    """Saves and stops after so many optimizer steps of the whole run."""

    def __init__(self, num_steps: int, path: Path) -> None:
        self.num_steps, self.path = num_steps, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.num_steps:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class SavesAndRaises(Callback):
    """Saves and raises `StopError` in the n-th call of a hook."""

    def __init__(self, hook: str, path: Path, num_calls: int = 1) -> None:
        self.path, self.num_left = path, num_calls
        setattr(self, hook, self.stop)

    def stop(self, trainer: Any, *_: Any) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            trainer.save_checkpoint(self.path)
            raise StopError

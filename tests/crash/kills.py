"""A rank that kills itself at a chosen point of its own execution.

A phase of training is armed at its n-th occurrence; from there every call and return of a Python or C function counts,
and at the chosen one the process sends itself SIGKILL. So a death may happen between any two functions of the phase:
with a checkpoint half written, between the backward and the optimizer, after a file was opened and before it is filled.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, Trainer


@dataclass(frozen=True, kw_only=True)
class KillPlan:
    """Where ranks kill themselves.

    Attributes:
        phase: ``"start"`` (until training begins), ``"step"`` (a micro-batch, with the optimizer's step in a window's
            last one), ``"validation"``, ``"writing"`` (a checkpoint) or ``"epoch end"`` (until the next one begins).
        occurrence: 0: the first time that the phase begins.
        event: after so many calls and returns of functions within it, or at the first call of a function of this name;
            the phase's end if there is none.
        ranks: who dies; the others find out, or hang until they are killed.
        note: file in which a dying rank says where it was.
    """

    phase: str
    occurrence: int
    event: int | str
    ranks: tuple[int, ...]
    note: Path


class Phases(Callback):
    """Follows the phases, and dies in the planned one."""

    def __init__(self, plan: KillPlan | None) -> None:
        self.plan = plan
        self._occurrences: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        if self.plan is None or phase != self.plan.phase:
            return
        if self._occurrences[phase] == self.plan.occurrence:
            os.register_at_fork(after_in_child=lambda: sys.setprofile(None))  # workers of a DataLoader go on living
            event = self.plan.event
            sys.setprofile(_AtCall(event, self.die) if isinstance(event, str) else _Countdown(event, self.die))
        self._occurrences[phase] += 1

    def leave(self, phase: str) -> None:
        if self.plan is not None and phase == self.plan.phase and self._occurrences[phase] == self.plan.occurrence + 1:
            self.die("its end")

    def die(self, place: str) -> None:
        assert self.plan is not None
        sys.setprofile(None)
        with self.plan.note.open("a") as note:
            note.write(f"{self.plan.phase}: {place}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, *_: Any) -> None:
        self.leave("start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.enter("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.leave("step")

    def on_validation_start(self, *_: Any) -> None:
        self.enter("validation")

    def on_validation_end(self, *_: Any) -> None:
        self.leave("validation")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.enter("epoch end")

    def on_train_epoch_start(self, *_: Any) -> None:
        if self._occurrences["epoch end"]:
            self.leave("epoch end")


def _name(frame: FrameType, event: str, argument: Any) -> str:
    return str(getattr(argument, "__name__", "")) if event.startswith("c_") else frame.f_code.co_name


class _Countdown:
    """A profile function that calls ``die`` at its n-th event."""

    def __init__(self, num_events: int, die: Callable[[str], None]) -> None:
        self._num_left = num_events
        self._die = die

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            self._die(f"{event} of {_name(frame, event, argument)}")


class _AtCall:
    """A profile function that calls ``die`` when a function of that name is called."""

    def __init__(self, name: str, die: Callable[[str], None]) -> None:
        self._name = name
        self._die = die

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and _name(frame, event, argument) == self._name:
            self._die(f"{event} of {self._name}")


class KillableTrainer(Trainer):
    """A trainer with an appointment.

    Args:
        plan: this rank's death; None: it lives.
        arguments: of :class:`Trainer`.
    """

    def __init__(self, plan: KillPlan | None, **arguments: Any) -> None:
        self._phases = Phases(plan)
        self._phases.enter("start")
        super().__init__(**{**arguments, "callbacks": [*arguments["callbacks"], self._phases]})

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._phases.enter("writing")
        super().save_checkpoint(*args, **kwargs)
        self._phases.leave("writing")

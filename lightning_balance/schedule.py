"""Which part of an epoch's order belongs to which window of steps."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from lightning_balance.lookahead import WindowPlanner


class Schedule(Protocol):
    """Windows of consecutive steps over the order of an epoch; inside a window samples may change steps."""

    @property
    def num_steps(self) -> int: ...  # noqa: D102

    @property
    def num_windows(self) -> int: ...  # noqa: D102

    @property
    def num_samples(self) -> int: ...  # noqa: D102

    @property
    def is_empty(self) -> bool: ...  # noqa: D102

    def window(self, index: int) -> tuple[int, int, int]:
        """Return where in the order a window starts and ends, and its number of steps."""
        ...

    def window_of_step(self, step: int) -> tuple[int, int]:
        """Return the window of a step and its place there."""
        ...


class SampleSchedule:
    """The same number of samples in every step; the last step may have fewer.

    >>> SampleSchedule(num_samples=18, samples_per_step=16, lookahead=1, drop_last=False).window(1)
    (16, 18, 1)
    """

    def __init__(self, *, num_samples: int, samples_per_step: int, lookahead: int, drop_last: bool) -> None:
        self.num_steps = num_samples // samples_per_step if drop_last else -(-num_samples // samples_per_step)
        self.num_samples = min(self.num_steps * samples_per_step, num_samples)
        self.num_windows = -(-self.num_steps // lookahead)
        self._samples_per_step = samples_per_step
        self._lookahead = lookahead

    @property
    def is_empty(self) -> bool:
        """Whether ``drop_last`` leaves no step."""
        return self.num_steps == 0

    def window(self, index: int) -> tuple[int, int, int]:
        """Return where in the order a window starts and ends, and its number of steps."""
        first = index * self._lookahead
        last = min(first + self._lookahead, self.num_steps)
        return first * self._samples_per_step, min(last * self._samples_per_step, self.num_samples), last - first

    def window_of_step(self, step: int) -> tuple[int, int]:
        """Return the window of a step and its place there.

        Raises:
            IndexError: there is no such step.
        """
        _check_step(step, self.num_steps)
        return divmod(step, self._lookahead)


class TokenSchedule:
    """Steps that take as many samples, in the order of the epoch, as their micro-batches hold under the budget.

    Windows are found one after another, and only as far as somebody asks. With ``drop_last`` a last step whose
    micro-batches are not all needed is left out.
    """

    def __init__(self, planner: WindowPlanner, *, num_samples: int, lookahead: int, drop_last: bool) -> None:
        self._planner = planner
        self._total = num_samples
        self._lookahead = lookahead
        self._drop_last = drop_last
        self._windows: list[tuple[int, int, int]] = []
        self._complete = num_samples == 0

    @property
    def is_empty(self) -> bool:
        """Whether ``drop_last`` leaves no step; plans the first window."""
        self._find(0)
        return not self._windows

    @cached_property
    def num_steps(self) -> int:
        """Steps of the epoch; finds all windows."""
        self._find(self._total)
        return sum(num_steps for _, _, num_steps in self._windows)

    @property
    def num_windows(self) -> int:
        """Windows of the epoch; finds them all."""
        self._find(self._total)
        return len(self._windows)

    @property
    def num_samples(self) -> int:
        """Samples served; finds all windows."""
        self._find(self._total)
        return self._windows[-1][1] if self._windows else 0

    def window(self, index: int) -> tuple[int, int, int]:
        """Return where in the order a window starts and ends, and its number of steps."""
        self._find(index)
        return self._windows[index]

    def window_of_step(self, step: int) -> tuple[int, int]:
        """Return the window of a step and its place there.

        Raises:
            IndexError: there is no such step.
        """
        window, place = divmod(step, self._lookahead)
        self._find(max(window, 0))
        if step < 0 or window >= len(self._windows) or place >= self._windows[window][2]:
            _check_step(step, self.num_steps)
        return window, place

    def _find(self, window: int) -> None:
        """Find windows until ``window`` is among them or the samples are used up."""
        while len(self._windows) <= window and not self._complete:
            start = self._windows[-1][1] if self._windows else 0
            guess = start - self._windows[-1][0] if self._windows else 0
            end = self._planner.longest_prefix(start, self._total, self._lookahead, guess)
            num_steps = self._lookahead
            if end == self._total:
                self._complete = True
                end, num_steps = self._last_window(start)
            if num_steps:
                self._windows.append((start, end, num_steps))

    def _last_window(self, start: int) -> tuple[int, int]:
        needed = self._planner.groups_needed(start, self._total)
        num_steps = -(-needed // self._planner.groups_per_step)
        if self._drop_last and needed % self._planner.groups_per_step:
            num_steps -= 1
            end = self._planner.longest_prefix(start, self._total, num_steps, 0) if num_steps else start
            return end, num_steps
        return self._total, num_steps


def _check_step(step: int, num_steps: int) -> None:
    if not 0 <= step < num_steps:
        raise IndexError(f"step must be in [0, {num_steps}), got {step}")

"""Accumulation windows of any length in Lightning's loop (layer 2).

Lightning's loop takes one ``accumulate_grad_batches`` for the whole run, but reads it anew at every batch: with ``b``
the 0-based index of the batch in the epoch, it steps when ``(b + 1) % accumulate == 0`` and zeroes gradients when ``b %
accumulate == 0``. Choosing the value for each batch makes windows of any length. DDP synchronises once per window,
because the loop itself blocks synchronisation while it accumulates. The trainer divides each loss by the value in
force; the weighting multiplies it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchRole:
    """What the loop has to do at one batch.

    Attributes:
        accumulation: value for ``trainer.accumulate_grad_batches``.
        zero_grad: whether the caller has to zero the gradients itself, because no value makes the loop do it.
    """

    accumulation: int
    zero_grad: bool = False


def batch_role(batch_index: int, slot: int, num_slots: int) -> BatchRole:
    """The accumulation value that makes batch ``batch_index`` slot ``slot`` of a window of ``num_slots``.

    Args:
        batch_index: 0-based index of the batch within the epoch.
        slot: 0-based position within the window.
        num_slots: length of the window.

    Raises:
        ValueError: ``slot`` is not within the window, or the window would begin before the epoch.

    Example:
        A window of one, one of three:

        >>> [batch_role(b, s, n).accumulation for b, s, n in [(0, 0, 1), (1, 0, 3), (2, 1, 3), (3, 2, 3)]]
        [1, 3, 4, 4]
    """
    if not 0 <= slot < num_slots or slot > batch_index:
        raise ValueError(f"slot must be in [0, num_slots={num_slots}) and <= batch_index={batch_index}, got {slot}")
    if num_slots == 1:
        return BatchRole(accumulation=1)
    if slot == num_slots - 1:
        return BatchRole(accumulation=batch_index + 1)  # steps; does not zero, as batch_index % (batch_index + 1) != 0
    if slot > 0:
        return BatchRole(accumulation=batch_index + 2)  # neither
    if batch_index == 0:
        return BatchRole(accumulation=2)
    if batch_index == 1:
        # A value that zeroes at 1 divides 1 and steps at once: use one that does neither, and zero by hand.
        return BatchRole(accumulation=3, zero_grad=True)
    return BatchRole(accumulation=batch_index)  # zeroes, and (b + 1) % b == 1 does not step


class Accumulation(int):
    """A value of ``trainer.accumulate_grad_batches`` that knows the optimizer steps of all epochs.

    ``Trainer.estimated_stepping_batches`` is ``ceil(num_batches / accumulate_grad_batches) * max_epochs``, which no
    number makes right when epochs have different numbers of steps (PL#19684, PL#12894). Dividing by this one gives the
    steps of any number of epochs, counted when somebody asks, in whichever hook. In all else it is its value.

    Args:
        value: the number.
        count_steps: optimizer steps in so many epochs.

    Example:
        >>> import math
        >>> accumulate = Accumulation(3, lambda num_epochs: [0, 2, 5, 9][num_epochs])
        >>> 6 % accumulate, 7 / accumulate > 2, math.ceil(7 / accumulate) * 3
        (0, True, 9)
    """

    _count_steps: Callable[[int], int]

    def __new__(cls, value: int, count_steps: Callable[[int], int]) -> Accumulation:
        """Make the number that knows the steps."""
        self = super().__new__(cls, value)
        self._count_steps = count_steps
        return self

    def __rtruediv__(self, num_batches: int) -> _StepsPerEpoch:
        return _StepsPerEpoch(num_batches / int(self), self._count_steps)


class BetweenWindows(Accumulation):
    """Value of ``trainer.accumulate_grad_batches`` while no window is open: the 1 that knows the steps.

    As the number 1 it says that nothing is being accumulated, which a loop that restarts at a window's beginning has to
    know.

    Args:
        count_steps: optimizer steps in so many epochs.
    """

    def __new__(cls, count_steps: Callable[[int], int]) -> BetweenWindows:
        """Make the number 1 that knows the steps."""
        return super().__new__(cls, 1, count_steps)  # type: ignore[return-value]


class _StepsPerEpoch(float):
    """What ``num_batches / accumulate_grad_batches`` would be, if it were the same in every epoch."""

    _count_steps: Callable[[int], int]

    def __new__(cls, quotient: float, count_steps: Callable[[int], int]) -> _StepsPerEpoch:
        self = super().__new__(cls, quotient)
        self._count_steps = count_steps
        return self

    def __ceil__(self) -> _StepsPerEpoch:  # type: ignore[override]
        return self

    def __mul__(self, num_epochs: int) -> int:  # type: ignore[override]
        return self._count_steps(num_epochs)

    def __rmod__(self, global_step: int) -> int:  # type: ignore[override]
        # A restarting loop asks whether the checkpoint was saved at an epoch's end, and if not warns that the loader
        # cannot resume in the middle of one. This one can.
        return 0

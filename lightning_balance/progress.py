"""How far an epoch has been trained, in samples: what any number of ranks, under any budget, can continue from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EpochProgress:
    """What optimizer steps have served of an epoch, whoever served it; the default is an epoch's beginning.

    An epoch is an order of samples (the shuffle). Steps take their samples from its front, so a number of places says
    what they have had, except inside a window of ``lookahead`` steps, which exchange samples: there some samples of the
    places already taken are still waiting for their step.

    Attributes:
        num_places: places ``[0, num_places)`` of the epoch's order have been taken.
        waiting: samples at those places that no finished step had, in the order of the shuffle.
        num_samples: samples served over all ranks.
        num_steps: optimizer steps done.
        num_micro_batches: micro-batches done, per rank.

    >>> EpochProgress(num_places=4, waiting=(7,), num_samples=3).state()["waiting"]
    [7]
    """

    num_places: int = 0
    waiting: tuple[int, ...] = ()
    num_samples: int = 0
    num_steps: int = 0
    num_micro_batches: int = 0

    def state(self) -> dict[str, Any]:
        """Return plain values, as a checkpoint holds them."""
        return {**asdict(self), "waiting": list(self.waiting)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> EpochProgress:
        """Return the progress that :meth:`state` described."""
        return cls(**{**state, "waiting": tuple(state["waiting"])})

"""Keep the states of torchmetrics metrics, and put them back (layer 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torchmetrics import Metric

PARTS = frozenset({"_modules", "_parameters"})
"""Attributes of a metric that hold other modules; metrics among them are kept by themselves."""


class KeptStates:
    """What metrics have counted so far; :meth:`restore` takes back everything that comes after.

    Args:
        metrics: the metrics; those that share a state (compute groups) share it afterwards, too.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> metric.update(2.0)
        >>> kept = KeptStates([metric])
        >>> metric.update(100.0)
        >>> kept.restore()
        >>> metric.compute()
        tensor(2.)
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # the original too: its id stays its own as long as it lives
        self._kept: dict[int, tuple[Metric, dict[str, Any]]] = {}
        for metric in metrics:
            attributes = {name: self._copy(value) for name, value in vars(metric).items() if name not in PARTS}
            self._kept[id(metric)] = metric, attributes

    def restore(self) -> None:
        """Put back what every metric had counted."""
        for metric, _ in self._kept.values():
            self.restore_one(metric)

    def restore_one(self, metric: Metric) -> None:
        """Put back what one of the metrics had counted.

        A list that has grown since keeps the new tensors with no entries: ranks exchange lists tensor by tensor, and
        one that had less of them, or none, would leave the others waiting.
        """
        _, kept = self._kept[id(metric)]
        for name, value in kept.items():
            grown = vars(metric).get(name)
            if isinstance(value, list) and isinstance(grown, list):
                value += [_emptied(entry) for entry in grown[len(value) :] if isinstance(entry, Tensor) and entry.ndim]
            setattr(metric, name, value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._once(value, value.detach().clone)
        if isinstance(value, (list, dict)):
            return self._once(value, value.copy)
        return value

    def _once(self, value: Any, copy: Any) -> Any:
        """The copy of a value, the same one for all that share it."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value, copy()
        return self._copies[id(value)][1]


def _emptied(entry: Tensor) -> Tensor:
    return entry[:0].detach()

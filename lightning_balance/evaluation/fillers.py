"""Keep a filler out of torchmetrics metrics (layer 1).

A metric that a filler updates does not count it; one that a filler calls returns what it would for any micro-batch, and
forgets it. Both happen inside the step, so that a metric which is computed there has not seen the filler either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

PARTS = frozenset({"_modules", "_parameters"})
"""Attributes of a metric that hold other modules; metrics among them are kept by themselves."""


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Let no metric that is a part of ``module`` count what it is given.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> mean = MeanMetric()
        >>> mean.update(2.0)
        >>> with uncounted(nn.ModuleList([mean])):
        ...     mean.update(50.0)
        ...     in_step = mean(100.0)
        >>> in_step, mean.compute()
        (tensor(100.), tensor(2.))
    """
    metrics = [part for part in module.modules() if isinstance(part, (Metric, MetricCollection))]
    is_tried = False

    def skipping(metric: nn.Module, update: Callable[..., Any]) -> Callable[..., Any]:
        def skip(*args: Any, **kwargs: Any) -> Any:
            if is_tried:
                return update(*args, **kwargs)
            _forget_computed(metric)  # other ranks have counted something now, and will exchange it
            return None

        return skip

    def trying(forward: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_tried
            if is_tried:
                return forward(*args, **kwargs)
            kept, is_tried = KeptStates(metrics), True
            try:
                return forward(*args, **kwargs)
            finally:
                is_tried = False
                kept.restore()

        return attempt

    before = [{name: vars(metric).get(name) for name in ("update", "forward")} for metric in metrics]
    for metric in metrics:
        vars(metric).update(update=skipping(metric, metric.update), forward=trying(metric.forward))
    try:
        yield
    finally:
        for metric, own in zip(metrics, before, strict=True):
            for name, value in own.items():
                vars(metric).pop(name)
                if value is not None:
                    vars(metric)[name] = value


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

    def __init__(self, metrics: Iterable[nn.Module]) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # the original too: its id stays its own as long as it lives
        self._kept = [
            (metric, {name: self._copy(value) for name, value in vars(metric).items() if name not in PARTS})
            for metric in metrics
        ]

    def restore(self) -> None:
        """Put back what every metric had counted; computed values are to be computed again."""
        for metric, kept in self._kept:
            for name, value in kept.items():
                setattr(metric, name, value)
            _forget_computed(metric)

    def _copy(self, value: Any) -> Any:
        """A copy, the same one for all that share the value."""
        if not isinstance(value, (Tensor, list, dict)):
            return value
        if id(value) not in self._copies:
            copied: Any = value.detach().clone() if isinstance(value, Tensor) else value.copy()
            self._copies[id(value)] = value, copied
            if isinstance(copied, dict):  # buffers, compute groups
                copied.update({key: self._copy(entry) for key, entry in copied.items()})
        return self._copies[id(value)][1]


def _forget_computed(metric: nn.Module) -> None:
    for part in metric.modules():
        if isinstance(part, Metric):
            part._computed = None

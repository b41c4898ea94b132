"""Keep a filler out of torchmetrics metrics (layer 1).

A metric that a filler updates does not count it; one that a filler calls returns what it would for any micro-batch, and
forgets it. Both happen inside the step, so that a metric which is computed there has not seen the filler either. What
is cached stays cached: a rank that computes where the others do not would wait for them in vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

NOT_KEPT = frozenset({"_modules", "_parameters", "_computed", "update"})
"""Attributes of a metric that are no count: other modules, which are kept by themselves, and what it has computed."""


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
    parts = _metrics_of(module)
    metrics = [part for part in parts if isinstance(part, Metric)]
    # A first update groups the metrics of a collection by what they have counted, which is nothing here.
    ungrouped = [part for part in parts if isinstance(part, MetricCollection) and not part._groups_checked]
    kept = KeptStates(inner for part in ungrouped for inner in part.modules())
    calls = _Calls(parts)
    updates = [vars(metric)["update"] for metric in metrics]
    for metric, update in zip(metrics, updates, strict=True):
        vars(metric)["update"] = _skipping(metric, update, calls)
    hooks = [part.register_forward_pre_hook(_before_call) for part in parts]
    hooks += [part.register_forward_hook(_after_call) for part in parts]
    _RUNNING.append(calls)
    try:
        yield
    finally:
        _RUNNING.pop()
        for hook in hooks:
            hook.remove()
        for metric, update in zip(metrics, updates, strict=True):
            vars(metric)["update"] = update
        calls.end()
        kept.restore()
        for part in _metrics_of(module):
            if isinstance(part, Metric) and all(part is not metric for metric in metrics):
                part.reset()  # made in this step: all that it has is the filler's


def _metrics_of(module: nn.Module) -> list[Metric | MetricCollection]:
    return [part for part in module.modules() if isinstance(part, (Metric, MetricCollection))]


def _skipping(metric: Metric, update: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    # Copies of the metric do not have it: torchmetrics leaves `update` out of them.
    def skip(*args: Any, **kwargs: Any) -> Any:
        if calls.depth:
            return update(*args, **kwargs)
        for part in metric.modules():
            if isinstance(part, Metric):
                part._computed = None  # as on the ranks that count something now
        return None

    return skip


class _Calls:
    """Calls of metrics in a filler's step: what all metrics had counted comes back when the outermost one ends."""

    def __init__(self, metrics: list[Metric | MetricCollection]) -> None:
        self._metrics = metrics
        self._kept: KeptStates | None = None
        self.depth = 0

    def begin(self) -> None:
        """A metric is called."""
        if not self.depth:
            self._kept = KeptStates(self._metrics)
        self.depth += 1

    def end(self) -> None:
        """A call has ended, or the step has with a call that failed."""
        self.depth = max(self.depth - 1, 0)
        if not self.depth and self._kept is not None:
            self._kept.restore()
            self._kept = None


_RUNNING: list[_Calls] = []
"""The filler that runs, if any; hooks look here, so that copies of a metric may hold on to them."""


def _before_call(*_: Any) -> None:
    if _RUNNING:
        _RUNNING[-1].begin()


def _after_call(*_: Any) -> None:
    if _RUNNING:
        _RUNNING[-1].end()


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
            (metric, {name: self._copy(value) for name, value in vars(metric).items() if _is_kept(name)})
            for metric in metrics
        ]

    def restore(self) -> None:
        """Put back what every metric had counted."""
        for metric, kept in self._kept:
            for name, value in kept.items():
                setattr(metric, name, value)

    def _copy(self, value: Any) -> Any:
        """A copy, the same one for all that share the value."""
        if not isinstance(value, (Tensor, list, dict, set, deque, np.ndarray)):
            return value
        if id(value) not in self._copies:
            copied: Any = value.detach().clone() if isinstance(value, Tensor) else value.copy()
            self._copies[id(value)] = value, copied
            if isinstance(copied, dict):  # buffers, compute groups
                copied.update({key: self._copy(entry) for key, entry in copied.items()})
        return self._copies[id(value)][1]


def _is_kept(name: str) -> bool:
    return name not in NOT_KEPT and "_hooks" not in name

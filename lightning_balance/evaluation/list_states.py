"""Exchange list states of torchmetrics metrics between ranks that have counted unequally often (layer 1).

torchmetrics exchanges lists entry by entry, and takes for granted that every rank has as many, of one kind: plain
Lightning repeats samples until that holds. Here ranks have unequal numbers of samples, and perhaps none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_balance.agreement import gather_objects


def exchange_unequal_lists(module: nn.Module) -> None:
    """Let the metrics that are parts of ``module`` exchange list states of unequal lengths, too.

    Metrics without lists, with a function of their own for the exchange, or with other ways to exchange
    (``MeanAveragePrecision``) stay as they are.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and type(metric)._sync_dist is Metric._sync_dist and metric.dist_sync_fn is None:
            metric._sync_dist = partial(_sync_dist, metric)  # type: ignore[method-assign]


def release(module: nn.Module) -> None:
    """Undo :func:`exchange_unequal_lists`."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            vars(metric).pop("_sync_dist", None)


def _sync_dist(
    metric: Metric, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any | None = None
) -> None:
    """Replace every state by that of all ranks, as ``Metric._sync_dist`` does. A collective call."""
    states = {name: getattr(metric, name) for name in metric._reductions}
    lists = {name: state for name, state in states.items() if isinstance(state, list)}
    if not lists or dist_sync_fn is not gather_all_tensors:
        Metric._sync_dist(metric, dist_sync_fn, process_group)
        return
    group = process_group or metric.process_group
    kinds = gather_objects({name: _kind(state, metric._reductions[name]) for name, state in lists.items()}, group)
    if all(kind == kinds[0] for kind in kinds):
        Metric._sync_dist(metric, dist_sync_fn, process_group)
        return
    own = {name: [_moved(entry, "cpu") for entry in state] for name, state in lists.items()}
    gathered = gather_objects(own, group)
    for name in lists:
        setattr(metric, name, [])
    Metric._sync_dist(metric, dist_sync_fn, process_group)  # the states that are tensors
    for name in lists:
        merged = [_moved(entry, metric.device) for of_rank in gathered for entry in of_rank[name]]
        reduction = metric._reductions[name]
        setattr(metric, name, reduction(merged) if merged and callable(reduction) else merged)


def _kind(state: list[Any], reduction: Any) -> Any:
    """What has to be equal on all ranks for torchmetrics' own exchange: entries and their kinds."""
    kinds = [(entry.ndim, str(entry.dtype)) if isinstance(entry, Tensor) else None for entry in state]
    if reduction is not dim_zero_cat or not state:
        return kinds
    # Several entries are joined to one, numbers to a vector.
    ndim, dtype = kinds[0] or (0, "")
    return ndim if len(state) == 1 else max(ndim, 1), dtype


def _moved(entry: Any, device: Any) -> Any:
    return entry.detach().to(device) if isinstance(entry, Tensor) else entry

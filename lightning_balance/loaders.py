"""Read what a user's DataLoader asks for, and rebuild it around a balanced batch sampler (layer 2)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_balance.evaluation.sampler import EvaluationBatchSampler
from lightning_balance.lengths.find import count_samples
from lightning_balance.sampler import BalancedBatchSampler


@dataclass(frozen=True, kw_only=True)
class LoaderOrder:
    """What a plain loader says about batches and order: samples per batch, shuffle, incomplete last batch."""

    batch_size: int
    shuffle: bool
    drop_last: bool


def check_loader(loader: object, kind: str = "training") -> DataLoader[Any]:
    """Return ``loader`` when it can be balanced; ``kind`` says in errors what it is for.

    Raises:
        TypeError: it is not one map-style ``torch.utils.data.DataLoader``; the sentence says which and what to do.

    Example:
        >>> check_loader([DataLoader([1, 2]), DataLoader([3])])
        Traceback (most recent call last):
            ...
        TypeError: BalanceCallback balances one training DataLoader, got a list: return a single DataLoader from \
train_dataloader (torch.utils.data.ConcatDataset joins data sets), or remove the callback
    """
    if not isinstance(loader, DataLoader):
        way_out = (
            "return a single DataLoader from train_dataloader (torch.utils.data.ConcatDataset joins data sets), or"
            " remove the callback"
        )
        if kind != "training":
            way_out = "make it a DataLoader, or take the stage out of BalanceCallback(stages=...)"
        raise TypeError(f"BalanceCallback balances one {kind} DataLoader, got a {type(loader).__name__}: {way_out}")
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"BalanceCallback cannot balance the IterableDataset {type(loader.dataset).__name__}: it has no lengths to"
            " plan with; use a map-style dataset (__len__ and __getitem__), or remove the callback"
        )
    return loader


def read_order(loader: DataLoader[Any], kind: str = "training") -> LoaderOrder:
    """Batch size, shuffle and drop_last of a plain loader; ``kind`` says in errors what it is for.

    Raises:
        TypeError: the loader draws its samples by a custom sampler or batch sampler, which balancing would override, or
            its dataset has no length.
        ValueError: the loader has no batch size.

    Example:
        >>> read_order(DataLoader([1, 2, 3], batch_size=2, shuffle=True))
        LoaderOrder(batch_size=2, shuffle=True, drop_last=False)
    """
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        raise ValueError(
            f"the {kind} DataLoader has batch_size=None, so it makes no batches that could be balanced: give it a"
            " batch_size"
        )
    if type(batch_sampler) is not BatchSampler:
        raise TypeError(
            f"the {kind} DataLoader has the batch sampler {_name(batch_sampler)}, whose choice of samples"
            " BalanceCallback would override: give the DataLoader batch_size and shuffle instead, or remove the"
            " callback"
        )
    return LoaderOrder(
        batch_size=batch_sampler.batch_size,
        shuffle=_is_shuffled(batch_sampler.sampler, count_samples(loader.dataset), kind),
        drop_last=batch_sampler.drop_last,
    )


def _is_shuffled(sampler: object, num_samples: int, kind: str) -> bool:
    if type(sampler) is SequentialSampler and len(sampler) == num_samples:
        return False
    if type(sampler) is DistributedSampler and len(sampler.dataset) == num_samples:  # type: ignore[arg-type]
        return sampler.shuffle
    if type(sampler) is RandomSampler and len(sampler.data_source) == num_samples:
        if not sampler.replacement and sampler.num_samples == num_samples:
            return True
        raise TypeError(
            f"the {kind} DataLoader has RandomSampler(replacement={sampler.replacement},"
            f" num_samples={sampler.num_samples}), which does not draw every sample once as BalanceCallback does:"
            " use shuffle=True, or remove the callback"
        )
    raise TypeError(
        f"the {kind} DataLoader has the sampler {_name(sampler)}, whose choice of samples BalanceCallback would"
        " override: use shuffle=True or False (torch.utils.data.Subset selects samples), or remove the callback"
    )


def _name(sampler: object) -> str:
    """The class, with its module where torch has another class of that name."""
    kind = type(sampler)
    is_unlike = getattr(torch.utils.data, kind.__name__, kind) is not kind
    return f"{kind.__module__}.{kind.__name__}" if is_unlike else kind.__name__


def with_batch_sampler(
    loader: DataLoader[Any], batch_sampler: BalancedBatchSampler | EvaluationBatchSampler
) -> DataLoader[Any]:
    """A copy of ``loader`` that takes its batches from ``batch_sampler``; every other attribute is the user's own.

    A shallow copy keeps subclasses, their attributes and everything set after construction, and needs no assumption
    about ``__init__``. The copy has never been iterated, so its samplers may still be exchanged; ``DataLoader``
    refuses that by ``__setattr__`` for all instances alike, hence the assignment through ``__dict__``. The loader's
    ``sampler`` becomes a ``DistributedSampler``: Lightning takes such a loader as sharded already and leaves it alone,
    whatever ``use_distributed_sampler`` says (PL#20272, PL#17793).
    """
    balanced = copy.copy(loader)
    sampler: Sampler[Any] = batch_sampler.sampler  # type: ignore[assignment]  # torch declares Sampler | Iterable
    balanced.__dict__.update(
        batch_sampler=batch_sampler, sampler=sampler, batch_size=None, drop_last=False, _iterator=None
    )
    return balanced

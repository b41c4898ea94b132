"""Exact gradients from unequal micro-batches (layer 2).

Let micro-batch ``m`` of an optimizer step have ``u_m`` units (samples, target tokens) and the loss ``l_m``, a mean over
them. The gradient of the mean over the whole global batch is ``sum(u_m * grad(l_m)) / sum(u_m)``. A data-parallel
strategy averages gradients over ``W`` ranks and Lightning divides every loss by the accumulation ``A`` in force, so
each backward is scaled by ``u_m * W * A / U``. When the plan knows the units (samples), ``U`` is their true sum. When
only the batch knows them (target tokens), ``U`` is the planned number of tokens and all gradients are corrected by ``U
/ sum(u_m)`` once per step, after one scalar all-reduce and before clipping. Reports: HF#34191, HF#34242, PL#19987,
verl#141.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_balance.agreement import has_process_group
from lightning_balance.settings import LossReduction

UnitsOfBatch = Callable[[Any], float | int | Tensor]


class _HasGradient(Protocol):
    grad: Tensor | None


def loss_scale(units: float, *, num_ranks: int, accumulation: float, total_units: float) -> float:
    """Factor for one micro-batch's backward.

    Args:
        units: units of the micro-batch; 0 for a filler.
        num_ranks: data-parallel ranks over which gradients are averaged.
        accumulation: what the trainer divides each loss by.
        total_units: units of the whole optimizer step, true or planned.

    Returns:
        ``units * num_ranks * accumulation / total_units``, and 0 when the step has no units at all.

    Example:
        >>> loss_scale(3, num_ranks=2, accumulation=2, total_units=12)
        1.0
    """
    return units * num_ranks * accumulation / total_units if total_units else 0.0


def scale_backward(loss: Tensor, scale: float | Tensor) -> None:
    """Multiply the gradient that enters ``loss`` by ``scale``; the loss itself stays what the user logs (PL#2569).

    Raises:
        ValueError: the loss has no graph, so this rank would not take part in the gradient synchronisation (PL#12190).
    """
    if not loss.requires_grad:
        raise ValueError(
            "training_step returned a loss without a graph (requires_grad=False): return a loss computed from the"
            " model's"
            " output, also for micro-batches without targets (for example output.sum() * 0)"
        )
    loss.register_hook(lambda gradient: (gradient * scale).to(gradient.dtype))  # type: ignore[no-untyped-call]


def scale_gradients(parameters: Iterable[_HasGradient], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place, once each; sharded gradients (DTensor) keep their layout.

    A parameter may be given twice: torch lets the groups of an optimizer name one twice.
    """
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    with torch.no_grad():
        for gradient in gradients:  # not torch's foreach: it refuses sharded and plain gradients in one list
            gradient.mul_(factor)


def sum_over_ranks(value: float | Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Sum of a scalar over the data-parallel group (all ranks without one); the value itself in a single process."""
    if not has_process_group():
        return float(value)
    total = torch.as_tensor(value, dtype=torch.float64).to(device, copy=True)
    dist.all_reduce(total, group=group)
    return float(total)


def units_function(
    loss_reduction: LossReduction | UnitsOfBatch, *, label_key: str = "labels", ignore_index: int = -100
) -> UnitsOfBatch | None:
    """The function ``batch -> units`` of a loss reduction, or None where the plan knows the units.

    Args:
        loss_reduction: ``"token_mean"`` counts labels other than ``ignore_index``; ``"causal_token_mean"`` counts them
            without the first of each sequence, because a causal model predicts the next token; a callable is returned
            as it is; ``"sample_mean"`` and ``"sum"`` need no batch.
        label_key: key or attribute of the labels in the batch.
        ignore_index: label of positions that the loss ignores.

    Example:
        >>> count = units_function("causal_token_mean")
        >>> int(count({"labels": torch.tensor([[5, 6, -100], [7, 8, 9]])}))
        3
    """
    if callable(loss_reduction):
        return loss_reduction
    if loss_reduction in ("sample_mean", "sum"):
        return None
    first = 1 if loss_reduction == "causal_token_mean" else 0

    def count(batch: Any) -> Tensor:
        labels = find_labels(batch, label_key)
        if labels is None:
            raise ValueError(
                f"loss_reduction={loss_reduction!r} counts the labels of a batch, but the batch (a"
                f" {type(batch).__name__})"
                f" has no tensor under label_key={label_key!r}: set label_key, or give loss_reduction a function"
                " batch -> number of target tokens"
            )
        return (labels[..., first:] != ignore_index).sum()

    return count


def find_labels(batch: Any, label_key: str) -> Tensor | None:
    """The tensor under ``label_key`` of a mapping, or the attribute of that name; None where there is neither."""
    found = batch.get(label_key) if isinstance(batch, Mapping) else getattr(batch, label_key, None)
    return found if isinstance(found, Tensor) else None


class StepWeights:
    """Weights of the micro-batches of one optimizer step, as they pass by on one rank.

    Call :meth:`begin` at a step's first micro-batch, :meth:`weigh` before each backward, and :meth:`correction` once,
    before the optimizer.

    Args:
        loss_reduction: see :class:`BalanceCallback`.
        num_ranks: data-parallel ranks.
        label_key: where a batch has its labels.
        ignore_index: label of ignored positions.
    """

    def __init__(
        self,
        loss_reduction: LossReduction | UnitsOfBatch,
        *,
        num_ranks: int,
        label_key: str = "labels",
        ignore_index: int = -100,
    ) -> None:
        self.loss_reduction = loss_reduction
        self.num_ranks = num_ranks
        self._count = units_function(loss_reduction, label_key=label_key, ignore_index=ignore_index)
        self._planned_units = 0.0
        self._counted_units: dict[int, float | int | Tensor] = {}

    @property
    def needs_correction(self) -> bool:
        """Whether units are known from the batch only, so that :meth:`correction` has to be applied."""
        return self._count is not None

    def begin(self, *, num_samples: int, num_tokens: int) -> None:
        """Start an optimizer step of so many samples and planned real tokens over all ranks and slots that will run."""
        self._planned_units = float(num_samples if self._count is None else num_tokens)
        self._counted_units = {}

    def weigh(self, batch: Any, *, slot: int, num_samples: int, accumulation: float) -> float | Tensor:
        """Factor for the backward of the micro-batch in ``slot`` with ``num_samples`` real samples (0: a filler).

        May be asked several times for a slot: optimizers such as LBFGS run the same micro-batch again.
        """
        if self.loss_reduction == "sum":
            return float(self.num_ranks * accumulation) if num_samples else 0.0
        if self._count is None:
            units: float | Tensor = float(num_samples)
        elif num_samples == 0:
            units = 0.0
        else:
            units = self._counted_units[slot] = _exact(self._count(batch))
        return units * loss_scale(
            1.0, num_ranks=self.num_ranks, accumulation=accumulation, total_units=self._planned_units
        )

    def correction(self, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
        """Factor that turns planned units into the counted ones of all ranks; a collective call."""
        total = sum_over_ranks(sum(self._counted_units.values()), device, group)
        return self._planned_units / total if total else 0.0


def _exact(units: float | int | Tensor) -> float | int | Tensor:
    """Units in double precision, where the device has it: an integer tensor times a float would be a single."""
    return units.double() if isinstance(units, Tensor) and units.device.type != "mps" else units

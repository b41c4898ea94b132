"""The smallest real training: one scalar weight w, the loss of a token is w * x, so its gradient is x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

IGNORED = -100


class TokenDataset(Dataset[dict[str, Any]]):
    """Samples of token values; a label is 1, or IGNORED where the value is None (it then counts in nothing)."""

    def __init__(self, samples: Sequence[Sequence[float | None]]) -> None:
        self.samples = samples
        self.lengths = [len(sample) for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {
            "index": index,
            "x": torch.tensor([1000.0 if x is None else x for x in sample]),
            "labels": torch.tensor([IGNORED if x is None else 1 for x in sample]),
        }


def equal_samples(lengths: Sequence[int]) -> TokenDataset:
    """Samples of the given lengths in which sample i holds only the value i + 1."""
    return TokenDataset([[float(i + 1)] * length for i, length in enumerate(lengths)])


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "index": torch.tensor([sample["index"] for sample in samples]),
        "x": pad([sample["x"] for sample in samples], batch_first=True, padding_value=1000.0),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED),
    }


def loader(dataset: TokenDataset, batch_size: int, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, collate_fn=collate, **arguments)


class ScalarModel(LightningModule):
    """Keeps what it saw: `gradients` before each optimizer step, `served` indices of each micro-batch."""

    def __init__(self, reduction: str = "token_mean", lr: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.reduction = reduction
        self.lr = lr
        self.gradients: list[float] = []
        self.served: list[list[int]] = []
        self.epochs: list[int] = []
        self.num_validations = 0

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layer, mesh=self.trainer.strategy.device_mesh["data_parallel"])

    def token_losses(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"].unsqueeze(-1)).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.served.append(batch["index"].tolist())
        self.epochs.append(self.trainer.current_epoch)
        losses = self.token_losses(batch)
        is_target = batch["labels"] != IGNORED
        if self.reduction == "token_mean":
            return losses[is_target].mean()
        per_sample = (losses * is_target).sum(1) / is_target.sum(1)
        return per_sample.mean() if self.reduction == "sample_mean" else per_sample.sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(self.gradient())

    def gradient(self) -> float:
        """The gradient of w, from whichever rank holds it."""
        gradient = self.layer.weight.grad
        if isinstance(self.trainer.strategy, FSDPStrategy):  # one rank holds the only element, the others none
            total = gradient.sum() if gradient is not None else torch.zeros((), device=self.device)
            dist.all_reduce(total)
            return float(total)
        assert gradient is not None
        return float(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.token_losses(batch)

    def on_validation_epoch_start(self) -> None:
        self.num_validations += not self.trainer.sanity_checking

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer(strategy: str | Strategy = "single", num_ranks: int = 1, **arguments: Any) -> Trainer:
    """A quiet CPU trainer; strategy is "single", "fsdp2", "fsdp1" (needs GPUs), or what a Trainer takes."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": num_ranks,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if strategy == "fsdp2":
        defaults["strategy"] = ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)
    elif strategy == "fsdp1":
        defaults.update(strategy="fsdp", accelerator="cuda")
    elif strategy != "single":
        defaults["strategy"] = strategy
    return Trainer(**{**defaults, **arguments})

"""A job in which everything that a tried micro-batch could disturb does disturb the weights: for max_tokens="auto"."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_balance.demo import PadCollator
from lightning_balance.demo.data import TokenDataset

NUM_TOKENS = 50


def token_loader(lengths: Sequence[int], batch_size: int = 4, **arguments: Any) -> DataLoader[Any]:
    rng = np.random.default_rng(0)
    dataset = TokenDataset([rng.integers(0, NUM_TOKENS, length) for length in lengths], max_length=10_000)
    return DataLoader(dataset, batch_size=batch_size, collate_fn=PadCollator(), shuffle=True, **arguments)


class Sensitive(LightningModule):
    """Dropout, batch norm, Adam, a metric, a counter, a list and random numbers of Python, numpy and torch.

    Each enters the loss, so that one micro-batch more or less changes every weight. `width` sets the memory per token.
    """

    def __init__(self, width: int = 32, is_normed: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, width)
        self.norm: nn.Module = nn.BatchNorm1d(width) if is_normed else nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(4 * width, NUM_TOKENS)
        self.seen_loss = MeanMetric()
        self.num_calls = 0
        self.history: list[float] = []
        self.largest = 0

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            mesh = self.trainer.strategy.device_mesh["data_parallel"]
            for layer in (self.hidden, self.out, self):
                fully_shard(layer, mesh=mesh)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embed(ids).flatten(0, 1))
        return self.out(self.dropout(torch.relu(self.hidden(hidden))))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        self.largest = max(self.largest, ids.numel())
        self.num_calls += 1
        loss = nn.functional.cross_entropy(self(ids), batch["labels"].flatten())
        self.seen_loss.update(loss.detach())
        self.history.append(float(loss.detach()))
        drawn = random.random() + np.random.rand()  # noqa: NPY002 - the global state is what may be disturbed
        memory = self.seen_loss.compute() + self.num_calls + len(self.history) + drawn
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss * (1 + 0.01 * memory)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in self.state_dict().items()
        }


class AsksForSteps(Sensitive):
    """Asks for the number of steps before there are optimizers."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total)]

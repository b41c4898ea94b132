"""A module that evaluates without knowing of balancing; each sample has a value and some length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score, BinaryPrecision
from torchmetrics.retrieval import RetrievalMRR


class Values(Dataset[dict[str, Any]]):
    """Sample i: `value` first + i, a row of `lengths[i]` ones."""

    def __init__(self, lengths: Sequence[int], first: float = 0.0) -> None:
        self.lengths = list(lengths)
        self.first = first

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"value": self.first + index, "x": torch.ones(self.lengths[index])}


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        # One row too many, so that Lightning's guess of the batch size would be wrong.
        "first": torch.zeros(len(samples) + 1),
        "value": torch.tensor([sample["value"] for sample in samples]),
        "x": nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True),
    }


def values_loader(
    lengths: Sequence[int], batch_size: int = 2, *, first: float = 0.0, **arguments: Any
) -> DataLoader[Any]:
    return DataLoader(Values(lengths, first), batch_size=batch_size, collate_fn=collate, **arguments)


class Evaluates(LightningModule):
    """Logs means, extremes and sums, and metrics of every kind of state; keeps what it saw in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.mean_value = MeanMetric()
        self.all_values = CatMetric()
        self.num_values = SumMetric()
        self.classified = MetricCollection([BinaryAccuracy(), BinaryF1Score(), BinaryPrecision()])
        self.area = BinaryAUROC()
        self.ranked = RetrievalMRR()
        self.seen: list[tuple[int, list[float]]] = []
        self.collected: list[float] = []

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.layer, FSDPModule):
            fully_shard(self.layer, mesh=self.trainer.strategy.device_mesh["data_parallel"])

    def evaluate(self, batch: dict[str, Tensor], dataloader_idx: int) -> None:
        value = batch["value"]
        forward = self.layer(batch["x"].unsqueeze(-1)).squeeze(-1)
        self.seen.append((dataloader_idx, value.tolist()))
        self.log("mean", value.mean() + 0 * forward.mean(), sync_dist=True)
        self.log("own_size", value.mean(), batch_size=len(value), sync_dist=True)
        self.log("largest", value.max(), reduce_fx="max", sync_dist=True)
        self.log("smallest", value.min(), reduce_fx="min", sync_dist=True)
        self.log("total", value.sum(), reduce_fx="sum", sync_dist=True)
        self.log("by_step", value.mean(), on_step=True, on_epoch=True, sync_dist=True)
        target = (value % 2).long()
        score = torch.sigmoid(value - 3)
        self.mean_value(value)
        self.log("mean_value", self.mean_value)
        self.num_values.update(torch.ones(len(value)))
        self.log("num_values", self.num_values)
        self.classified.update(score, target)
        self.log_dict(self.classified)
        if dataloader_idx == 0:
            self.all_values.update(value)
            self.area.update(score, target)
            self.ranked.update(score, target, indexes=(value // 3).long())

    def on_evaluation_end(self) -> None:
        for name in ("area", "ranked"):
            metric = getattr(self, name)
            self.log(name, metric.compute())
            metric.reset()
        self.collected = sorted(self.all_values.compute().flatten().tolist())
        self.all_values.reset()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch["x"].unsqueeze(-1)).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        forward = self.layer(batch["x"].unsqueeze(-1)).squeeze(-1)
        self.seen.append((dataloader_idx, batch["value"].tolist()))
        return {"value": batch["value"] + 0 * forward.mean(1), "names": [f"sample {v:.0f}" for v in batch["value"]]}

    def on_validation_epoch_end(self) -> None:
        self.on_evaluation_end()

    def on_test_epoch_end(self) -> None:
        self.on_evaluation_end()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

"""The job that is killed: a small real training that keeps books about what it trained.

Its books are three, and independent of each other:

- **weights**: the module has one parameter per epoch and sample, which is added to that sample's loss. Its gradient is
  the weight that the sample has in the optimizer step, and SGD with learning rate 1 sums them up: what was trained, how
  often and how strongly is in the weights themselves.
- **steps**: the same gradients, step by step, with learning rates and validations, saved in checkpoints.
- **log**: every rank appends the indices of each micro-batch to a file as it trains them, and never looks back.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_balance import BalanceCallback
from tests.crash.kills import KillableTrainer, KillPlan

NUM_SAMPLES, NUM_EPOCHS, NUM_TOKENS = 40, 3, 11
MODES: dict[str, dict[str, Any]] = {
    "rebalance": {},
    "token budget": {"max_tokens": 18},
    "filled to the budget": {"max_tokens": 24, "step_unit": "tokens"},
    "lookahead": {"max_tokens": 24, "lookahead": 2},
}
SAVES: dict[str, dict[str, Any]] = {
    "every step": {"every_n_train_steps": 1},
    "every third step, and last": {"every_n_train_steps": 3, "save_last": True},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "at the epoch's end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "every few milliseconds": {"train_time_interval": timedelta(milliseconds=25)},
    "every fourth step, and on exceptions": {"every_n_train_steps": 4, "save_on_exception": True},
}


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a job is, in all its attempts.

    Attributes:
        mode: key of ``MODES``.
        saves: keys of ``SAVES``, one ``ModelCheckpoint`` each.
        samples_per_step: over all ranks; None: from batch size, accumulation and ranks.
        max_steps: the trainer's; a limit that is not reached changes how Lightning restarts.
    """

    mode: str = "rebalance"
    saves: tuple[str, ...] = ("every step",)
    accumulate: int = 1
    loss_reduction: str = "sample_mean"
    samples_per_step: int | None = None
    num_workers: int = 0
    persistent_workers: bool = False
    val_check_interval: float = 1.0
    check_val_every_n_epoch: int = 1
    max_steps: int = -1


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the job.

    Attributes:
        number: 0, 1, ...
        folder: of the job; checkpoints, logs and results lie there.
        checkpoint: where it continues; None: from the beginning.
        kill: where a rank kills itself; None: nowhere.
    """

    number: int
    folder: Path
    num_ranks: int
    checkpoint: Path | None = None
    kill: KillPlan | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def log(self, rank: int) -> Path:
        return self.folder / f"trained-{self.number}-{rank}.jsonl"

    def result(self, rank: int) -> Path:
        return self.folder / f"result-{self.number}-{rank}.pt"


@dataclass
class Books:
    """What the surviving run did, as the module saves it in every checkpoint."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Per optimizer step: ``epoch``, ``step``, ``lr`` and ``weights``, which maps samples to their weights."""
    validations: list[tuple[int, int]] = field(default_factory=list)
    """Epoch and optimizer steps done, per validation."""


class Sequences(Dataset[dict[str, Any]]):
    """Random sequences of random lengths, the same in every process."""

    def __init__(self, num_samples: int = NUM_SAMPLES, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, 13, num_samples).tolist()
        self.tokens = [torch.from_numpy(rng.integers(0, NUM_TOKENS, length)) for length in self.lengths]
        self.targets = [torch.from_numpy(rng.normal(size=length)) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "tokens": self.tokens[index], "targets": self.targets[index]}


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "index": torch.tensor([sample["index"] for sample in samples]),
        "tokens": pad([sample["tokens"] for sample in samples], batch_first=True),
        "targets": pad([sample["targets"] for sample in samples], batch_first=True),
        "labels": pad([torch.ones_like(sample["tokens"]) for sample in samples], batch_first=True, padding_value=-100),
    }


class Bookkeeper(LightningModule):
    """A model whose weights depend on the order of its steps, and that keeps the books."""

    def __init__(self, reduction: str, log: Path) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.trained = nn.Parameter(torch.zeros(NUM_EPOCHS, NUM_SAMPLES))
        self.reduction = reduction
        self.books = Books()
        self._log = log
        self._stepping: dict[str, Any] | None = None

    def on_train_start(self) -> None:
        self._append({"begins_at_step": self.global_step})

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        epoch = self.current_epoch
        self._append({"step": self.global_step, "epoch": epoch, "indices": batch["index"].tolist()})
        losses = self.token_losses(batch) + self.trained[epoch, batch["index"]].unsqueeze(-1)
        is_target = batch["labels"] != -100
        if self.reduction == "token_mean":
            return losses[is_target].mean()
        return ((losses * is_target).sum(1) / is_target.sum(1)).mean()

    def token_losses(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.layers(self.embedding(batch["tokens"])).squeeze(-1) - batch["targets"]).square()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.trained.grad is not None
        epochs, samples = self.trained.grad.nonzero(as_tuple=True)
        assert set(epochs.tolist()) == {self.current_epoch}, f"epoch {self.current_epoch} trained {epochs.tolist()}"
        weights = {sample: float(self.trained.grad[self.current_epoch, sample]) for sample in samples.tolist()}
        lr = optimizer.param_groups[0]["lr"]
        self._stepping = {"epoch": self.current_epoch, "step": self.global_step, "lr": lr, "weights": weights}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        assert self._stepping is not None
        self.books.steps.append(self._stepping)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.token_losses(batch)[batch["labels"] != -100].mean()
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["index"]))

    def on_validation_epoch_end(self) -> None:
        self.books.validations.append((self.current_epoch, self.global_step))

    def configure_optimizers(self) -> dict[str, Any]:
        total = int(self.trainer.estimated_stepping_batches)
        model = [*self.embedding.parameters(), *self.layers.parameters()]
        optimizer = torch.optim.SGD(
            [{"params": model, "lr": 0.05, "momentum": 0.9}, {"params": [self.trained], "lr": 1.0}]
        )
        schedules = [lambda step: 1 - 0.9 * step / total, lambda step: 1.0]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["books"] = {"steps": list(self.books.steps), "validations": list(self.books.validations)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.books = Books(**checkpoint["books"])

    def _append(self, entry: dict[str, Any]) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def run_attempt(settings: JobSettings, attempt: Attempt) -> None:
    """Run this process' rank of the job, from the attempt's checkpoint to the end or to its planned death."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    model = Bookkeeper(settings.loss_reduction, attempt.log(rank)).double()
    balance = BalanceCallback(
        loss_reduction=settings.loss_reduction,
        samples_per_step=settings.samples_per_step,
        seed=3,
        print_summary=False,
        **MODES[settings.mode],
    )
    savers: list[Callback] = [
        ModelCheckpoint(attempt.checkpoints, filename=f"{number}-" + "{epoch}-{step}", **SAVES[name])
        for number, name in enumerate(settings.saves)
    ]
    trainer = KillableTrainer(
        attempt.kill if attempt.kill is not None and rank in attempt.kill.ranks else None,
        accelerator="cpu",
        devices=attempt.num_ranks,
        strategy="ddp" if attempt.num_ranks > 1 else "auto",
        max_epochs=NUM_EPOCHS,
        max_steps=settings.max_steps,
        accumulate_grad_batches=settings.accumulate,
        val_check_interval=settings.val_check_interval,
        check_val_every_n_epoch=settings.check_val_every_n_epoch,
        num_sanity_val_steps=0,
        callbacks=[balance, *savers],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Sequences()
    workers = {"num_workers": settings.num_workers, "persistent_workers": settings.persistent_workers}
    train = DataLoader(data, batch_size=3, shuffle=True, collate_fn=collate, **workers)
    trainer.fit(model, train, DataLoader(data, batch_size=6, collate_fn=collate), ckpt_path=attempt.checkpoint)
    torch.save(
        {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "books": model.books,
            "weights": model.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        },
        attempt.result(rank),
    )

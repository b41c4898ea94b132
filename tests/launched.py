"""A training script as users write them, started by tests/test_launchers.py:

python tests/launched.py SCENARIO '{"strategy": "ddp", "devices": 2}' FOLDER

SCENARIO is a function below. Every rank writes what it saw into FOLDER when a `fit` ends, whoever launched it.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_balance as lb
from lightning_balance.agreement import end_process_group
from tests.toys import IGNORED, ScalarModel, equal_samples, loader, trainer

LENGTHS = [1, 2, 3, 10, 4, 4, 7, 1, 2, 2, 5, 3, 6, 6, 1, 9, 2, 8, 1, 3, 5, 4]
OTHER_LENGTHS = [2, 9, 4, 1, 1, 6, 3, 3, 8, 5, 2, 7, 4, 1, 10, 6, 2, 3]
SEED, LEARNING_RATE = 3, 0.01
BATCH_SIZE, SAMPLES_PER_STEP = 2, 8
MAX_TOKENS = 12

if "LIGHTNING_BALANCE_TEST_JOB_TIMEOUT_S" in os.environ:  # nobody is left to end us when the test itself is killed
    faulthandler.dump_traceback_later(float(os.environ["LIGHTNING_BALANCE_TEST_JOB_TIMEOUT_S"]), exit=True)


def count_targets(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def count_tokens(sample: dict[str, Any]) -> int:
    return len(sample["x"])


def balance(mode: str) -> lb.BalanceCallback:
    """The callback; "budget" has what a spawned process gets by pickle, functions of this script among it."""
    if mode == "slots":
        return lb.BalanceCallback(loss_reduction="token_mean", seed=SEED, print_summary=False)
    return lb.BalanceCallback(
        max_tokens=MAX_TOKENS,
        loss_reduction=count_targets,
        lengths=count_tokens,
        lengths_cache_dir="lengths",  # in the working directory, which two jobs may share
        cost=lb.CostModel(intercept=1.0, alpha=0.01),
        seed=SEED,
        print_summary=False,
    )


@dataclass(frozen=True)
class Record:
    """What one rank saw until the end of a `fit`."""

    rank: int
    num_ranks: int
    pid: int
    launcher: str
    served: list[list[int]]
    epochs: list[int]
    gradients: list[float]
    weight: float
    num_steps: int
    num_validations: int

    @staticmethod
    def of(trainer: Trainer, model: ScalarModel) -> Record:
        return Record(
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            pid=os.getpid(),
            launcher=type(trainer.strategy.launcher).__name__,
            served=model.served,
            epochs=model.epochs,
            gradients=model.gradients,
            weight=float(model.layer.weight.detach()),
            num_steps=trainer.global_step,
            num_validations=model.num_validations,
        )

    @staticmethod
    def read(folder: Path, name: str) -> list[Record]:
        """The records of all ranks that wrote one, in rank order."""
        records = [Record(**json.loads(path.read_text())) for path in folder.glob(f"{name}-rank*.json")]
        return sorted(records, key=lambda record: record.rank)


class Recorder(Callback):
    """Writes the record of this rank when `fit` ends, also by an exception."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ScalarModel)
        record = Record.of(trainer, pl_module)
        path = self.folder / f"{self.name}-rank{record.rank}.json"
        path.write_text(json.dumps(asdict(record)))
        atexit.register(end_process_group)  # in a spawned process nothing of ours runs later

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)


def make_trainer(place: dict[str, Any], *callbacks: Callback, max_epochs: int = 2, **arguments: Any) -> Trainer:
    return trainer(
        **{"strategy": "single", "accumulate_grad_batches": 2, **place},
        callbacks=list(callbacks),
        max_epochs=max_epochs,
        **arguments,
    )


def fit(
    trainer: Trainer,
    model: ScalarModel | None = None,
    lengths: list[int] = LENGTHS,
    ckpt_path: Path | None = None,
    **loader_arguments: Any,
) -> ScalarModel:
    model = model or ScalarModel(lr=LEARNING_RATE)
    data = equal_samples(lengths)
    train = loader(data, **{"batch_size": BATCH_SIZE, "shuffle": True, **loader_arguments})
    trainer.fit(model, train, loader(data, 6), ckpt_path=ckpt_path)
    return model


# ---------------------------------------------------------------------- scenarios


def one_after_the_other(place: dict[str, Any], folder: Path) -> None:
    """Three trainers in one process: fixed slots; a budget; its callback again, in a trainer that continues."""
    fit(make_trainer(place, balance("slots"), Recorder(folder, "slots")))
    callback = balance("budget")
    saver = ModelCheckpoint(folder, save_last=True)
    fit(make_trainer(place, callback, saver, Recorder(folder, "first"), max_epochs=1, enable_checkpointing=True))
    fit(make_trainer(place, callback, Recorder(folder, "second")), ckpt_path=folder / "last.ckpt")


def fit_again(place: dict[str, Any], folder: Path) -> None:
    """One trainer, three times: two epochs, two more with the same model, two more with another and other data."""
    for mode in ("slots", "budget"):
        recorder = Recorder(folder, f"{mode}-begun")
        used = make_trainer(place, balance(mode), recorder)
        model = fit(used)
        recorder.name = f"{mode}-continued"
        used.fit_loop.max_epochs = 4
        fit(used, model)
        recorder.name = f"{mode}-other"
        used.fit_loop.max_epochs = 6
        fit(used, lengths=OTHER_LENGTHS, batch_size=3, num_workers=1)


class BalancedData(lb.BalancedDataModuleMixin, LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples(LENGTHS), BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples(LENGTHS), 6)


def used_before(place: dict[str, Any], folder: Path) -> None:
    """A callback that balanced a run in this process, in a trainer that launches; then a data module that balances."""
    callback = balance("budget")
    fit(make_trainer({}, callback, Recorder(folder, "alone")))
    fit(make_trainer(place, callback, Recorder(folder, "launched")))
    data = BalancedData(max_tokens=MAX_TOKENS, loss_reduction=count_targets, seed=SEED, print_summary=False)
    make_trainer(place, Recorder(folder, "data_module")).fit(ScalarModel(lr=LEARNING_RATE), data)


class WaitsForSigterm(Callback):
    """In one hook of the second epoch, every rank says that it is there and goes on when the signal has come."""

    def __init__(self, folder: Path, moment: str) -> None:
        self.folder, self.moment = folder, moment

    def _wait(self, trainer: Trainer, moment: str) -> None:
        if not self.moment.startswith(moment) or trainer.current_epoch != 1 or trainer.sanity_checking:
            return
        (self.folder / f"waits-rank{trainer.global_rank}").touch()
        while not trainer.received_sigterm:
            time.sleep(0.01)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._wait(trainer, "in a window")

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            self._wait(trainer, "before a step")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 3:
            self._wait(trainer, "after a batch")

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._wait(trainer, "in validation")


SAVED = ("model", "last", "on_exception")


def mode_of(folder: Path) -> str:
    return folder.name.split(", ")[1]


def until_sigterm(place: dict[str, Any], folder: Path) -> None:
    """Train until a signal comes; FOLDER's name says "moment, mode". Lightning's callbacks save SAVED."""
    savers = (
        ModelCheckpoint(folder, filename="model", save_last=True, save_on_exception=True),
        OnExceptionCheckpoint(folder),
    )
    others = (WaitsForSigterm(folder, folder.name), balance(mode_of(folder)), Recorder(folder, "stopped"))
    fit(make_trainer(place, *savers, *others, enable_checkpointing=True))


def after_sigterm(place: dict[str, Any], folder: Path) -> None:
    """Train without a stop; then continue from all that was saved in the folders in this one."""
    for mode in ("slots", "budget"):
        fit(make_trainer(place, balance(mode), Recorder(folder, f"{mode}-whole")))
    for path in sorted(folder.glob("*/*.ckpt")):
        fit(make_trainer(place, balance(mode_of(path.parent)), Recorder(path.parent, path.stem)), ckpt_path=path)


def main(scenario: str, place: str, folder: str) -> None:
    torch.set_num_threads(1)
    globals()[scenario](json.loads(place), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])

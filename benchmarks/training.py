"""The training job of the benchmarks: the demo's model, quiet trainers, and what is measured of their steps."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from benchmarks.options import positive_int
from lightning_balance import BalanceCallback, CostModel
from lightning_balance.calibration.file import read_cost_file
from lightning_balance.demo import CausalLM, FunctionsDataModule, PadCollator, TokenDataset
from lightning_balance.probing.calibration_callback import CalibrateOptions, CalibrationCallback
from lightning_balance.settings import BalanceSettings
from lightning_balance.waiting import WaitClock, can_measure_waiting

STRATEGIES = ("ddp", "FSDP2")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where a run trains, and which model. One command line option each, and JSON between processes.

    Attributes:
        accelerator: ``"cpu"`` or ``"gpu"``.
        num_ranks: processes.
        precision: as Lightning calls it.
        hidden_size: width of the model.
        num_layers: its layers.
        num_heads: its attention heads.
        activation_checkpointing: recompute activations in backward.
        attention_mask: give the model one with every padded micro-batch, which a causal one does not need.
    """

    accelerator: str = "cpu"
    num_ranks: int = 2
    precision: str = "32-true"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    activation_checkpointing: bool = False
    attention_mask: bool = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
        """Add an option for each attribute."""
        for name, default in {**asdict(Job()), **defaults}.items():
            option = "--" + name.replace("_", "-")
            if isinstance(default, bool):
                parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
            else:
                is_number = isinstance(default, int)
                choices = ("cpu", "gpu") if name == "accelerator" else None
                parser.add_argument(option, type=positive_int if is_number else str, choices=choices, default=default)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Job:
        """Return the job of a command line."""
        return cls(**{name: getattr(options, name) for name in asdict(cls())})

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.accelerator == "gpu" else torch.device("cpu")

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.accelerator == "gpu":
            torch.cuda.synchronize()

    @property
    def collator(self) -> PadCollator:
        """What makes a micro-batch of samples."""
        return PadCollator(attention_mask=self.attention_mask)

    def model(self) -> CausalLM:
        """Return the model with the weights that every run starts from."""
        torch.manual_seed(0)
        return CausalLM(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            activation_checkpointing=self.activation_checkpointing,
        )

    def trainer(self, strategy: str, callbacks: Sequence[Callback], **arguments: Any) -> L.Trainer:
        """Return a trainer that shows and saves nothing."""
        defaults: dict[str, Any] = {
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return L.Trainer(
                accelerator=self.accelerator,
                devices=self.num_ranks,
                strategy=self._strategy(strategy),
                precision=self.precision,  # type: ignore[arg-type]  # any of Lightning's names
                callbacks=list(callbacks),
                **{**defaults, **arguments},
            )

    def _strategy(self, name: str) -> Any:
        if name != "FSDP2":
            return name
        return ModelParallelStrategy(data_parallel_size=self.num_ranks, tensor_parallel_size=1)

    def calibrated_cost(self, strategy: str, data: TokenDataset, batch_size: int) -> CostModel:
        """Return the cost model that ``lightning-balance calibrate`` finds on these ranks; all ranks call it."""
        holder: list[Any] = [None]
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "cost.yaml")
            measuring = CalibrationCallback(BalanceSettings(), CalibrateOptions(out=out), find_max_tokens=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loader = DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=self.collator)
                self.trainer(strategy, [measuring], max_epochs=1).fit(self.model(), loader)
            if Path(out).exists():
                holder = [asdict(read_cost_file(out))]
        torch.distributed.broadcast_object_list(holder, src=0)
        return CostModel(**holder[0])


def samples_of(count: int, max_length: int = 1024) -> TokenDataset:
    """Return the first functions of the demo, so many, as bytes clipped at a length."""
    data = FunctionsDataModule(num_functions=2 * count, max_length=max_length)
    data.prepare_data()
    data.setup("fit")
    assert data.train_dataset is not None
    sequences = [data.train_dataset[index]["input_ids"].numpy() for index in range(count)]
    return TokenDataset(sequences, max_length=max_length)


def random_samples(lengths: NDArray[np.int64]) -> TokenDataset:
    """Return samples of given lengths; what they hold does not matter."""
    tokens = np.random.default_rng(0).integers(1, 250, size=int(lengths.max()))
    return TokenDataset([tokens[:length] for length in lengths], max_length=int(lengths.max()))


class Watch(Callback):
    """Times the steps of a run, what it waits and how busy it is, and keeps the shapes of its micro-batches.

    Args:
        job: what is trained.
        balance: the run's, whose planning before the first step counts as part of that step.

    Attributes:
        steps: seconds of each optimizer step; of the whole stage for evaluation.
        waited_s: seconds in which the rank's thread did not run inside its micro-batches; None where that cannot be
            measured, on a GPU.
        busy_s: processor seconds of this process.
        shapes: count and padded length of each micro-batch.
    """

    def __init__(self, job: Job, balance: BalanceCallback | None = None) -> None:
        self._balance = balance
        self.steps: list[float] = []
        self.waited_s: float | None = 0.0 if can_measure_waiting(job.device) else None
        self.busy_s = 0.0
        self.shapes: list[tuple[int, int]] = []
        self._job = job
        self._clock = WaitClock()

    def figures(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {"steps": self.steps, "waited_s": self.waited_s, "busy_s": self.busy_s, "shapes": self.shapes}

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin together."""
        self._begin(trainer)
        if self._balance is not None:
            assert self._balance._fit is not None
            self._begun -= self._balance._fit.sampler.planning_seconds
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Note the shape."""
        self.shapes.append(tuple(batch["input_ids"].shape))
        self._clock.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the time where a step ends."""
        if trainer.global_step > self._step:
            self._job.synchronise()
            self._step, now = trainer.global_step, perf_counter()
            self.steps.append(now - self._begun)
            self._begun = now
            self.busy_s = process_time() - self._busy_before
        if self.waited_s is not None:
            self.waited_s += self._clock.stop()

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin together."""
        self._begin(trainer)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        """Note the shape."""
        self.shapes.append(tuple(batch["input_ids"].shape))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the time of the whole stage, all ranks done."""
        self._job.synchronise()
        trainer.strategy.barrier()
        self.steps.append(perf_counter() - self._begun)
        self.busy_s = process_time() - self._busy_before

    def _begin(self, trainer: L.Trainer) -> None:
        trainer.strategy.barrier()
        self._job.synchronise()
        self._begun, self._busy_before = perf_counter(), process_time()


def in_turn(names: Sequence[str], index: int) -> list[str]:
    """Return names in the order of a round: each is first, second, ... in some round.

    >>> in_turn(["a", "b", "c"], 1)
    ['b', 'c', 'a']
    """
    return [names[(place + index) % len(names)] for place in range(len(names))]


def median_and_range(values: Sequence[float]) -> list[float]:
    """Return median, least and most.

    >>> median_and_range([3.0, 1.0, 2.0])
    [2.0, 1.0, 3.0]
    """
    return [float(value) for value in np.quantile(values, [0.5, 0, 1])]

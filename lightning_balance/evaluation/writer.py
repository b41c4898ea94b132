"""Write predictions to disk in the data set's order, whatever the batching and the number of ranks (layer 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_balance.agreement import from_rank_zero, on_every_rank
from lightning_balance.evaluation.ordering import in_order, join, split_by_sample
from lightning_balance.outputs import whole_file


class OrderedPredictionWriter(BasePredictionWriter):
    """Writes what ``predict_step`` returned, sample by sample in the data set's order, into one file per loader.

    Every rank writes its samples with their indices into a file of its own; then rank 0 merges them and deletes them.
    Works with balanced loaders and with plain ones, on any number of ranks; give ``trainer.predict`` the option
    ``return_predictions=False`` to keep them off the return value.

    ``predictions.pt`` (with several loaders ``predictions_0.pt``, ``predictions_1.pt``, ...) holds a dictionary:
    ``indices``, the samples in ascending order, and ``predictions``, a list with the output of each. Outputs are on the
    CPU.

    Args:
        output_dir: folder for the files, made if it does not exist; with several nodes one that all of them see.

    Raises:
        TypeError: ``output_dir`` is no path.
        ValueError: in predict: ``output_dir`` is a file, a loader has no indices, an output has no entry per sample; at
            the end of predict, on every rank: an output has no entry per sample, or the file of a rank
            is missing.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[OrderedPredictionWriter("predictions")])
    """

    def __init__(self, output_dir: str | Path) -> None:
        super().__init__(write_interval="batch_and_epoch")
        if not isinstance(output_dir, (str, Path)):
            raise TypeError(f"output_dir must be a path, got {output_dir!r} ({type(output_dir).__name__})")
        self.output_dir = Path(output_dir)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the folder before anything is predicted."""
        super().setup(trainer, pl_module, stage)
        if stage == "predict" and self.output_dir.exists() and not self.output_dir.is_dir():
            raise ValueError(f"output_dir={str(self.output_dir)!r} is a file: choose a folder")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Refuse outputs that cannot be written sample by sample at the first of them, not at the end."""
        if batch_idx == 0:
            if not batch_indices:
                raise ValueError(
                    "OrderedPredictionWriter needs to know which samples a batch has, and Lightning tells it of"
                    " map-style data in a DataLoader only: use such a loader, or a writer of your own"
                )
            split_by_sample(prediction, len(batch_indices))

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write the file of this rank, and merge all of them. A collective call."""
        of_loaders = [predictions] if len(batch_indices) == 1 else predictions
        for place, (outputs, indices) in enumerate(zip(of_loaders, batch_indices, strict=True)):
            name = "predictions" if len(batch_indices) == 1 else f"predictions_{place}"
            on_every_rank(lambda name=name, outputs=outputs, indices=indices: self._write(  # type: ignore[misc]
                self._file_of(name, trainer.global_rank), *in_order(outputs, indices)
            ))  # fmt: skip
            from_rank_zero(lambda name=name: self._merge(name, trainer.world_size))  # type: ignore[misc]

    def _file_of(self, name: str, rank: int) -> Path:
        return self.output_dir / f"{name}.rank_{rank}.pt"

    def _write(self, path: Path, indices: list[int], predictions: list[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            torch.save({"indices": indices, "predictions": predictions}, file)

    def _merge(self, name: str, num_ranks: int) -> None:
        paths = [self._file_of(name, rank) for rank in range(num_ranks)]
        missing = [str(path) for path in paths if not path.exists()]
        if missing:
            raise ValueError(
                f"output_dir={str(self.output_dir)!r} does not hold {', '.join(missing)}, which other ranks have"
                " written: choose a folder that all nodes see"
            )
        # Just written here, and predictions may be anything.
        parts = (torch.load(path, weights_only=False) for path in paths)
        joined = join((part["indices"], part["predictions"]) for part in parts)
        self._write(self.output_dir / f"{name}.pt", *joined)
        for path in paths:
            path.unlink()

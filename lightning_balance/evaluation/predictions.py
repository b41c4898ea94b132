"""What ``trainer.predict`` returned, in the data set's order, of this rank and of all (layer 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_balance.agreement import gather_objects, on_every_rank
from lightning_balance.evaluation.ordering import in_order, join


@dataclass(frozen=True)
class OrderedPredictions:
    """How this rank's predictions of one run are ordered.

    Attributes:
        indices: for each loader the samples of this rank, ascending.
        are_ordered: for each loader whether there is an output for each of them; else there is one per micro-batch.
    """

    indices: list[list[int]]
    are_ordered: list[bool]

    @classmethod
    def of(cls, predictions: list[Any], served: Sequence[Sequence[Sequence[int]]]) -> OrderedPredictions:
        """Turn outputs of micro-batches into those of single samples, in the data set's order, in place.

        Outputs that have no entry per sample, on any rank, stay as they are, with a warning. A collective call.

        Args:
            predictions: an output for each micro-batch; with several loaders a list of them for each.
            served: by loader and micro-batch, the samples of this rank; none for fillers, which have no output.
        """
        are_ordered = []
        for outputs, batches in zip(_by_loader(predictions, len(served)), served, strict=True):
            ordered, fault = outputs, None
            try:
                ordered = in_order(outputs, batches)[1]
            except ValueError as error:
                fault = str(error)
            faults = [fault for fault in gather_objects(fault) if fault is not None]
            are_ordered.append(not faults)
            if not faults:
                outputs[:] = ordered
            else:
                rank_zero_warn(
                    f"trainer.predict returns outputs by micro-batch, longest samples first, because {faults[0]}:"
                    " return one entry per sample from predict_step"
                )
        return cls([sorted(index for batch in batches for index in batch) for batches in served], are_ordered)

    def gather(self, predictions: list[Any]) -> list[Any]:
        """The outputs of all ranks in the data set's order, on every rank. A collective call.

        Raises:
            ValueError: on every rank, when they are not those of single samples.
        """
        of_loaders = _by_loader(predictions, len(self.indices))
        on_every_rank(lambda: self._check(of_loaders))
        gathered = [
            join(gather_objects((indices, outputs)))[1]
            for outputs, indices in zip(of_loaders, self.indices, strict=True)
        ]
        return gathered[0] if len(gathered) == 1 else gathered

    def _check(self, of_loaders: list[Any]) -> None:
        takes = "gather_predictions takes what the latest trainer.predict returned on this rank, "
        if len(of_loaders) != len(self.indices):
            raise ValueError(f"{takes}a list for each of {len(self.indices)} loaders, got {len(of_loaders)} entries")
        for outputs, indices, is_ordered in zip(of_loaders, self.indices, self.are_ordered, strict=True):
            if not is_ordered or len(outputs) != len(indices):
                raise ValueError(
                    f"{takes}one output for each of {len(indices)} samples, got {len(outputs)} outputs"
                    + ("" if is_ordered else " by micro-batch: return one entry per sample from predict_step")
                )


def _by_loader(predictions: list[Any], num_loaders: int) -> list[Any]:
    return [predictions] if num_loaders == 1 else predictions

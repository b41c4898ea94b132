"""The peak memory of training on the largest micro-batches of a sampler: one definition for every benchmark.

On a GPU it is the allocator's (``torch.cuda.max_memory_allocated``). On the CPU it is an exact count of the bytes of
all tensors that are alive (:class:`LiveBytes`), the same in every run; scratch memory inside kernels is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from benchmarks.training import Job
from lightning_balance.demo import CausalLM
from lightning_balance.probing.live_bytes import LiveBytes
from lightning_balance.probing.peak import standing_tensors

NUM_LARGEST = 3
"""So many micro-batches are run: those with most padded tokens, and those with the largest quadratic part."""


class Peaks:
    """Measures a model on one process: weights, gradients and the optimizer's state are part of every peak.

    Args:
        job: the model, its device and its precision.
        backward: train; else only forward without gradients.
    """

    def __init__(self, job: Job, *, backward: bool = True) -> None:
        self._job, self._backward = job, backward
        self._model: CausalLM = job.model()
        self._model.configure_model()
        self._model.to(job.device)
        self._optimizer = self._model.configure_optimizers()
        self._known: dict[tuple[int, int], int] = {}
        self._run((1, 8))  # makes gradients and the optimizer's state

    def of(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Return the peak of the largest of some micro-batches, in bytes.

        Args:
            shapes: count and padded length of each micro-batch.
        """
        return max(self._of_one(shape) for shape in largest(shapes))

    def _of_one(self, shape: tuple[int, int]) -> int:
        if shape not in self._known:
            self._known[shape] = self._measure(lambda: self._run(shape))
        return self._known[shape]

    def _measure(self, run: Callable[[], None]) -> int:
        if self._job.accelerator == "gpu":
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        with LiveBytes(standing_tensors(self._model, [self._optimizer])) as live:
            run()
        return live.peak

    def _run(self, shape: tuple[int, int]) -> None:
        tokens = torch.ones(shape, dtype=torch.long, device=self._job.device)
        batch = {"input_ids": tokens, "labels": tokens}
        if self._job.attention_mask:
            batch["attention_mask"] = tokens.clone()
            batch["attention_mask"][-1, -1] = 0  # a mask of ones is taken for none
        is_half = self._job.precision.startswith("bf16")
        with (
            torch.autocast(self._job.device.type, torch.bfloat16, enabled=is_half),
            torch.set_grad_enabled(self._backward),
        ):
            loss = self._model(batch)
        if self._backward:
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=False)


def largest(shapes: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the micro-batches that may need most memory.

    >>> sorted(largest([(1, 4), (9, 1), (2, 3), (1, 1), (1, 2), (8, 1)]))
    [(1, 4), (2, 3), (8, 1), (9, 1)]
    """
    known = sorted({(int(count), int(length)) for count, length in shapes})
    keys: tuple[Callable[[tuple[int, int]], int], ...] = (
        lambda shape: shape[0] * shape[1],
        lambda shape: shape[0] * shape[1] ** 2,
    )
    return {shape for key in keys for shape in sorted(known, key=key)[-NUM_LARGEST:]}

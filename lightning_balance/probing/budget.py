"""The largest token budget whose worst micro-batches fit into memory, the same on every rank."""

from __future__ import annotations

from math import inf
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_balance.agreement import gather_objects, on_every_rank
from lightning_balance.calibration.error import CalibrationError
from lightning_balance.calibration.search import BudgetSearch, find_largest
from lightning_balance.memory import GIB
from lightning_balance.probing.micro_batches import MicroBatches
from lightning_balance.probing.peak import PeakMeter
from lightning_balance.probing.prober import Prober


class BudgetFinder:
    """Tries token budgets on their worst micro-batches.

    With ``B`` tokens these are the longest samples, ``B // longest`` of them (what grows with the square of the
    length), the most short samples that fit (what grows with their number), and the micro-batch of this data with the
    most padded tokens. Each is run forward and backward with the optimizer's state and the gradients of an earlier
    micro-batch in memory, as inside an accumulation window, after an optimizer step with the longest.

    Args:
        trainer: a trainer inside ``fit``, with strategy, module and optimizers set up.
        micro_batches: makes them of the training data.
        max_samples: samples of one optimizer step over all ranks; no micro-batch has more.
        memory_fraction: share of the memory that may be used.
        memory_limit_gib: memory of a rank in GiB; needed on the CPU.
    """

    def __init__(
        self,
        trainer: Trainer,
        micro_batches: MicroBatches,
        *,
        max_samples: int,
        memory_fraction: float,
        memory_limit_gib: float | None,
    ) -> None:
        self._prober = Prober(trainer)
        self._micro_batches = micro_batches
        self._max_samples = min(max_samples, len(micro_batches.sorted_lengths))
        self._longest = int(micro_batches.sorted_lengths[-1])
        self._meter = on_every_rank(
            lambda: PeakMeter(self._prober, memory_fraction=memory_fraction, memory_limit_gib=memory_limit_gib)
        )

    @property
    def limit_gib(self) -> float:
        """The memory that this rank may use, in GiB."""
        return self._meter.limit_bytes / GIB

    def find(self) -> tuple[int, BudgetSearch]:
        """Return the budget, and all tries; the module, optimizers and random numbers are afterwards as before.

        A collective call: all ranks try the same budgets, and the rank with the least memory decides.

        Raises:
            CalibrationError: not even the longest sample alone fits.
        """
        with self._prober.leaving_no_trace():
            search = find_largest(self._share, smallest=self._longest, largest=self._longest * self._max_samples)
        if search.max_tokens is None:
            share = search.tries[0].share
            needs = "runs out of memory" if share == inf else f"needs {share * self.limit_gib:.3g} GiB"
            raise CalibrationError(
                f"no max_tokens fits: the longest sample alone, {self._longest} padded tokens, {needs}, but a rank"
                f" may use {self.limit_gib:.3g} GiB: clip samples (max_length), raise the memory fraction or limit,"
                " checkpoint activations, or shard the model (FSDP)"
            )
        return search.max_tokens, search

    def _share(self, max_tokens: int) -> float:
        own_share = self._meter.share(lambda: self._run_worst(max_tokens))
        # Here, where no error's traceback holds on to the activations of what failed.
        self._prober.clear_gradients()
        self._prober.clean_up()
        share: float = max(gather_objects(own_share))
        used = "memory ran out" if share == inf else f"{share:.1%} of {self.limit_gib:.3g} GiB"
        rank_zero_info(f"max_tokens={max_tokens}: {used}")
        return share

    def _run_worst(self, max_tokens: int) -> bool:
        """Whether memory suffices on every rank."""
        prober, made = self._prober, self._micro_batches
        bounds = {"max_tokens": max_tokens, "max_samples": self._max_samples}
        num_longest = max(min(max_tokens // self._longest, self._max_samples), 1)
        return (
            prober.fits(lambda: made.longest(num_longest), self._step_and_run)
            and prober.fits(lambda: made.fullest(**bounds), prober.forward_backward)
            and prober.fits(lambda: made.shortest(**bounds), prober.forward_backward)
        )

    def _step_and_run(self, batch: Any) -> None:
        self._prober.optimizer_step(batch)
        self._prober.forward_backward(batch)  # leaves gradients, which the next ones find
        self._prober.forward_backward(batch)

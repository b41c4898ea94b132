"""Figures of a balanced run while it runs: planned by the plan, measured by the clock and the allocator (layer 2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from lightning_balance.agreement import has_process_group
from lightning_balance.fitting import Place
from lightning_balance.memory import has_accelerator_peak, restart_accelerator_peak
from lightning_balance.metrics import CostSpread, PadEfficiency, PeakMemory
from lightning_balance.totals import DoneStep, PlannedSteps, Totals
from lightning_balance.waiting import WaitClock, can_measure_waiting

PREFIX = "balance/"
MAX_PENDING_MICRO_BATCHES = 1024
"""Steps are summed up when they have so many micro-batches over all ranks: one by one, each would take 0.3 ms."""
MAX_RANKS_LOGGED = 8
"""Waiting is logged for so many ranks one by one, and as mean and maximum over all."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What only the ranks together know at the end of a run.

    Attributes:
        peaks: peak memory in GiB, max over ranks, by the name of what was read; empty where nothing can be read.
        waited_seconds: time that each rank waited inside micro-batches; empty where that cannot be measured.
    """

    peaks: dict[str, float]
    waited_seconds: tuple[float, ...]


class RunMonitor:
    """Collects what every optimizer step did; asks for no communication but when values are synced for a log.

    The planned figures cover all ranks, because every rank knows the whole plan. A synchronisation is a slot
    (``sync="micro_batch"``) or a step (``sync="step"``).

    Args:
        rank: this data-parallel rank.
        sync: when ranks wait for each other.
        device: the run's. Metrics' states live there where a process group reduces them, and in a run of one process on
            the host, where reading them waits for no device.
        clock: seconds, monotonic; an argument so that tests can set the time.
    """

    def __init__(
        self, *, rank: int, sync: str, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rank = rank
        self.sync = sync
        self._clock = clock
        self._run = Totals()
        self._since_log = Totals()
        self._window_started: float | None = None
        self._paused_at: float | None = None
        has_others = has_process_group() and dist.get_world_size() > 1
        has_counter = device.type != "cpu" and has_accelerator_peak()  # which the machine may have, unused
        place = device if has_others else torch.device("cpu")
        self.pad_efficiency = PadEfficiency(sync_on_compute=has_others).to(place)
        self.cost_spread = CostSpread(sync_on_compute=has_others).to(place)
        self.peak_memory = PeakMemory(
            "accelerator" if has_counter else "rss", restart_window=has_counter, sync_on_compute=has_others
        ).to(place)
        self._peak_of_epoch = self._peak_of_run = math.nan
        self._device = device
        self._wait_clock = WaitClock() if has_others and can_measure_waiting(device) else None
        self._waited_seconds = 0.0
        self._planned_before = 0.0
        self._pending: list[DoneStep] = []

    @property
    def run(self) -> Totals:
        """Sums of the run so far."""
        self._sum_up()
        return self._run

    def begin_wait(self) -> None:
        """Start to count what this rank waits: before a micro-batch, and where the loop asks all ranks before it."""
        if self._wait_clock is not None:
            self._wait_clock.start()

    def end_wait(self) -> None:
        """Add what was waited to the step, unless its clock stands: what is no time of a step is no waiting either."""
        if self._wait_clock is not None:
            waited = self._wait_clock.stop()
            if self._window_started is not None and self._paused_at is None:
                self._waited_seconds += waited

    def begin_micro_batch(self) -> None:
        """Let the clock run, from an epoch's first micro-batch or on after a pause; count what this one waits."""
        if self._window_started is None:
            self._window_started = self._clock()
        elif self._paused_at is not None:
            self._window_started += self._clock() - self._paused_at
        self._paused_at = None
        if self.peak_memory.restart_window:
            restart_accelerator_peak()  # what came between is no micro-batch
        self.begin_wait()

    def end_micro_batch(self) -> None:
        """Add what the micro-batch waited to its step, and read what it needed where the counter can be restarted."""
        if self.peak_memory.restart_window:
            self.peak_memory.update()
        self.end_wait()

    def begin_epoch(self) -> None:
        """Count time from the epoch's first micro-batch: start of workers and of other callbacks is no step."""
        self._window_started = self._paused_at = None
        self._waited_seconds = 0.0

    def forget_modelled_time(self) -> None:
        """Begin to sum modelled time anew: another cost has other units."""
        self._sum_up()
        for totals in (self._run, self._since_log):
            totals.modelled_time, totals.modelled_samples = 0.0, 0

    def pause(self) -> None:
        """Stop the clock until the next micro-batch: validation, and what others do at its end, is no step."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def end_step(self, place: Place, *, planning_seconds: float = 0.0) -> None:
        """Count the optimizer step that ended with ``place``, its last slot.

        Args:
            place: where its last micro-batch stands.
            planning_seconds: what the sampler has spent on planning so far; another sampler begins at 0.
        """
        planned = planning_seconds - (self._planned_before if planning_seconds >= self._planned_before else 0.0)
        self._planned_before = planning_seconds
        waited, self._waited_seconds = self._waited_seconds, 0.0
        now = self._clock()
        assert self._window_started is not None, "a step ends without having begun"
        seconds, self._window_started = now - self._window_started, now
        step = DoneStep(place=place, seconds=seconds, waited_seconds=waited, planning_seconds=planned)
        self._pending.append(step)
        if len(self._pending) * place.plan.costs.size >= MAX_PENDING_MICRO_BATCHES:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add the pending steps to all sums and metrics."""
        if not self._pending:
            return
        steps, self._pending = self._pending, []
        planned = PlannedSteps(steps, self.sync)
        totals = Totals.of(steps, planned)
        self._run.add(totals)
        self._since_log.add(totals)
        self.pad_efficiency.update(planned.real_tokens[:, self.rank], planned.padded_tokens[:, self.rank])
        self.cost_spread.update(planned.synchronised_costs)

    def step_values(self) -> dict[str, float]:
        """Values for a logger since the last call: planned shares and measured rates. A collective call."""
        self._sum_up()
        totals, self._since_log = self._since_log, Totals()
        rates = {
            "tokens_per_second": totals.real_tokens,
            "padded_tokens_per_second": totals.padded_tokens,
            "samples_per_second": totals.num_samples,
        }
        values: dict[str, float] = {
            "pad_efficiency": totals.pad_efficiency,
            "cost_spread": totals.cost_spread,
            "step_time_s": totals.seconds / totals.num_steps if totals.num_steps else math.nan,
            "planning_time_s": totals.planning_seconds / totals.num_steps if totals.num_steps else math.nan,
            **{name: amount / totals.seconds if totals.seconds else math.nan for name, amount in rates.items()},
        }
        values.update(self._peak(self._renew_peaks()))
        values.update(self._wait_times(totals))
        return {PREFIX + name: value for name, value in values.items()}

    def _wait_times(self, totals: Totals) -> dict[str, float]:
        waited = [seconds / max(totals.num_steps, 1) for seconds in self._waited_of_ranks(totals)]
        if not waited:
            return {}
        named = {f"wait_time_s/rank_{rank}": seconds for rank, seconds in enumerate(waited[:MAX_RANKS_LOGGED])}
        return {"wait_time_mean_s": sum(waited) / len(waited), "wait_time_max_s": max(waited), **named}

    def _waited_of_ranks(self, totals: Totals) -> list[float]:
        """Seconds that each rank waited; none where that cannot be measured. A collective call."""
        if self._wait_clock is None:
            return []
        own = torch.tensor([totals.waited_seconds], device=self._device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        return torch.cat(gathered).tolist()

    @property
    def has_epoch_values(self) -> bool:
        """Whether a step ended since the last :meth:`epoch_values`.

        Not so in an epoch that is cut inside its first window, or continued at its end.
        """
        return bool(self._pending) or self.pad_efficiency.update_called

    def epoch_values(self) -> dict[str, float]:
        """Values of the epoch over all ranks, under names ending in ``_epoch``. A collective call.

        They cover what this process did of the epoch; only where :attr:`has_epoch_values`.
        """
        self._sum_up()
        self._renew_peaks()
        values: dict[str, float] = {
            "pad_efficiency": float(self.pad_efficiency.compute()),
            "cost_spread": float(self.cost_spread.compute()),
            **self._peak(self._peak_of_epoch),
        }
        self._peak_of_epoch = math.nan
        self.pad_efficiency.reset()
        self.cost_spread.reset()
        return {f"{PREFIX}{name}_epoch": value for name, value in values.items()}

    def rank_figures(self) -> RankFigures:
        """Ask all ranks for what the end of the run tells of them. A collective call."""
        self._renew_peaks()
        names = {"peak_memory_gib": "peak allocated memory", "peak_rss_gib": "peak process memory (RSS)"}
        peaks = {names[key]: value for key, value in self._peak(self._peak_of_run).items()}
        return RankFigures(peaks=peaks, waited_seconds=tuple(self._waited_of_ranks(self.run)))

    def _renew_peaks(self) -> float:
        """The peak over ranks since the last call, in GiB; counts it in that of epoch and run. A collective call."""
        if not self.peak_memory.restart_window:  # else micro-batches have been read, and what came since is none
            self.peak_memory.update()
        if not self.peak_memory.update_called:
            return math.nan
        peak = float(self.peak_memory.compute())
        self.peak_memory.reset()
        # fmax: a number is larger than nan, which stands for what could not be read.
        self._peak_of_epoch = float(np.fmax(self._peak_of_epoch, peak))
        self._peak_of_run = float(np.fmax(self._peak_of_run, peak))
        return peak

    def _peak(self, peak: float) -> dict[str, float]:
        return {} if math.isnan(peak) else {self.peak_memory.log_key: peak}

"""Measured seconds of micro-batches: warm, interleaved, with the device awaited around each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]  # a dependency of lightning

from lightning_balance.agreement import gather_objects, on_every_rank
from lightning_balance.calibration.grid import GridPoint
from lightning_balance.probing.micro_batches import MicroBatches
from lightning_balance.probing.prober import Prober


def measure_grid(
    prober: Prober,
    micro_batches: MicroBatches,
    points: Sequence[GridPoint],
    *,
    num_repeats: int,
    progress: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[GridPoint], NDArray[np.float64]]:
    """Measure forward and backward of every point. A collective call; all ranks run the same points at the same time.

    Every point runs once to warm up (one that runs out of memory is left out, with a warning), then all points repeat
    in rounds, each in another order, so that a slow moment does not fall on one point. Making the batch and moving it
    are not part of the time.

    Args:
        prober: runs the micro-batches; module and optimizers are afterwards as before.
        micro_batches: makes them.
        points: what to measure.
        num_repeats: measured rounds.
        progress: show a progress bar.
        clock: seconds, monotonic.

    Returns:
        The points that could be run, and their seconds, ``(num_points, num_repeats * num_ranks)``.
    """
    seconds: dict[GridPoint, list[float]] = {}
    bar = tqdm(total=len(points) * (num_repeats + 1), desc="Calibrating", unit=" micro-batches", disable=not progress)
    with prober.leaving_no_trace(), bar:
        for point in points:
            if _warm_up(prober, micro_batches, point):
                seconds[point] = []
            bar.update()
        for repeat in range(num_repeats):
            done = list(seconds)
            for place in np.random.default_rng([0, repeat]).permutation(len(done)).tolist():
                batch = on_every_rank(lambda point=done[place]: _batch(prober, micro_batches, point))  # type: ignore[misc]
                seconds[done[place]].append(prober.together(lambda batch=batch: _time(prober, batch, clock)))  # type: ignore[misc]
                bar.update()
    kept = list(seconds)
    own = np.array([seconds[point] for point in kept]).reshape(len(kept), num_repeats)  # also of no point at all
    return kept, np.concatenate(gather_objects(own), axis=1)


def _batch(prober: Prober, micro_batches: MicroBatches, point: GridPoint) -> Any:
    return prober.to_device(micro_batches.padded_to(point.num_samples, point.padded_length))


def _time(prober: Prober, batch: Any, clock: Callable[[], float]) -> float:
    prober.synchronise()
    start = clock()
    prober.forward_backward(batch)
    prober.synchronise()
    return clock() - start


def _warm_up(prober: Prober, micro_batches: MicroBatches, point: GridPoint) -> bool:
    """Run a point; False, on all ranks, where it runs out of memory on any."""
    if prober.fits(lambda: micro_batches.padded_to(point.num_samples, point.padded_length), prober.forward_backward):
        return True
    prober.clean_up()
    rank_zero_warn(
        f"{point.num_samples} samples padded to {point.padded_length} tokens run out of memory and are left out: lower"
        " the cap (calibrate.max_tokens)"
    )
    return False

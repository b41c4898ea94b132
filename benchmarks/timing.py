"""Time several functions in turn, so that whatever else the machine does falls on all of them.

Processor seconds and wall-clock seconds are both kept. Planning runs on one thread and waits for nothing, so the two
agree on a machine that is free; on a busy one only processor time says what the planner itself takes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of repeated runs: median and spread of processor time, median of wall-clock time."""

    median_s: float
    min_s: float
    max_s: float
    median_wall_s: float
    num_runs: int

    @classmethod
    def of(cls, runs: list[tuple[float, float]]) -> Timing:
        """Return the figures of runs, each given as processor and wall-clock seconds.

        >>> Timing.of([(3.0, 4.0), (1.0, 1.0), (2.0, 3.0)]).median_s
        2.0
        """
        processor = [seconds for seconds, _ in runs]
        return cls(
            median_s=float(np.median(processor)),
            min_s=min(processor),
            max_s=max(processor),
            median_wall_s=float(np.median([wall for _, wall in runs])),
            num_runs=len(runs),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return asdict(self)


def run_timed(function: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Run a function; returns its result, then processor and wall-clock seconds."""
    gc.collect()
    begin = process_time(), perf_counter()
    result = function()
    return result, (process_time() - begin[0], perf_counter() - begin[1])


def alternate(functions: Mapping[str, Callable[[], Any]], num_runs: int) -> dict[str, Timing]:
    """Run every function once, then every function again, and so on; the first round warms up and is not counted.

    >>> sorted(alternate({"a": lambda: 1, "b": lambda: 2}, num_runs=3))
    ['a', 'b']
    """
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    gc.collect()
    gc.freeze()  # what was there before need not be looked at between runs
    for run in range(num_runs + 1):
        for name, function in functions.items():
            _, seconds = run_timed(function)
            if run:
                runs[name].append(seconds)
    gc.unfreeze()
    return {name: Timing.of(values) for name, values in runs.items()}

"""Lengths and runs that the tests of `lightning-balance plan` share."""

from __future__ import annotations

import functools

import numpy as np

from lightning_balance.cost import CostModel
from lightning_balance.what_if import Comparison, PlanOptions, compare
from lightning_balance.what_if.options import Sync

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1, 600), 16, 1024).astype(np.int64)
COST = CostModel(intercept=5.0, alpha=0.002)


@functools.cache
def exact_comparison(sync: Sync = "micro_batch") -> Comparison:
    """Every step of LENGTHS with the options of :func:`run_options`; made once, as it takes seconds."""
    return compare(LENGTHS, run_options(sync=sync))


def run_options(**changes: object) -> PlanOptions:
    """A run of 4 ranks, 2 slots and batches of 6: 48 samples per step, 13 steps of LENGTHS, the last of 24."""
    options: dict[str, object] = {
        "num_ranks": 4,
        "num_slots": 2,
        "batch_size": 6,
        "max_tokens": (2048, 700),
        "lookahead": (3,),
        "cost": COST,
        "seed": 3,
        "epoch": 2,
    }
    return PlanOptions(**{**options, **changes})  # type: ignore[arg-type]

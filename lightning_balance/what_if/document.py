"""The comparison as JSON: every figure, the settings that it belongs to, and what is drawn; see docs/plan.md."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lightning_balance
from lightning_balance.what_if.comparison import Comparison, Outcome
from lightning_balance.what_if.histogram import Histogram, histogram_of
from lightning_balance.what_if.timeline import Lane, Timeline, timeline_of

__all__ = ["FORMAT", "VERSION", "as_document", "as_json"]

FORMAT = "lightning-balance plan"
VERSION = 1
"""Raised when a field changes its meaning or goes away; new fields may come without."""


def as_json(comparison: Comparison, source: str) -> str:
    """Return the document as text; figures that are not defined are ``null``."""
    return json.dumps(as_document(comparison, source), indent=1, allow_nan=False) + "\n"


def as_document(comparison: Comparison, source: str) -> dict[str, Any]:
    """Return every figure of a comparison as plain data.

    Args:
        comparison: the comparison.
        source: where the lengths come from, in the user's words.
    """
    options = comparison.options
    return {
        "format": FORMAT,
        "version": VERSION,
        "package_version": lightning_balance.__version__,
        "source": source,
        "lengths": _lengths(comparison.lengths),
        "settings": {
            "num_ranks": options.num_ranks,
            "num_slots": options.num_slots,
            "batch_size": options.batch_size,
            "samples_per_step": options.samples_per_step,
            "sync": options.sync,
            "pad_to_multiple_of": options.pad_to_multiple_of,
            "cost": dataclasses.asdict(options.cost),
            "seed": options.seed,
            "epoch": options.epoch,
            "shuffle": options.shuffle,
            "drop_last": options.drop_last,
        },
        "num_steps": comparison.num_steps,
        "num_steps_planned": comparison.num_steps_planned,
        "methods": [_outcome(outcome, comparison.lengths) for outcome in comparison.outcomes],
        "histogram": _histogram(histogram_of(comparison.lengths)),
        "timeline": _timeline(timeline_of(comparison)),
    }


def _lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    percentiles = np.percentile(lengths, [50, 90, 99]).tolist()
    return {
        "num_samples": len(lengths),
        "total_tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "mean": float(lengths.mean()),
        **dict(zip(("median", "percentile_90", "percentile_99"), percentiles, strict=True)),
    }


def _outcome(outcome: Outcome, lengths: NDArray[np.int64]) -> dict[str, Any]:
    method = outcome.method
    figures = {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in dataclasses.asdict(outcome.summary).items()
    }
    return {
        "name": method.name,
        "kind": method.kind,
        "max_tokens": method.max_tokens,
        "lookahead": method.lookahead,
        "is_exact": outcome.is_exact,
        "num_steps_of_epoch": outcome.num_steps,
        "step_time": outcome.step_time,
        "speed_up": outcome.speed_up,
        "speed_up_error": None if math.isnan(outcome.speed_up_error) else outcome.speed_up_error,
        "num_oversize": 0 if method.max_tokens is None else int((lengths > method.max_tokens).sum()),
        **figures,
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {
        "edges": histogram.edges.tolist(),
        "num_samples": histogram.num_samples.tolist(),
        "num_tokens": histogram.num_tokens.tolist(),
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "steps": timeline.step_indices,
        "plain_shuffle": _lane(timeline.plain),
        "rebalance": _lane(timeline.rebalance),
    }


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "starts": lane.starts.tolist(),
        "costs": lane.costs.tolist(),
        "end": lane.end,
        "waiting_share": lane.waiting_share,
    }

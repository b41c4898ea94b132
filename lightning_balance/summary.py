"""The table at the end of ``fit``: what the run did, beside what plain shuffled batches would have done (layer 2)."""

from __future__ import annotations

from lightning_balance.console import format_value, print_table
from lightning_balance.fitting import BalancedFit
from lightning_balance.monitor import RankFigures
from lightning_balance.report import PlanSummary, summarize_plain
from lightning_balance.shuffle import EpochOrder
from lightning_balance.totals import Totals

MAX_PLAIN_SAMPLES = 2**20
"""Plain batches are summarised over the run's first samples up to so many, which takes about a second."""

COLUMNS = ("", "balanced", "plain shuffle (from the plan)")


def plain_summary(fit: BalancedFit, totals: Totals) -> PlanSummary:
    """Plan plain batches of the same samples: the shuffle of the first epoch, as far as the run went through it."""
    sampler, factory = fit.sampler, fit.factory
    plan = sampler.plan_for(0)
    shuffle = sampler.shuffle
    num_samples = min(totals.num_samples, len(sampler.lengths), MAX_PLAIN_SAMPLES)
    order = EpochOrder(len(sampler.lengths), seed=plan.seed, epoch=0, shuffle=shuffle).slice(0, num_samples)
    samples_per_micro_batch = max(1, round(totals.num_samples / max(1, totals.num_micro_batches)))
    return summarize_plain(
        sampler.lengths[order],
        batch_size=factory.order.batch_size if factory.order is not None else samples_per_micro_batch,
        num_ranks=factory.num_ranks,
        num_slots=factory.accumulation,
        cost=factory.cost,
        sync=factory.sync,
        shuffle=False,  # shuffled above
        pad_to_multiple_of=factory.settings.pad_to_multiple_of,
    )


def summary_rows(totals: Totals, plain: PlanSummary, of_ranks: RankFigures) -> list[tuple[str, str, str]]:
    """Cells of the table; what only a run can measure has a ``-`` for the plain side, or an estimate marked ``~``."""
    plain_seconds = totals.seconds * _modelled_slowdown(totals, plain)
    plain_rate = totals.real_tokens / plain_seconds if plain_seconds else float("nan")
    return [
        _row("pad efficiency", "percent", totals.pad_efficiency, plain.pad_efficiency),
        _row("cost spread between ranks", "percent", totals.cost_spread, plain.cost_spread),
        _row("largest micro-batch (padded)", "tokens", totals.largest_micro_batch, plain.largest_micro_batch),
        *[_row(f"{name}, measured", "gib", value) for name, value in of_ranks.peaks.items()],
        (
            "real tokens per second, measured",
            format_value(totals.tokens_per_second, "tokens_per_second"),
            f"~ {format_value(plain_rate, 'tokens_per_second')}",
        ),
        *_waiting_rows(totals, plain, of_ranks.waited_seconds),
        _row("modelled time per sample", "factor", 1.0, _modelled_slowdown(totals, plain)),
        _row("optimizer steps", "count", totals.num_steps),
        _row("time in training steps", "seconds", totals.seconds),
        _row("time for planning", "seconds", totals.planning_seconds),
    ]


def _waiting_rows(totals: Totals, plain: PlanSummary, waited: tuple[float, ...]) -> list[tuple[str, str, str]]:
    """Shares of the training time that ranks wait: measured, and for plain batches as the plan has it, marked ``~``."""
    if not waited or not totals.seconds:
        return []
    mean, most = (
        format_value(seconds / totals.seconds, "percent") for seconds in (sum(waited) / len(waited), max(waited))
    )
    planned = format_value(1 - plain.slot_efficiency, "percent")
    return [
        ("waiting for other ranks, measured (mean)", mean, f"~ {planned}"),
        ("waiting for other ranks, measured (most)", most, "-"),
    ]


def print_summary(fit: BalancedFit, totals: Totals, of_ranks: RankFigures) -> None:
    """Print the table of a run that trained at least one step."""
    if totals.num_steps:
        print_table("Balanced training", COLUMNS, summary_rows(totals, plain_summary(fit, totals), of_ranks))


def _modelled_slowdown(totals: Totals, plain: PlanSummary) -> float:
    """Modelled time of plain batches over that of the run, for the same number of samples."""
    if not totals.modelled_samples:  # the cost became another one, and no step came after
        return float("nan")
    balanced_time = totals.modelled_time / totals.modelled_samples
    return plain.modelled_time / plain.num_samples / balanced_time


def _row(label: str, unit: str, balanced: float, plain: float | None = None) -> tuple[str, str, str]:
    return label, format_value(balanced, unit), format_value(plain, unit)

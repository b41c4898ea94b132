"""Tables of real runs: training, evaluation, calibration."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables.formats import Json, markdown, seconds


def calibration(data: Json) -> str:
    """Return the table of repeated calibrations."""
    rows = [
        [
            str(number),
            f"{run['intercept']:.1f}",
            f"{run['alpha']:.2e}",
            f"{run['seconds_per_token'] * 1e6:.1f}",
            f"{run['median_error']:.1%}",
            f"{run['worst_error']:.1%}",
            f"{run['noise']:.1%}",
        ]
        for number, run in enumerate(data["runs"], start=1)
    ]
    names = ["run", "intercept", "alpha", "microseconds per token", "median error", "worst error", "repeats differ by"]
    return markdown(names, rows)


def ratio(values: Sequence[float], digits: int = 2) -> str:
    """Return a median and its range.

    >>> ratio([1.0, 0.9, 1.25])
    '1.00 (0.90 - 1.25)'
    """
    median, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{median} ({low} - {high})"


def end_to_end(data: Json, strategy: str) -> str:
    """Return the table of training end to end under a strategy."""
    rows = [
        [
            method,
            f"{values['tokens_per_second']:,.0f}",
            *(ratio(values[f"over {other}"]) for other in ("plain shuffle", "BatchRebalance", "ceiling")),
            f"{values['pad_efficiency']:.3f}",
            f"{seconds(values['step_p50_s'])} / {seconds(values['step_p90_s'])}",
            "-" if values["waited_per_step_s"] is None else seconds(values["waited_per_step_s"]),
            f"{values['peak_mib']:,.0f} MiB",
        ]
        for method, values in data[strategy]["methods"].items()
    ]
    header = ["", "real tokens/s", "x plain", "x BatchRebalance", "x ceiling", "pad", "step p50 / p90"]
    return markdown([*header, "waited per step", "peak"], rows)


def headline(data: Json) -> str:
    """Return the short table of training end to end: speed under each strategy, padding and memory."""
    under = [name for name in ("ddp", "FSDP2") if name in data]
    rows = [
        [
            method,
            *(f"{data[strategy]['methods'][method]['over plain shuffle'][0]:.2f}" for strategy in under),
            f"{values['pad_efficiency']:.1%}",
            f"{values['peak_mib']:,.0f} MiB",
        ]
        for method, values in data[under[0]]["methods"].items()
        if "attention mask" not in method and "default cost" not in method
    ]
    speeds = [f"tokens/s, x plain shuffle, {strategy.upper()}" for strategy in under]
    return markdown(["", *speeds, "pad efficiency, DDP", "peak memory"], rows)


def memory(data: Json) -> str:
    """Return the peak of every method at every per-device batch, in MiB, and that over length grouping's."""
    grouped = data["methods"]["LengthGrouped"]
    rows = [
        [
            method,
            *(
                f"{row['peak_bytes'] / 2**20:,.0f} ({row['peak_bytes'] / grouped[size]['peak_bytes'] - 1:+.0%})"
                for size, row in of_sizes.items()
            ),
        ]
        for method, of_sizes in data["methods"].items()
    ]
    return markdown(["peak in MiB, per-device batch", *grouped], rows)


def largest_batch(data: Json) -> str:
    """Return the largest per-device batch of every method under the limit."""
    grouped = data["largest_batch"]["LengthGrouped"]
    rows = []
    for method, batch in data["largest_batch"].items():
        size = str(data["batch_of_limit"])
        per_step = data["methods"][method].get(size, {}).get("micro_batches_per_step")
        more = f"{batch / grouped:.2f}" if grouped else "-"
        is_open = " or more" if batch == data["most_tried"] else ""
        rows.append([method, f"{batch}{is_open}", more, "-" if per_step is None else f"{per_step:.1f}"])
    limit = f"{data['limit_bytes'] / 2**20:,.0f} MiB"
    return markdown([f"limit {limit}", "largest batch", "x LengthGrouped", "micro-batches per step with 8"], rows)


def budget_sweep(data: Json, strategy: str) -> str:
    """Return the table of token budgets and fixed micro-batches, training and forward alone."""
    rows = [
        [
            what,
            method,
            f"{values['tokens_per_second'][0]:,.0f}",
            ratio(values["over 1 sample"]),
            "-" if values["processor_share"] is None else f"{values['processor_share']:.0%}",
            f"{values['pad_efficiency']:.3f}",
            f"{values['micro_batches_per_rank']:.0f}",
            f"{values['peak_mib']:,.0f} MiB",
        ]
        for what, methods in data[strategy].items()
        for method, values in methods.items()
    ]
    header = [
        "",
        "micro-batches of",
        "real tokens/s",
        "x 1 sample",
        "processors busy",
        "pad",
        "per rank and step",
        "peak",
    ]
    return markdown(header, rows)


def loss_curves(data: Json) -> str:
    """Return the last held-out loss of every method, and how much sooner it is at a loss that all reach."""
    rows = [
        [
            method,
            ratio(found["last_loss"], 3),
            ratio(found["loss_minus_plain"], 3),
            ratio(found["seconds"], 1),
            ratio(found["speed_up_to_loss"]),
        ]
        for method, found in data["methods"].items()
    ]
    header = [f"median and range of {data['num_seeds']} seeds", "last held-out loss", "minus plain", "seconds"]
    return markdown([*header, "x sooner at the same loss"], rows)


def overhead(data: Json) -> str:
    """Return the table of what the callback costs on samples of one length."""
    rows = [
        [mode, seconds(found["plain_step_s"]), ratio(found["time_over_plain"], 3), f"{found['share_of_hooks']:.2%}"]
        for mode, found in data["modes"].items()
    ]
    return markdown(
        ["", "plain Lightning, a step", "time over plain, 95 % interval", "inside the callback's hooks"], rows
    )


def evaluation(data: Json) -> str:
    """Return the table of predict with plain batches and with a budget."""
    rows = [
        ("micro-batches", "num_micro_batches", "{:,}"),
        ("largest micro-batch, padded tokens", "largest_micro_batch", "{:,}"),
        ("pad efficiency", "pad_efficiency", "{:.3f}"),
        ("real tokens per second", "tokens_per_second", "{:,.0f}"),
    ]
    lines = [[name, *(form.format(data[key][run]) for run in ("plain", "budget"))] for name, key, form in rows]
    lines.append(["speed-up, median and range of the rounds", "1.00", ratio(data["speed_up"])])
    return markdown(["", "plain batches", "token budget"], lines)

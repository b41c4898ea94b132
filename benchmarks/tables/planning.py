"""Tables of what planning gives and takes, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.tables.formats import Json, markdown, seconds, share, spread


def planner_input(data: Json, profile: str = "lognormal", group: str = "samples") -> str:
    """Return every figure of the samplers of a group on one profile."""
    chosen = next(entry for entry in data["profiles"] if entry["profile"] == profile)
    header = ["sampler", "pad", "slot", "model", "model, step", "largest micro-batch", "lost", "copies", "shapes"]
    header += ["samples per step", "planning"]
    if group == "budget":
        header.insert(6, "over the cap")
    rows = []
    for row in chosen["rows"]:
        if row["group"] != group:
            continue
        figures = [f"{row[key]:.3f}" for key in ("pad_efficiency", "slot_efficiency")]
        figures += [f"**{row['model_efficiency']:.3f}**", f"{row['model_efficiency_step']:.3f}"]
        figures += [f"{row['largest_micro_batch']:,}"] + ([str(row["num_over_cap"])] if group == "budget" else [])
        figures += [f"{row[key]:,}" for key in ("num_lost", "num_copies", "num_shapes")]
        least, most = row["least_per_step"], row["most_per_step"]
        rows.append(
            [row["sampler"], *figures, f"{least}" if least == most else f"{least} - {most}", spread(row["planning"])]
        )
    return markdown(header, rows)


SHORT_NAMES = {
    "random": "random",
    "transformers LengthGroupedSampler": "length grouped",
    "transformers BatchRebalanceSampler": "batch rebalance",
    "greedy fill of each step": "greedy, per step",
    "greedy fill of everything, shuffled": "greedy, shuffled",
    "lhotse DynamicBucketingSampler": "lhotse",
    "ours": "ours",
    "ours, sync=step": "ours, sync=step",
    "ours, lookahead 8": "ours, 8 ahead",
    "ours, same samples per step": "ours, per step",
    "ours, step_unit=tokens": "ours, tokens",
    "ours, step_unit=tokens, lookahead 8": "ours, tokens, 8 ahead",
}


def planner_profiles(data: Json, group: str = "samples") -> str:
    """Return the model efficiency of the samplers of a group on every profile."""
    names = [row["sampler"] for row in data["profiles"][0]["rows"] if row["group"] == group]
    rows = []
    for entry in data["profiles"]:
        by_name = {row["sampler"]: row for row in entry["rows"]}
        efficiencies = [by_name[name]["model_efficiency"] for name in names]
        best = f"{max(efficiencies):.3f}"
        cells = [f"**{value:.3f}**" if f"{value:.3f}" == best else f"{value:.3f}" for value in efficiencies]
        label = entry["profile"].replace("_", " ") + (" (control)" if entry["is_control"] else "")
        rows.append([label, f"{entry['mean_length'] / entry['longest']:.2f}", *cells])
    return markdown(["lengths", "mean / longest", *(SHORT_NAMES.get(name, name) for name in names)], rows)


def planner_peaks(data: Json) -> str:
    """Return the largest micro-batch of the samplers with fixed samples per step, on every profile."""
    names = [row["sampler"] for row in data["profiles"][0]["rows"] if row["group"] == "samples"]
    rows = [
        [entry["profile"].replace("_", " ")]
        + [f"{row['largest_micro_batch']:,}" for row in entry["rows"] if row["group"] == "samples"]
        for entry in data["profiles"]
    ]
    return markdown(["lengths", *(SHORT_NAMES.get(name, name) for name in names)], rows)


def optimality_trying(data: Json) -> str:
    """Return the comparison with every cut and assignment."""
    rows = [
        [
            f"{row['sync']}, cap: {row['cap']}",
            f"{row['num_compared']:,}",
            f"{row['num_above']:,}",
            share(row["worst_excess"]),
        ]
        for row in data["trying"]["rows"]
    ]
    return markdown(["sync and cap", "cases", "above the best", "worst"], rows)


def optimality_programme(data: Json) -> str:
    """Return the comparison with the dynamic programme."""
    return _gap_table(data["programme"]["rows"], "batches", lambda row: row["batches"].replace("_", " "))


def optimality_peer(data: Json) -> str:
    """Return the comparison with ``BatchRebalanceSampler``."""
    rows = [row for row in data["peer"]["rows"] if row["num_compared"]]
    return _gap_table(rows, "sync, batches", lambda row: f"{row['sync']}, {row['batches'].replace('_', ' ')}")


def _gap_table(rows: Sequence[Json], first: str, label: Callable[[Json], str]) -> str:
    cells = [
        [
            label(row),
            f"{row['num_compared']:,}",
            f"{row['num_above']:,}",
            f"{row['num_below']:,}",
            *(share(row[key]) for key in ("worst_excess", "mean_excess", "median_excess", "best_excess")),
        ]
        for row in rows
        if row["num_compared"]
    ]
    return markdown([first, "cases", "above", "below", "worst", "mean", "median", "best"], cells)


def scale_batch(data: Json) -> str:
    """Return the planning time of one global batch."""
    rows = [
        [
            f"{row['num_ranks']:,} x {row['num_slots']}",
            f"{row['num_samples']:,}",
            *(spread(row["planning"][sync]) for sync in ("micro_batch", "step")),
            spread(row["planning"]["peer"]) if "peer" in row["planning"] else "not run",
            *(f"{row['model_efficiency'][sync]:.3f}" for sync in ("micro_batch", "step")),
        ]
        for row in sorted(data["one_batch"], key=lambda row: (row["num_samples"], row["num_ranks"]))
    ]
    header = ["ranks x slots", "samples", "micro_batch", "step", "BatchRebalanceSampler", "model", "model, step"]
    return markdown(header, rows)


def scale_epoch(data: Json) -> str:
    """Return planning time and memory of whole epochs."""
    rows = [
        [
            row["epoch"],
            f"{row['num_samples']:,}",
            f"{row['num_steps']:,}",
            spread(row["whole_epoch"]),
            f"{row['peak_allocated_mb']:.0f} MB",
        ]
        for row in [*data["whole_epoch"], *([data["budget_of_a_million"]] if data["budget_of_a_million"] else [])]
    ]
    return markdown(["epoch", "samples", "steps", "planning all of it", "memory above the lengths"], rows)


def scale_first(data: Json) -> str:
    """Return the wait for the first micro-batch."""
    rows = [
        [
            row["epoch"],
            f"{row['num_samples']:,}",
            spread(row["first_micro_batch"]),
            seconds(row["count_micro_batches"]["median_s"]),
            f"{row['peak_allocated_mb']:.0f} MB",
        ]
        for row in data["first_micro_batch"]
    ]
    header = ["epoch", "samples", "first micro-batch", "then the exact number of micro-batches"]
    return markdown([*header, "memory above the lengths"], rows)


def lookahead(data: Json) -> str:
    """Return what lookahead gains and what it costs in randomness."""
    rows = [
        [
            f"{row['lookahead']}",
            f"{row['model_efficiency']:.3f}",
            f"{row['pad_efficiency']:.3f}",
            f"{row['share_moved'] * 100:.0f} %",
            f"{row['mean_distance_in_steps']:.1f}",
            f"{row['length_correlation']:+.4f}",
            f"{row['least_samples_per_step']:.0f} - {row['most_samples_per_step']:.0f}",
            f"{row['std_of_samples_per_step']:.1f}",
        ]
        for row in data["rows"]
    ]
    header = ["lookahead", "model", "pad", "samples that change step", "by steps, on average"]
    header += ["correlation of lengths in a step", "samples per step", "standard deviation"]
    return markdown(header, rows)


def optimality_input(data: Json) -> str:
    """Return the plans of the lognormal input beside the exact programme."""
    row = data["input"]
    header = [
        "39 steps of 8 x 4 x 8",
        "model, ours",
        "model, exact with slots of neighbours",
        "steps above",
        "worst step",
    ]
    cells = ["lognormal", f"{row['model_efficiency']:.4f}", f"{row['model_efficiency_exact']:.4f}"]
    return markdown(header, [[*cells, f"{row['num_above']} of {row['num_compared']}", share(row["worst_excess"])]])


def plan_demo(data: Json) -> str:
    """Return what `lightning-balance plan` says of the demo's data."""
    rows = [
        [
            row["name"],
            f"{row['pad_efficiency'] * 100:.1f} %",
            f"{row['cost_spread'] * 100:.1f} %",
            f"{row['step_time']:,.0f}",
            f"{row['speed_up']:.2f} x",
            f"{row['largest_micro_batch']:,}",
            f"{row['num_steps_of_epoch']:,}",
            f"{row['num_micro_batches'] / row['num_steps']:.2f}",
            f"{row['num_shapes']:,}",
        ]
        for row in data["demo"]["methods"]
    ]
    header = ["method", "pad efficiency", "cost spread", "step time", "speed-up", "largest micro-batch", "steps"]
    return markdown([*header, "micro-batches per step", "shapes"], rows)


def plan_million(data: Json) -> str:
    """Return how long `lightning-balance plan` takes for many lengths."""
    rows = []
    for row in data["million"]:
        runs = row["runs"]
        cells = [[f"{run[key]:.1f} s" for run in runs] for key in ("wall_s", "processor_s")]
        planned = [run["num_steps_planned"] for run in runs]
        error = max(run["largest_speed_up_error"] for run in runs)
        rows.append(
            [
                row["outputs"],
                *(", ".join(values) for values in cells),
                ", ".join(f"{run['processor_s'] / run['wall_s'] * 100:.0f} %" for run in runs),
                f"{', '.join(map(str, planned))} of {runs[0]['num_steps']:,}",
                f"{error * 100:.1f} %",
            ]
        )
    header = ["outputs", "wall-clock, each run", "processor", "share of a core that it got", "steps planned"]
    header.append("largest standard error of a speed-up")
    return markdown(header, rows)


def plan_reading(data: Json) -> str:
    """Return how long reading many lengths takes from each kind of file."""
    return markdown(list(data["reading"]), [[seconds(value) for value in data["reading"].values()]])

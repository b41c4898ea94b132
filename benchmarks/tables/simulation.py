"""Tables of the simulated ranks, made from ``results/simulation.json``."""

from __future__ import annotations

from benchmarks.tables.formats import Json, markdown, seconds


def simulation(data: Json, sync: str) -> str:
    """Return the share of the ideal and where the rest goes, for every method on every number of ranks.

    All columns but the first share are with noise, medians over its runs; with what noise adds to the work, which is
    next to nothing, the parts sum to 1.
    """
    rows = []
    for row in data["rows"]:
        if row["sync"] != sync:
            continue
        noisy = row["with_noise"]["both"]
        share = noisy["ideal"]
        rows.append(
            [
                f"{row['num_ranks']:,}",
                row["method"],
                f"{row['without_noise']['ideal']:.3f}",
                f"**{share['median']:.3f}** ({share['min']:.3f} - {share['max']:.3f})",
                *(f"{noisy[part]['median']:.3f}" for part in _LOST),
                seconds(row["planning"]["median_s"]) if row["planning"] else "none",
            ]
        )
    header = ["ranks", "method", "share, no noise", "share with noise", *_LOST.values(), "planning a step"]
    return _text_in_second_column(markdown(header, rows))


_LOST = {
    "padding": "padding",
    "fixed": "price per micro-batch",
    "waiting_planned": "waiting, planned",
    "waiting_by_noise": "waiting, by noise",
}


def simulation_ranks(data: Json, *, largest: bool = False) -> str:
    """Return who waits and who is waited for without noise, on one number of ranks that every method ran on.

    It is the one with the most steps, over which ranks may take turns; or the largest.
    """
    size = _common_size(data, largest=largest)
    rows = []
    for row in data["rows"]:
        if row["num_ranks"] != size:
            continue
        rows.append(_ranks_row(row, row["method"], row["without_noise"]))
        if "by_own_cost" in row:
            rows.append(_ranks_row(row, f"{row['method']}, by its own cost", row["by_own_cost"]))
    header = [f"sync, {size:,} ranks", "method", "waiting, mean of ranks", "rank that waits most"]
    header += ["rank that is slowest most often", "or as slow as another"]
    return _text_in_second_column(markdown(header, rows))


def _ranks_row(row: Json, name: str, figures: Json) -> list[str]:
    return [
        row["sync"],
        name,
        f"{figures['mean_waited'] * 100:.1f} %",
        f"{figures['most_waited'] * 100:.1f} % (rank {figures['rank_that_waits_most']})",
        f"{figures['slowest_share'] * 100:.0f} % (rank {figures['slowest_rank']})",
        f"{figures['slowest_or_tied'] * 100:.0f} %",
    ]


def _common_size(data: Json, *, largest: bool) -> int:
    sizes: dict[str, set[int]] = {}
    for row in data["rows"]:
        sizes.setdefault(row["method"], set()).add(row["num_ranks"])
    common = set.intersection(*sizes.values())
    steps = {size["num_ranks"]: size["num_steps"] for size in data["sizes"]}
    return max(common, key=lambda size: (0 if largest else steps[size], size))


def simulation_noise(data: Json) -> str:
    """Return the share of the ideal under each kind of noise by itself and under both, on the most ranks."""
    size = max(row["num_ranks"] for row in data["rows"])
    rows = [
        [
            row["sync"],
            row["method"],
            f"{row['without_noise']['ideal']:.3f}",
            *(f"{row['with_noise'][kind]['ideal']['median']:.3f}" for kind in ("speed", "jitter", "both")),
            f"{row['heaviest_share']['mean']:.2f}, at most {row['heaviest_share']['max']:.2f}",
        ]
        for row in data["rows"]
        if row["num_ranks"] == size
    ]
    speed, jitter = (f"{data['noise'][kind] * 100:g} %" for kind in ("speed", "jitter"))
    header = [f"sync, {size:,} ranks", "method", "no noise", f"speeds of ranks ({speed})", f"jitter ({jitter})", "both"]
    header.append("heaviest micro-batch of a rank's step")
    return _text_in_second_column(markdown(header, rows))


def _text_in_second_column(text: str) -> str:
    """Return a markdown table whose second column stands to the left, too."""
    return text.replace("| --- | ---: |", "| --- | --- |", 1)

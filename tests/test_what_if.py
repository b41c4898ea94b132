"""`lightning-balance plan`: reads lengths in three formats and prints the figures of the report."""

import json
import re

import numpy as np
import pytest

from lightning_balance.cli import main
from lightning_balance.cost import CostModel
from lightning_balance.epoch import plan_epoch
from lightning_balance.report import summarize
from lightning_balance.what_if import compare, read_lengths
from tests.test_import import loaded_by

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1, 600), 16, 1024).astype(int)


def save(folder, kind):
    path = folder / kind
    if kind == "list.json":
        path.write_text(json.dumps(LENGTHS.tolist()))
    elif kind == "object.json":
        path.write_text(json.dumps({"name": "x", "lengths": LENGTHS.tolist()}))
    elif kind == "array.npy":
        np.save(path, LENGTHS)
    else:
        path.write_text("\n".join(map(str, LENGTHS)))
    return path


@pytest.mark.parametrize("kind", ["list.json", "object.json", "array.npy", "lines.txt"])
def test_every_format_gives_the_same_lengths(kind, tmp_path):
    assert read_lengths(save(tmp_path, kind)).tolist() == LENGTHS.tolist()


def test_the_table_has_the_report_s_figures(tmp_path, capsys):
    main(["plan", str(save(tmp_path, "array.npy")), "--num_ranks", "4", "--num_slots", "2", "--max_tokens", "4096"])
    output = capsys.readouterr().out
    for word in ("600 samples", "plain", "rebalance", "token budget 4,096", "pad efficiency", "modelled speed-up"):
        assert word in output
    plan = plan_epoch(LENGTHS, samples_per_step=64, num_ranks=4, num_slots=2)
    assert f"{100 * summarize(plan, LENGTHS).pad_efficiency:.1f} %" in output


RANDOMNESS = (
    "fewest samples in a step",
    "most samples in a step",
    "samples that change step",
    "mean distance moved",
    "correlation of lengths in a step",
)


def rows_printed(capsys, *words):
    """Cells of the printed table by label, however it is drawn."""
    main(["plan", *words, "--num_ranks", "4", "--num_slots", "2", "--batch_size", "6"])
    lines = [re.split(r"(?:\s{2,}|\s*[│┃]\s*)+", line.strip(" │┃")) for line in capsys.readouterr().out.splitlines()]
    return {label: cells for label, *cells in lines}


def test_with_lookahead_the_table_says_how_random_steps_are(tmp_path, capsys):
    rows = rows_printed(capsys, str(save(tmp_path, "array.npy")), "--lookahead", "4")
    plan = plan_epoch(LENGTHS, samples_per_step=48, num_ranks=4, num_slots=2, lookahead=4)
    summary = summarize(plan, LENGTHS)
    assert summary.moved_share > 0.5
    assert [rows[label][1] for label in RANDOMNESS] == [
        f"{summary.fewest_samples_per_step}",
        f"{summary.most_samples_per_step}",
        f"{100 * summary.moved_share:.1f} %",
        f"{summary.mean_step_distance:.2f} steps",
        f"{summary.length_correlation:.3f}",
    ]
    assert [rows[label][0] for label in RANDOMNESS[:4]] == ["24", "48", "0.0 %", "0.00 steps"]


def test_without_lookahead_there_is_nothing_to_say_about_it(tmp_path, capsys):
    rows = rows_printed(capsys, str(save(tmp_path, "array.npy")))
    assert "shapes" in rows
    assert not set(RANDOMNESS) & set(rows)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_balanced_epochs_serve_the_same_samples_in_less_time(sync):
    plain, rebalance, budget = compare(
        LENGTHS, batch_size=8, num_ranks=4, num_slots=2, max_tokens=4096, cost=CostModel(), sync=sync
    ).values()
    assert plain.num_samples == rebalance.num_samples == budget.num_samples == len(LENGTHS)
    assert max(rebalance.modelled_time, budget.modelled_time) < 0.7 * plain.modelled_time
    assert budget.largest_micro_batch <= 4096
    assert rebalance.num_micro_batches == 2 * rebalance.num_steps


@pytest.mark.parametrize(
    ("lengths", "multiple", "budget"),
    [([5, 7] * 8, 1, 24), ([5, 7] * 8, 8, 24), ([1] * 15 + [100], 1, 100), ([1] * 15 + [100], 8, 104)],
)
def test_the_default_budget_is_a_mean_micro_batch_or_the_longest_sample(lengths, multiple, budget):
    summaries = compare(
        np.array(lengths),
        batch_size=4,
        num_ranks=2,
        num_slots=1,
        max_tokens=None,
        cost=CostModel(),
        sync="step",
        pad_to_multiple_of=multiple,
    )
    assert list(summaries)[-1] == f"token budget {budget}"


def test_lengths_are_clipped_and_the_title_says_so(tmp_path, capsys):
    main(["plan", str(save(tmp_path, "array.npy")), "--max_length", "100"])
    assert "to 100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "options", "sentence"),
    [
        ("a.csv", "1", [], "LENGTHS must be a .json, .npy or .txt file"),
        ("a.json", "{}", [], "an object with the key 'lengths'"),
        ("a.json", "[1, 2", [], "Expecting"),
        ("a.txt", "1 two", [], "must hold whole numbers"),
        ("a.txt", "1 0", [], "lengths"),
        ("a.txt", "1 2", ["--num_ranks", "0"], "num_ranks"),
        ("a.txt", "1 2", ["--max_length", "0"], "max_length"),
        ("a.txt", "1 2", ["--max_tokens", "0"], "max_tokens"),
        ("a.txt", "1 2", ["--alpha", "-1"], "alpha"),
    ],
)
def test_a_mistake_ends_in_one_sentence(name, content, options, sentence, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(tmp_path / name), *options])
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("lightning-balance plan: error: ")
    assert sentence in last_line


def test_a_missing_file_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "nowhere.npy"])
    assert "nowhere.npy" in capsys.readouterr().err


def test_planning_from_the_command_line_loads_neither_torch_nor_lightning(tmp_path):
    words = ["plan", str(save(tmp_path, "array.npy"))]
    lines = loaded_by(f"from lightning_balance.cli import main; main({words!r})")
    assert not {"torch", "lightning"} & set(lines)
    assert "efficiency" in lines  # the table was printed

"""`lightning-balance plan` as it is called: what it prints and writes, and how mistakes end."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
import os
import pty
import re
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_balance.cli import main
from lightning_balance.what_if import compare
from lightning_balance.what_if.tables import figures_table, notes, randomness_table
from lightning_balance.what_if.timeline import timeline_of
from tests.command import REPOSITORY, run_command
from tests.test_import import loaded_by
from tests.what_if.inputs import COST, LENGTHS, exact_comparison, run_options
from tests.what_if.test_comparison import RANDOMNESS, figures_slowly

RUN = (
    "--ranks 4 --accumulate 2 --batch-size 6 --max-tokens 2048,700 --lookahead 3 --seed 3 --epoch 2"
    f" --intercept {COST.intercept} --alpha {COST.alpha}"
).split()


HUGE = str(10**23)


@pytest.fixture
def lengths_file(tmp_path: Path) -> str:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return str(tmp_path / "lengths.npy")


def cells_printed(text: str) -> list[list[str]]:
    """Cells of the printed tables' rows, however these are drawn."""
    return [re.split(r"(?:\s{2,}|\s*[│┃]\s*)+", line.strip(" │┃")) for line in text.splitlines()]


def test_the_tables_hold_the_figures_of_the_comparison(lengths_file, capsys) -> None:
    main(["plan", lengths_file, *RUN, "--steps", "all"])
    output = capsys.readouterr().out
    printed = cells_printed(output)
    comparison = exact_comparison()
    randomness = randomness_table(comparison)
    assert randomness is not None
    for row in [*figures_table(comparison).rows, *randomness.rows]:
        assert row in printed
    assert "lengths.npy: 600 samples of 16 to 1,024 tokens" in output
    assert "4 ranks x 2 accumulated x 6 samples = 48 samples per optimizer step" in output
    assert "≥" not in output


def test_a_row_says_what_its_outcome_does() -> None:
    comparison = exact_comparison()
    figures = figures_slowly(comparison.outcomes[2].method, run_options())
    row = figures_table(comparison).rows[2]
    assert row == [
        "rebalance",
        f"{100 * figures['pad_efficiency']:.1f} %",
        f"{100 * figures['cost_spread']:.1f} %",
        f"{figures['modelled_time'] / 13:,.0f}",
        f"{comparison.outcomes[2].speed_up:.2f} x",
        f"{figures['largest_micro_batch']:,}",
        "13",
        "2",
        f"{figures['num_shapes']:,}",
    ]


def test_where_not_all_steps_are_planned_the_table_says_so(lengths_file, capsys) -> None:
    main(["plan", lengths_file, *RUN, "--steps", "4"])
    output = capsys.readouterr().out
    rows = {cells[0]: cells for cells in reversed(cells_printed(output))}  # the first table's where a name is in both
    assert rows["rebalance"][5].startswith("≥ ")
    assert rows["rebalance"][8].startswith("≥ ")
    assert not rows["plain shuffle"][5].startswith("≥ ")
    said = " ".join(output.split())
    assert "Planned methods: 6 of 13 steps, drawn at random with the seed, the same for all (standard error" in said
    assert "--steps 6 gives these figures again" in said


def test_samples_over_a_budget_are_counted(lengths_file, capsys) -> None:
    main(["plan", lengths_file, *RUN, "--steps", "1"])
    over = int((LENGTHS > 700).sum())
    assert f"{over:,} samples exceed the budget of 700: each of them is a micro-batch" in capsys.readouterr().out
    assert not any("exceed" in note for note in notes(compare(LENGTHS, run_options(max_tokens=(2048,)), num_steps=1)))


@pytest.mark.parametrize(
    ("strategy", "same"), [("fsdp", "micro_batch"), ("ddp", "micro_batch")], ids=lambda value: value.replace("_", "-")
)
def test_strategies_are_names_of_when_ranks_wait(strategy, same, lengths_file, capsys) -> None:
    outputs = []
    for sync in (strategy, same):
        main(["plan", lengths_file, *RUN, "--steps", "3", "--sync", sync])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "ranks wait in every micro-batch" in outputs[0]


def test_options_are_taken_by_lightning_s_names_and_lists_by_commas_or_again(lengths_file, capsys) -> None:
    run = ["--num_ranks", "4", "--num_slots", "2", "--batch_size", "6", "--lookahead", "3", "--seed", "3"]
    words = [*run, "--max_tokens", "2048", "--max-tokens", "700"]
    main(["plan", lengths_file, *RUN, "--steps", "3"])
    expected = capsys.readouterr().out
    main(["plan", lengths_file, *words, "--epoch", "2", "--steps", "3", *RUN[-4:]])
    assert capsys.readouterr().out == expected


def test_lengths_are_clipped_and_padded_as_the_collator_does(lengths_file, tmp_path) -> None:
    words = ["--max-length", "100", "--pad-to-multiple-of", "8", "--json", str(tmp_path / "out.json")]
    main(["plan", lengths_file, *RUN, "--steps", "3", *words])
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["lengths"]["longest"] == 100
    assert document["settings"]["pad_to_multiple_of"] == 8
    assert document["methods"][0]["largest_micro_batch"] == 6 * 104


@pytest.fixture
def importable_folder(tmp_path, monkeypatch):
    """A folder to work in, whose modules can be named; the path of modules is afterwards as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_the_batch_size_is_that_of_the_data_module_s_loader(importable_folder, capsys) -> None:
    (importable_folder / "small_demo.py").write_text(
        "from lightning_balance.demo import FunctionsDataModule\n"
        "def data():\n    return FunctionsDataModule(batch_size=5, num_functions=60)\n"
    )
    main(["plan", "small_demo.data", "--ranks", "2", "--steps", "1"])
    assert "small_demo.data: 59 samples" in (output := capsys.readouterr().out)
    assert "2 ranks x 1 accumulated x 5 samples" in output
    main(["plan", "small_demo.data", "--ranks", "2", "--batch-size", "3", "--steps", "1"])
    assert "2 ranks x 1 accumulated x 3 samples" in capsys.readouterr().out


def test_the_loader_s_order_is_planned_as_it_is_trained(importable_folder, capsys) -> None:
    (importable_folder / "loaders.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "class Data(list):\n    lengths = [1 + i * 37 % 50 for i in range(113)]\n"
        "def drop():\n    return DataLoader(Data(range(113)), batch_size=10, shuffle=True, drop_last=True)\n"
        "def keep():\n    return DataLoader(Data(range(113)), batch_size=10)\n"
    )
    run = ["--ranks", "1", "--accumulate", "2", "--lookahead", "1", "--steps", "all", "--json", "out.json"]
    main(["plan", "loaders.drop", *run])
    document = json.loads((importable_folder / "out.json").read_text())
    counts = [(row["num_steps_of_epoch"], row["num_samples"]) for row in document["methods"][:3]]
    assert counts == [(6, 110), (6, 110), (5, 100)]  # as Lightning trains: a step of one micro-batch, and none
    assert (document["num_steps"], document["num_steps_planned"]) == (5, 5)
    rebalance = document["methods"][2]
    assert rebalance["step_time"] == pytest.approx(rebalance["modelled_time"] / 5)
    assert "drop_last=True" in capsys.readouterr().out
    main(["plan", "loaders.keep", *run])
    keep = json.loads((importable_folder / "out.json").read_text())
    lengths = [1 + i * 37 % 50 for i in range(113)]
    batches = [lengths[start : start + 10] for start in range(0, 113, 10)]
    assert keep["methods"][0]["padded_tokens"] == sum(max(batch) * len(batch) for batch in batches)
    assert (keep["methods"][2]["num_samples"], keep["num_steps"]) == (113, 6)
    assert "shuffle=False" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "loaders.drop", "--ranks", "12"])
    assert "113 samples do not fill one optimizer step of 120, and drop_last=True" in capsys.readouterr().err


# Files


def document_of(lengths_file: str, folder: Path, *words: str) -> dict[str, Any]:
    main(["plan", lengths_file, *RUN, "--json", str(folder / "out.json"), *words])
    document: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return document


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_the_json_file_holds_the_figures_of_a_slow_count(sync, lengths_file, tmp_path, capsys) -> None:
    document = document_of(lengths_file, tmp_path, "--steps", "all", "--sync", sync)
    assert f"Wrote {tmp_path / 'out.json'}" in capsys.readouterr().out
    options = run_options(sync=sync)
    comparison = exact_comparison(sync)
    assert document["format"] == "lightning-balance plan"
    assert document["version"] == 1
    assert document["source"] == "lengths.npy"
    assert (document["num_steps"], document["num_steps_planned"]) == (13, 13)
    assert document["lengths"] == pytest.approx(
        {
            "num_samples": 600,
            "total_tokens": sum(LENGTHS.tolist()),
            "shortest": min(LENGTHS),
            "longest": max(LENGTHS),
            "mean": sum(LENGTHS.tolist()) / 600,
            "median": sorted(LENGTHS)[299] / 2 + sorted(LENGTHS)[300] / 2,
            "percentile_90": np.percentile(LENGTHS, 90),
            "percentile_99": np.percentile(LENGTHS, 99),
        }
    )
    assert document["settings"] == {
        "num_ranks": 4,
        "num_slots": 2,
        "batch_size": 6,
        "samples_per_step": 48,
        "sync": sync,
        "pad_to_multiple_of": 1,
        "cost": {"intercept": COST.intercept, "alpha": COST.alpha},
        "seed": 3,
        "epoch": 2,
        "shuffle": True,
        "drop_last": False,
    }
    assert len(document["methods"]) == len(comparison.outcomes) == 7
    plain_time = document["methods"][0]["modelled_time"]
    for found, outcome in zip(document["methods"], comparison.outcomes, strict=True):
        method = outcome.method
        expected = figures_slowly(method, options)
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        assert {name: found[name] for name in RANDOMNESS} == pytest.approx(
            {name: getattr(outcome.summary, name) for name in RANDOMNESS}
        )
        assert (found["name"], found["kind"]) == (method.name, method.kind)
        assert (found["max_tokens"], found["lookahead"]) == (method.max_tokens, method.lookahead)
        assert found["num_oversize"] == (
            sum(LENGTHS.tolist() > np.int64(method.max_tokens)) if method.max_tokens else 0
        )
        assert found["step_time"] == pytest.approx(expected["modelled_time"] / 13)
        assert found["speed_up"] == pytest.approx(plain_time / expected["modelled_time"])
        assert (found["is_exact"], found["speed_up_error"], found["num_steps_of_epoch"]) == (True, 0, 13)


def test_the_json_file_holds_what_is_drawn(lengths_file, tmp_path) -> None:
    document = document_of(lengths_file, tmp_path, "--steps", "all")
    timeline = timeline_of(exact_comparison())
    drawn = document["timeline"]
    assert drawn["steps"] == timeline.step_indices
    for name, lane in (("plain_shuffle", timeline.plain), ("rebalance", timeline.rebalance)):
        assert drawn[name]["costs"] == lane.costs.tolist()
        assert drawn[name]["starts"] == lane.starts.tolist()
        assert (drawn[name]["end"], drawn[name]["waiting_share"]) == (lane.end, lane.waiting_share)
    edges = document["histogram"]["edges"]
    counts = [sum(low <= length < high for length in LENGTHS) for low, high in itertools.pairwise(edges)]
    assert document["histogram"]["num_samples"] == counts
    assert sum(document["histogram"]["num_tokens"]) == LENGTHS.sum()


def test_figures_that_are_not_defined_are_null(tmp_path) -> None:
    (tmp_path / "one.txt").write_text("7")
    document = document_of(str(tmp_path / "one.txt"), tmp_path)
    assert document["methods"][0]["length_correlation"] is None
    several = document_of(str(write_lengths(tmp_path)), tmp_path, "--steps", "1")
    assert several["methods"][2]["speed_up_error"] is None


def write_lengths(folder: Path) -> Path:
    np.save(folder / "lengths.npy", LENGTHS)
    return folder / "lengths.npy"


def test_every_field_of_the_json_file_is_documented(lengths_file, tmp_path) -> None:
    page = (REPOSITORY / "docs" / "plan.md").read_text()

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value)) if value else set()
        if not isinstance(value, dict):
            return set()
        return set(value).union(*map(names, value.values()))

    missing = {name for name in names(document_of(lengths_file, tmp_path, "--steps", "1")) if f"`{name}`" not in page}
    assert missing == set()


def test_every_option_is_documented(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    options = set(re.findall(r"--[a-z]+(?:-[a-z]+)*(?![\w-])", capsys.readouterr().out)) - {"--help"}
    page = (REPOSITORY / "docs" / "plan.md").read_text()
    assert len(options) > 15
    assert {option for option in options if f"`{option}" not in page} == set()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """A folder with all three files of one call."""
    folder = tmp_path_factory.mktemp("drawn")
    words = [word for name in ("html", "png", "json") for word in (f"--{name}", str(folder / f"out.{name}"))]
    main(["plan", str(write_lengths(folder)), *RUN, "--steps", "6", *words])
    return folder


def test_all_outputs_together_are_written_whole_and_nothing_else(drawn) -> None:
    assert sorted(path.name for path in drawn.iterdir()) == ["lengths.npy", "out.html", "out.json", "out.png"]
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in drawn.glob("out.*")} == {0o666 & ~umask}


def test_the_png_is_a_picture_of_a_sensible_size_with_all_colours(drawn) -> None:
    with Image.open(io.BytesIO((drawn / "out.png").read_bytes())) as image:
        assert image.format == "PNG"
        assert 1400 <= image.width <= 2400
        assert 1400 <= image.height <= 2600
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    seen = {"#{:02x}{:02x}{:02x}".format(*colour) for colour in colours[counts > 300].tolist()}
    assert {"#ffffff", "#7b8794", "#cc79a7", "#0072b2", "#009e73", "#56b4e9"} <= seen


class Page(HTMLParser):
    """What a page consists of."""

    VOID = ("meta", "br", "img", "link", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []  # every element is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1] in ("th", "td"):
            self.rows[-1][-1] += data

    def handle_decl(self, decl: str) -> None:
        assert decl == "DOCTYPE html"


def test_the_page_needs_no_network(drawn) -> None:
    text = (drawn / "out.html").read_text()
    page = Page(text)
    assert not re.search(r"(?:https?|ftp):|//[\w.]+\.\w", text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "image"} & set(page.tags)
    references = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "srcset")]
    assert all(reference.startswith("#") for reference in references)
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)\)", text))
    assert "@import" not in text


def test_the_page_holds_every_part(drawn) -> None:
    page = Page((drawn / "out.html").read_text())
    text = " ".join(" ".join(page.texts).split())
    assert page.tags.count("svg") == 4
    for part in (
        "What balancing would do",
        "lengths.npy: 600 samples of 16 to 1,024 tokens",
        "6 of the epoch's 13 optimizer steps",
        "Methods beside each other",
        "Methods that change which samples form a step",
        "How long the samples are",
        "How much faster",
        "Who waits for whom",
        "waits for the slowest rank",
        "Padding against the budget",
        "Time against the budget",
        "Memory against the budget",
        "How to read this",
    ):
        assert part in text, part
    comparison = compare(LENGTHS, run_options(), num_steps=6)
    randomness = randomness_table(comparison)
    assert randomness is not None
    for row in [*figures_table(comparison).rows, *randomness.rows]:
        assert row in page.rows
    for note in notes(comparison):
        assert note in text


def test_references_inside_a_page_lead_to_one_place(drawn) -> None:
    page = Page((drawn / "out.html").read_text())
    places = {value for name, value in page.attributes if name == "id"}
    used = {value[1:] for name, value in page.attributes if name in ("href", "xlink:href")}
    used |= {match for _, value in page.attributes for match in re.findall(r"url\(#([^)]*)\)", value)}
    assert used
    assert used <= places


def test_a_name_of_a_file_is_text_on_the_page(tmp_path) -> None:
    path = tmp_path / "<b>$x & 'y'.txt"
    path.write_text("3 5 9 2")
    main(["plan", str(path), "--html", str(tmp_path / "out.html"), "--ranks", "2"])
    text = (tmp_path / "out.html").read_text()
    assert "&lt;b&gt;$x &amp; &#x27;y&#x27;.txt" in text
    assert "<b>$x" not in text


def test_equal_input_gives_equal_files(lengths_file, tmp_path) -> None:
    contents = []
    for _ in range(2):
        words = [word for name in ("html", "png", "json") for word in (f"--{name}", str(tmp_path / f"out.{name}"))]
        main(["plan", lengths_file, *RUN, "--steps", "3", *words])
        contents.append([(tmp_path / f"out.{name}").read_bytes() for name in ("html", "png", "json")])
    assert contents[0] == contents[1]


# Mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.npy"], "No such file or directory: 'nowhere.npy'"),
        (["nowhere"], "LENGTHS must be a file (.json, .jsonl, .npy, .txt, .csv, .parquet) or a dotted path"),
        (["no_project.Data"], "LENGTHS='no_project.Data' is neither a file nor a module that can be imported"),
        (["a.txt", "--column", "length"], "--column length needs a file with named columns"),
        (["bad.txt"], "bad.txt: lengths[1] is -2; every length must be at least 1"),
        (["empty.txt"], "empty.txt: lengths is empty"),
        (["a.txt", "--ranks", "0"], "error: --ranks must be an integer >= 1, got 0"),
        (["a.txt", "--ranks", "two"], "argument --ranks/--num_ranks: invalid int value: 'two'"),
        (["a.txt", "--accumulate", "0"], "error: --accumulate must be"),
        (["a.txt", "--batch-size", "0"], "batch_size must be"),
        (["a.txt", "--max-length", "0"], "max_length must be"),
        (["a.txt", "--pad-to-multiple-of", "0"], "pad_to_multiple_of must be"),
        (["a.txt", "--max-tokens", "0"], "max_tokens must be"),
        (["a.txt", "--max-tokens", "4096,many"], "--max-tokens/--max_tokens: must be whole numbers with commas"),
        (["a.txt", "--max-tokens", HUGE], f"max_tokens must be an integer from 1 to 9223372036854775807, got {HUGE}"),
        (["a.txt", "--pad-to-multiple-of", HUGE], "pad_to_multiple_of must be an integer from 1 to 1099511627776, got"),
        (["a.txt", "--max-length", HUGE], "max_length must be an integer from 1 to"),
        (["a.txt", "--steps", HUGE], "--steps must be an integer from 1 to"),
        (["a.txt", "--epoch", HUGE], "epoch must be an integer from 0 to"),
        (["a.txt", "--batch-size", "1000000000"], "num_slots * num_ranks must be an integer from 1 to 4194304"),
        (["a.txt", "--ranks", "4000000000", "--batch-size", "4000000000"], "num_ranks must be an integer from 1 to"),
        (["a.txt", "--intercept", "1e308"], "intercept must be at most 1e+100, got 1e+308"),
        (["a.txt", "--lookahead", "0"], "lookahead must be"),
        (["a.txt", "--sync", "zero"], "argument --sync: invalid choice: 'zero'"),
        (["a.txt", "--alpha", "-1"], "alpha must be a finite number of at least 0, got -1"),
        (["a.txt", "--intercept", "nan"], "intercept must be a finite number"),
        (["a.txt", "--seed", "-1"], "seed must be"),
        (["a.txt", "--steps", "0"], "argument --steps: must be a whole number of at least 1, or all, got '0'"),
        (["a.txt", "--steps", "some"], "or all, got 'some'"),
        (["a.txt", "--time-limit", "0"], "--time-limit must be above 0 seconds, got 0"),
        (["a.txt", "--json", "no/folder/out.json"], "--json no/folder/out.json cannot be written: there is no folder"),
        (["a.txt", "--html", "."], "--html . cannot be written: it is a folder"),
        (["a.txt", "--png", "out.x", "--json", "./out.x"], "--png and --json are both out.x: give each a file"),
        (["a.txt", "--html", "a.txt/out.html"], "there is no folder a.txt"),
    ],
)  # fmt: skip
def test_a_mistake_ends_in_one_sentence(words, sentence, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("1 2")
    (tmp_path / "bad.txt").write_text("1 -2")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *words])
    output = capsys.readouterr()
    last_line = output.err.splitlines()[-1]
    assert last_line.startswith("lightning-balance plan: error: ")
    assert sentence in last_line
    assert output.out == ""  # nothing was planned
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "bad.txt", "empty.txt"]


def test_a_folder_that_cannot_be_written_is_refused_before_lengths_are_read(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "nowhere.npy", "--json", "/proc/out.json"])
    assert "--json /proc/out.json cannot be written: " in capsys.readouterr().err


def test_what_fails_while_a_file_is_written_ends_with_status_1_and_leaves_the_old_file(
    tmp_path, monkeypatch, capsys
) -> None:
    path = write_lengths(tmp_path)
    (tmp_path / "out.json").write_text("old")

    def replace(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(SystemExit, match="1"):
        main(["plan", str(path), *RUN, "--steps", "1", "--json", str(tmp_path / "out.json")])
    assert "lightning-balance plan: error: [Errno 28] No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_replaced_keeps_its_mode_and_a_link_stays_one(tmp_path) -> None:
    path = write_lengths(tmp_path)
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "real.json").chmod(0o600)
    (tmp_path / "latest.json").symlink_to("real.json")
    (tmp_path / "next.json").symlink_to("new.json")  # which is not there yet
    for name in ("latest.json", "next.json"):
        main(["plan", str(path), *RUN, "--steps", "1", "--json", str(tmp_path / name)])
        assert (tmp_path / name).is_symlink()
        assert json.loads((tmp_path / name).read_text())["format"] == "lightning-balance plan"
    assert (tmp_path / "real.json").stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_is_refused_and_stays(tmp_path, capsys) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "to_fifo").symlink_to("fifo")
    modes = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    for name in modes:
        reason = "its links lead in a circle" if name == "circle" else "it is neither a regular file nor a"
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "nowhere.npy", "--json", str(tmp_path / name)])
        assert f"{name} cannot be written: {reason}" in capsys.readouterr().err
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == modes


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_without_matplotlib_the_extra_is_named(option, lengths_file, tmp_path, monkeypatch, capsys) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    with pytest.raises(SystemExit, match="2"):
        main(["plan", lengths_file, option, str(tmp_path / "out")])
    assert f"{option} needs matplotlib: pip install 'lightning-balance[report]'" in capsys.readouterr().err


def test_a_mistake_in_the_user_s_code_shows_where(tmp_path) -> None:
    (tmp_path / "broken.py").write_text("def data():\n    return {}['folder']\n")
    run = run_command("plan", "broken.data", cwd=tmp_path)
    assert run.returncode == 1
    assert "return {}['folder']" in run.stdout
    assert run.stdout.splitlines()[-1] == "RuntimeError: broken.data() raised KeyError: 'folder'"


# The process


def run_plainly(words: list[str], output: int, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a standard output of the test's; its error stream is returned."""
    return subprocess.run(
        [sys.executable, "-m", "lightning_balance", *words],
        stdout=output,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        timeout=100,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", [[], ["plan", "lengths.npy", "--steps", "1"]], ids=len)
def test_when_nobody_reads_the_command_ends_silently(words, lengths_file) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = run_plainly([word.replace("lengths.npy", lengths_file) for word in words], writer)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("words", [[], ["plan", "lengths.npy", "--steps", "1"]], ids=len)
def test_a_standard_output_that_cannot_be_written_is_said_in_one_sentence(words, lengths_file) -> None:
    read_only = os.open(lengths_file, os.O_RDONLY)
    run = run_plainly([word.replace("lengths.npy", lengths_file) for word in words], read_only)
    os.close(read_only)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert run.stderr.endswith("error: standard output cannot be written: Bad file descriptor\n")


def test_a_closed_standard_output_is_said_in_one_sentence(lengths_file) -> None:
    code = f"import sys; sys.stdout = None; from lightning_balance.cli import main; main(['plan', {lengths_file!r}])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (run.returncode, run.stderr) == (1, "lightning-balance plan: error: standard output is closed\n")


def test_ctrl_c_ends_without_a_traceback(lengths_file, monkeypatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_balance.what_if.command.compare", interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(["plan", lengths_file])


def test_an_output_of_ascii_gets_signs_that_it_has(lengths_file, tmp_path) -> None:
    name = os.fsdecode(b"a\xff\xc3\xa4.npy")  # no UTF-8, then a letter that ASCII lacks
    (tmp_path / name).write_bytes(Path(lengths_file).read_bytes())
    words = ["plan", str(tmp_path / name), *RUN, "--steps", "4", "--html", str(tmp_path / f"{name}.html")]
    for encoding in ("ascii", "utf-8"):
        run = run_plainly(words, subprocess.PIPE, PYTHONIOENCODING=encoding)
        assert (run.returncode, run.stderr) == (0, "")
        assert (">= " in run.stdout) == (encoding == "ascii")
        assert run.stdout.startswith("a\\xff" + ("\\xe4.npy" if encoding == "ascii" else "ä.npy"))
        assert "a\\xffä.npy" in (tmp_path / f"{name}.html").read_text()


def test_planning_from_a_file_loads_neither_torch_nor_lightning_nor_matplotlib(lengths_file, tmp_path) -> None:
    words = ["plan", lengths_file, "--steps", "1", "--json", str(tmp_path / "out.json")]
    packages = ("torch", "lightning", "matplotlib", "transformers")
    lines = loaded_by(f"from lightning_balance.cli import main; main({words!r})", packages)
    assert not set(packages) & set(lines[-4:])
    assert "efficiency" in lines  # the table was printed
    drawing = [*words, "--png", str(tmp_path / "out.png")]
    assert loaded_by(f"from lightning_balance.cli import main; main({drawing!r})", packages)[-1] == "matplotlib"


def run_on_terminal(*words: str, without_rich: bool = False) -> tuple[str, str]:
    """Standard output, which is piped, and what the process shows on a terminal as its error stream."""
    ours, theirs = pty.openpty()
    code = "import sys; sys.modules.update({'rich': None, 'rich.console': None});" if without_rich else ""
    code += f"from lightning_balance.cli import main; main({['plan', *words]!r})"
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**env, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": str(REPOSITORY)},
        timeout=100,
        check=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux says so when the other side is closed
        pass
    os.close(ours)
    return run.stdout.decode(), shown.decode()


def test_a_terminal_shows_how_far_planning_is(lengths_file) -> None:
    output, shown = run_on_terminal(lengths_file, *RUN, "--steps", "all")
    assert "Planning, " in shown
    assert "of 13 steps" in shown
    assert "Planning" not in output
    assert "\x1b" not in output


def test_without_rich_and_in_a_pipe_there_is_no_bar(lengths_file, tmp_path) -> None:
    output, shown = run_on_terminal(lengths_file, *RUN, "--steps", "3", without_rich=True)
    assert shown == ""
    assert "rebalance" in output
    run = run_command("plan", lengths_file, *RUN, "--steps", "3", cwd=tmp_path)
    assert "Planning," not in run.stdout  # which has both streams


@pytest.mark.slow
def test_a_million_lengths_take_seconds_with_every_output(tmp_path) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 1_000_000), 16, 1024).astype(np.int64)
    np.savetxt(tmp_path / "million.csv", lengths, fmt="%d", header="length", comments="")
    words = [word for name in ("html", "png", "json") for word in (f"--{name}", str(tmp_path / f"out.{name}"))]
    begin = time.perf_counter()
    run = run_command(
        "plan", "million.csv", "--ranks", "64", "--accumulate", "2", "--batch-size", "8", *words, cwd=tmp_path
    )
    seconds = time.perf_counter() - begin
    assert run.returncode == 0, run.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["lengths"]["num_samples"] == 1_000_000
    assert document["num_steps"] == math.ceil(1_000_000 / 1024)
    assert document["num_steps_planned"] >= 4
    assert seconds < 40  # below 10 on one core that nobody else uses

"""`lightning-balance plan`: find the lengths, compare, print, and write what is asked for."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_balance.console import output_of, print_table, say
from lightning_balance.cost import CostModel
from lightning_balance.outputs import check_outputs, write_file
from lightning_balance.validation import check_positive_int
from lightning_balance.what_if import tables
from lightning_balance.what_if.comparison import Comparison, compare
from lightning_balance.what_if.document import as_json
from lightning_balance.what_if.dotted import FoundLengths
from lightning_balance.what_if.inputs import find_lengths
from lightning_balance.what_if.options import SYNC_NAMES, PlanOptions
from lightning_balance.what_if.parser import make_parser
from lightning_balance.what_if.progress import Bar, show_progress

__all__ = ["run_plan_command"]

DEFAULT_BATCH_SIZE = 8
_WIDTH_OF_NOTES = 120
_OPTION_OF = {"num_ranks": "--ranks", "num_slots": "--accumulate"}
"""Options that have other names than what they set."""

Render = Callable[[Comparison, str], "str | bytes"]


def run_plan_command(words: Sequence[str]) -> None:
    """Parse the command's words, compare, print the tables, write the files.

    Mistakes end the process with one sentence and the exit status 2 before anything is planned; what fails while files
    are written ends it with 1. What the code of a user's dataset raises is not caught.
    """
    parser = make_parser()
    with output_of(parser.prog):  # --help
        given = parser.parse_args(words)
    outputs = _outputs(given)
    try:
        check_outputs({option: path for option, path, _ in outputs})
        _check_drawing(given)
        found = find_lengths(given.lengths, given.column)
        options = _options(given, found)
        lengths = _clipped(found, given.max_length)
        num_steps = options.num_steps(len(lengths))
        limit_s = _time_limit(given)
        if isinstance(given.steps, int):
            check_positive_int("--steps", given.steps)
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.error(_in_options(str(error)))
    source = os.fsencode(Path(given.lengths).name).decode(errors="backslashreplace")
    with show_progress("Planning") as bar:
        comparison = compare(
            lengths,
            options,
            num_steps=None if given.steps == "all" else given.steps,
            time_limit_s=limit_s,
            progress=_planning(bar, num_steps),
        )
        try:
            for _, path, render in outputs:
                bar(1.0, f"Writing {path.name}")
                write_file(path, render(comparison, source))
        except OSError as error:
            parser.exit(1, f"{parser.prog}: error: {error}\n")
    with output_of(parser.prog):
        _print(comparison, source)
        for _, path, _ in outputs:
            say(f"Wrote {path}")


def _outputs(given: argparse.Namespace) -> list[tuple[str, Path, Render]]:
    """Return option, path and content of each file that is asked for."""
    every: list[tuple[str, Path | None, Render]] = [
        ("--html", given.html, _as_page),
        ("--png", given.png, _as_png),
        ("--json", given.json, as_json),
    ]
    return [(option, path, render) for option, path, render in every if path is not None]


def _as_page(comparison: Comparison, source: str) -> str:
    from lightning_balance.what_if.drawing.page import as_page  # loads matplotlib

    return as_page(comparison, source)


def _as_png(comparison: Comparison, source: str) -> bytes:
    from lightning_balance.what_if.drawing.poster import as_png  # loads matplotlib

    return as_png(comparison, source)


def _check_drawing(given: argparse.Namespace) -> None:
    option = "--html" if given.html else "--png" if given.png else None
    if option and importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{option} needs matplotlib: pip install 'lightning-balance[report]'")


def _options(given: argparse.Namespace, found: FoundLengths) -> PlanOptions:
    names = {field.name for field in dataclasses.fields(PlanOptions)}
    chosen = {name: value for name, value in vars(given).items() if name in names}
    chosen["batch_size"] = (found.batch_size or DEFAULT_BATCH_SIZE) if given.batch_size is None else given.batch_size
    chosen["max_tokens"] = tuple(given.max_tokens)
    chosen["lookahead"] = tuple(given.lookahead) or PlanOptions.lookahead
    chosen["shuffle"], chosen["drop_last"] = found.shuffle, found.drop_last
    chosen["sync"] = SYNC_NAMES[given.sync]
    return PlanOptions(**chosen, cost=CostModel(intercept=given.intercept, alpha=given.alpha))


def _in_options(sentence: str) -> str:
    """Return a sentence that begins with the name of a setting, with the name of its option."""
    name, _, rest = sentence.partition(" ")
    return f"{_OPTION_OF.get(name, name)} {rest}"


def _clipped(found: FoundLengths, max_length: int | None) -> NDArray[np.int64]:
    if max_length is None:
        return found.lengths
    return np.minimum(found.lengths, check_positive_int("max_length", max_length))


def _time_limit(given: argparse.Namespace) -> float:
    if not given.time_limit_s > 0:
        raise ValueError(f"--time-limit must be above 0 seconds, got {given.time_limit_s:g}")
    return float(given.time_limit_s) if given.steps is None else math.inf


def _planning(bar: Bar, num_steps: int) -> Callable[[float, int], None]:
    def show(share: float, num_planned: int) -> None:
        bar(share, f"Planning, {num_planned:,} of {num_steps:,} steps")

    return show


def _print(comparison: Comparison, source: str) -> None:
    say(tables.describe_lengths(comparison, source))
    for table in (tables.figures_table(comparison), tables.randomness_table(comparison)):
        if table is not None:
            print_table(table.title, table.columns, table.rows)
    width = min(shutil.get_terminal_size((_WIDTH_OF_NOTES, 0)).columns, _WIDTH_OF_NOTES)
    for note in tables.notes(comparison):
        say(textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  "))

"""Tables and numbers for people: drawn with Rich where it is installed, as plain text else."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from lightning_balance.report import Row

__all__ = ["comparison_cells", "format_value", "output_of", "print_table", "render_table", "say"]

_MISSING = "-"
# Rich takes 80 columns where there is no terminal and would cut cells; no table is that wide.
_WIDTH_OF_FILES = 1000
_FRAME_PER_COLUMN = 3


def format_value(value: float | None, unit: str) -> str:
    """Return a figure as people read it, ``-`` if there is none.

    Args:
        value: the figure; ``None`` and ``nan`` are no figure.
        unit: ``percent`` (of a share), ``factor``, ``steps``, ``correlation``, ``gib``, ``seconds``, ``tokens``,
            ``tokens_per_second``, ``samples``, ``samples_per_second``, ``cost`` or ``count``.

    Raises:
        ValueError: the unit is unknown.

    Example:
        >>> format_value(0.9163, "percent"), format_value(12345.6, "tokens_per_second"), format_value(0.0021, "seconds")
        ('91.6 %', '12,346 tokens/s', '2.1 ms')
        >>> format_value(math.nan, "gib")
        '-'
    """
    formats = {
        "percent": "{:.1f} %",
        "factor": "{:.2f} x",
        "steps": "{:.2f} steps",
        "correlation": "{:.3f}",
        "gib": "{:.2f} GiB",
        "tokens": "{:,.0f} tokens",
        "tokens_per_second": "{:,.0f} tokens/s",
        "samples": "{:,.0f} samples",
        "samples_per_second": "{:,.1f} samples/s",
        "cost": "{:,.0f}",
        "count": "{:,.0f}",
    }
    if unit != "seconds" and unit not in formats:
        raise ValueError(f"unit must be one of {', '.join([*formats, 'seconds'])}, got {unit!r}")
    if value is None or math.isnan(value):
        return _MISSING
    if unit == "seconds":
        return _format_seconds(value)
    return formats[unit].format(value * 100 if unit == "percent" else value)


def comparison_cells(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return label, planned and plain cell of each row of a comparison.

    Example:
        >>> comparison_cells([Row(label="pad efficiency", unit="percent", planned=0.9, plain=0.36)])
        [('pad efficiency', '90.0 %', '36.0 %')]
    """
    return [(row.label, format_value(row.planned, row.unit), format_value(row.plain, row.unit)) for row in rows]


def render_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text; the first column is aligned to the left, the others to the right.

    Args:
        title: one line above the table.
        columns: heads of the columns; a line break divides a long one.
        rows: cells, each row with one per column.

    Raises:
        ValueError: a row has another number of cells than there are columns.

    Example:
        >>> print(render_table("Balance", ["", "planned"], [["pad efficiency", "91.6 %"], ["fillers", "0"]]))
        Balance
                        planned
        --------------  -------
        pad efficiency   91.6 %
        fillers               0
    """
    _check_rows(columns, rows)
    heads, widths = _heads(columns), _widths(columns, rows)

    def line(cells: Sequence[str]) -> str:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *aligned[1:]]).rstrip()

    return "\n".join([title, *map(line, heads), line(["-" * width for width in widths]), *map(line, rows)])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    """Print a table, with Rich where it is installed; colours only go to terminals.

    Args:
        title: one line above the table.
        columns: heads of the columns; a line break divides a long one.
        rows: cells, each row with one per column.
        file: where to print, standard output by default.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """
    file = sys.stdout if file is None else file
    title, columns, rows = _held(title, file), _held_cells(columns, file), [_held_cells(row, file) for row in rows]
    _check_rows(columns, rows)
    if not _print_rich_table(title, columns, rows, file):
        print(render_table(title, columns, rows), file=file)
    file.flush()


def say(text: str) -> None:
    """Print a line or several to standard output."""
    print(_held(text, sys.stdout), flush=True)


@contextmanager
def output_of(command: str) -> Iterator[None]:
    """Let a command end as Unix tools do where what the block prints cannot be written.

    The status is 1. When the reader has gone nothing is said, as Rich and Python's own documentation have it; else
    there is a sentence.

    Args:
        command: its name, for the sentence.
    """
    if sys.stdout is None:
        sys.exit(f"{command}: error: standard output is closed")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would be written again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        sys.exit(f"{command}: error: standard output cannot be written: {error.strerror}")


def _held(text: str, file: TextIO) -> str:
    """Return a text in characters that the file's encoding has; names of files may have none in any."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("≥", ">=").encode(encoding, "backslashreplace").decode(encoding)
    return text


def _held_cells(cells: Sequence[str], file: TextIO) -> list[str]:
    return [_held(cell, file) for cell in cells]


def _print_rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    # Text, not str: a cell such as "[1, 2]" is no markup.
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if place else "left", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=file)
    if not console.is_terminal:
        Console(file=file, width=_WIDTH_OF_FILES).print(table)
        return True
    if sum(_widths(columns, rows)) + _FRAME_PER_COLUMN * len(columns) + 1 > console.width:
        return False  # Rich would cut cells; plain lines are narrower, and a terminal wraps what is still too long
    console.print(table)
    return True


def _heads(columns: Sequence[str]) -> list[list[str]]:
    """Return the lines above the rows, a cell per column; short heads stand at the bottom."""
    num_lines = max((column.count("\n") + 1 for column in columns), default=1)
    divided = [column.split("\n") for column in columns]
    return [list(line) for line in zip(*([""] * (num_lines - len(lines)) + lines for lines in divided), strict=True)]


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return how many characters the widest cell of each column has."""
    return [max(len(line[place]) for line in [*_heads(columns), *rows]) for place in range(len(columns))]


def _check_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"rows must have one cell per column ({len(columns)}), got {list(row)}")


def _format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"

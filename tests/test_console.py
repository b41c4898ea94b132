"""Tables and numbers as people read them, with Rich and without, on terminals and in files."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_balance.console import comparison_cells, format_value, print_table, render_table
from lightning_balance.report import Row

COLUMNS = ["", "planned", "plain"]
ROWS = [["pad efficiency", "94.1 %", "36.0 %"], ["shapes [bold]", "8", "123"]]
ROOT = Path(__file__).parent.parent

PRINT = f"from lightning_balance.console import print_table; print_table('Balance', {COLUMNS}, {ROWS})"
WITHOUT_RICH = f"import sys; sys.modules['rich'] = sys.modules['rich.console'] = None; {PRINT}"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.94149, "percent", "94.1 %"),
        (1.4738, "percent", "147.4 %"),
        (5.277, "factor", "5.28 x"),
        (1.5, "gib", "1.50 GiB"),
        (2443199, "tokens", "2,443,199 tokens"),
        (18655.6, "tokens_per_second", "18,656 tokens/s"),
        (256, "samples", "256 samples"),
        (12.345, "samples_per_second", "12.3 samples/s"),
        (469566.4, "cost", "469,566"),
        (0, "count", "0"),
        (0.0000421, "seconds", "42 us"),
        (0.0421, "seconds", "42.1 ms"),
        (3723.4, "seconds", "3,723.4 s"),
        (None, "percent", "-"),
        (math.nan, "seconds", "-"),
    ],
)
def test_values_are_written_with_their_unit(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unit must be one of percent, .*seconds, got 'miles'"):
        format_value(math.nan, "miles")


def test_rows_of_a_comparison_become_cells() -> None:
    rows = [Row(label="padded tokens", unit="tokens", planned=5, plain=10), Row(label="x", unit="factor", planned=2)]
    assert comparison_cells(rows) == [("padded tokens", "5 tokens", "10 tokens"), ("x", "2.00 x", "-")]


def test_the_plain_table_is_aligned() -> None:
    assert render_table("Balance", COLUMNS, ROWS) == (
        "Balance\n"
        "                planned   plain\n"
        "--------------  -------  ------\n"
        "pad efficiency   94.1 %  36.0 %\n"
        "shapes [bold]         8     123"
    )


@pytest.mark.parametrize("function", [render_table, print_table])
def test_a_row_with_too_few_cells_is_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match=r"rows must have one cell per column \(3\), got \['a', 'b'\]"):
        function("Balance", COLUMNS, [["a", "b"]])


def test_rich_writes_every_cell_without_colours_into_a_file() -> None:
    pytest.importorskip("rich")
    file = io.StringIO()
    wide = ["w" * 150, "1", "2"]
    print_table("Balance", COLUMNS, [*ROWS, wide], file=file)
    text = file.getvalue()
    assert "\x1b" not in text
    assert text.startswith("Balance")
    assert "━" in text
    for cell in ["planned", "plain", *ROWS[0], "shapes [bold]", "w" * 150]:
        assert cell in text


def test_a_file_that_holds_no_box_characters_gets_none() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_table("Balance", COLUMNS, ROWS, file=file)
    assert b"pad efficiency" in raw.getvalue()


def run(code: str) -> str:
    """Standard output of Python code that is piped."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=True)
    return result.stdout.decode()


def run_on_terminal(code: str) -> str:
    """Standard output of Python code that writes to a terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    env = {name: value for name, value in env.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=theirs, env=env, timeout=60, check=True)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 4096):
            output += chunk
    except OSError:  # Linux says so when the other side is closed
        pass
    os.close(ours)
    return output.decode()


def test_a_pipe_gets_no_colours_and_a_terminal_does() -> None:
    pytest.importorskip("rich")
    assert "\x1b" not in run(PRINT)
    on_terminal = run_on_terminal(PRINT)
    assert "\x1b[1m" in on_terminal
    assert "shapes [bold]" in on_terminal


def test_without_rich_the_table_is_plain_text() -> None:
    assert run(WITHOUT_RICH) == render_table("Balance", COLUMNS, ROWS) + "\n"
    assert "\x1b" not in run_on_terminal(WITHOUT_RICH)


def test_the_console_needs_neither_torch_nor_lightning() -> None:
    code = f"{PRINT}; import sys; print([name for name in ('torch', 'lightning') if name in sys.modules])"
    assert run(code).endswith("[]\n")
    assert run(f"import torch; {code}").endswith("['torch']\n")  # the check can fail


def test_a_line_break_divides_a_head() -> None:
    assert render_table("Balance", ["method", "pad\nefficiency"], [["plain", "36.0 %"]]) == (
        "Balance\n               pad\nmethod  efficiency\n------  ----------\nplain       36.0 %"
    )
    pytest.importorskip("rich")
    file = io.StringIO()
    print_table("Balance", ["method", "pad\nefficiency"], [["plain", "36.0 %"]], file=file)
    upper, lower = file.getvalue().splitlines()[2:4]
    assert upper.strip("┃ ") == "pad"
    assert lower.strip("┃ ").split() == ["method", "┃", "efficiency"]


def test_a_terminal_that_is_too_narrow_for_a_frame_loses_no_figure() -> None:
    pytest.importorskip("rich")
    cells = [f"{place}" * 9 for place in range(9)]  # 109 characters with a frame, 97 without
    code = f"from lightning_balance.console import print_table; print_table('x', {cells}, [{cells}])"
    narrow = run_on_terminal(code)
    assert "━" not in narrow
    assert all(cell in narrow for cell in cells)
    assert "━" in run_on_terminal(code.replace(str(cells), str(cells[:8])))

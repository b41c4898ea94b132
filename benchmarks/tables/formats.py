"""Numbers and rows as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table; numbers stand to the right of the first column.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    | --- | ---: |
    | x | 1 |
    """
    lines = [list(header), ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(value: float) -> str:
    """Return seconds in a readable unit.

    >>> seconds(0.0042), seconds(0.21), seconds(14.3), seconds(0.0)
    ('4.2 ms', '210 ms', '14.3 s', '< 0.1 ms')
    """
    if value < 1e-4:
        return "< 0.1 ms"
    if value >= 1:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"


def spread(timing: Json) -> str:
    """Return median and spread of a timing."""
    return f"{seconds(timing['median_s'])} ({seconds(timing['min_s'])} - {seconds(timing['max_s'])})"


def share(value: float) -> str:
    """Return a share with its sign, in percent.

    >>> share(-0.0123), share(0.0)
    ('-1.23 %', '0 %')
    """
    return "0 %" if abs(value) < 5e-12 else f"{value * 100:+.3g} %".replace("+0 %", "0 %")

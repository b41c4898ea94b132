"""Types of command line options: a bad value is told in the command's own words."""

from __future__ import annotations

import argparse
import math


def positive_int(text: str) -> int:
    """Return a whole number of at least 1.

    >>> positive_int("3")
    3
    """
    return at_least(1, text)


def at_least(least: int, text: str) -> int:
    """Return a whole number of at least another.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
    return value


def positive_float(text: str) -> float:
    """Return a finite number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.

    >>> positive_float("0.5")
    0.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value

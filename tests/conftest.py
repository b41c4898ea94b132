"""Options of the test suite, and what it says at its end."""

from __future__ import annotations

import pytest

CRASH_ROUNDS = pytest.StashKey[str]()
"""What the rounds of ``tests/test_crashes.py`` came to."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crash-rounds",
        type=int,
        default=30,
        metavar="N",
        help="rounds of kills and restarts in tests/test_crashes.py (default: 30)",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if CRASH_ROUNDS in config.stash:
        terminalreporter.write_line(f"crashes: {config.stash[CRASH_ROUNDS]}")

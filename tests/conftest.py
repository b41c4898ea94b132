"""Options of the test suite, and what it says at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.allocator import Allocator

CRASH_ROUNDS = pytest.StashKey[str]()
"""What the rounds of ``tests/test_crashes.py`` came to."""


@pytest.fixture(autouse=True)
def no_seed_of_another_test() -> Iterator[None]:
    """``seed_everything`` leaves its seed in the environment, where the callback takes it from."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """A machine with an accelerator, in use."""
    found = Allocator()
    monkeypatch.setattr("lightning_balance.memory._device_module", lambda: found)
    return found


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

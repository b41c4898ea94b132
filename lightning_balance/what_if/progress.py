"""A progress bar on the terminal's error stream, where Rich is installed; elsewhere nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Bar", "show_progress"]


class Bar(Protocol):
    """Something that shows how far the work is."""

    def __call__(self, share: float, text: str) -> None:
        """Show the share that is done, and what is being done."""
        ...


@contextmanager
def show_progress(text: str) -> Iterator[Bar]:
    """Show a bar while the block runs; it is gone afterwards, and files and pipes never see it.

    Args:
        text: what is being done at first.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _show_nothing
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:  # a disabled bar of Rich 13.0 still ends its line
        yield _show_nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=1.0)

        def show(share: float, text: str) -> None:
            progress.update(task, completed=share, description=text)

        yield show


def _show_nothing(share: float, text: str) -> None:
    pass

"""Where LENGTHS come from: a file, or a dotted path to a dataset or data module."""

from __future__ import annotations

from pathlib import Path

from lightning_balance.what_if.dotted import FoundLengths, is_dotted_path, lengths_of_dotted_path
from lightning_balance.what_if.files import SUFFIXES, read_lengths

__all__ = ["find_lengths"]


def find_lengths(text: str, column: str | None = None, *, progress: bool = True) -> FoundLengths:
    """Return the lengths that a file holds or a dotted path leads to.

    A text that ends in a known suffix, or is a path that exists, is a file.

    Raises:
        ImportError: there is no such module, or a library that the format needs is missing.
        OSError: the file cannot be read.
        TypeError: values that are not numbers, or no dataset.
        ValueError: no such column or name, another kind of file, or lengths that cannot be.
    """
    path = Path(text)
    if path.suffix.lower() in SUFFIXES or path.exists():
        return FoundLengths(lengths=read_lengths(path, column))
    if is_dotted_path(text):
        return lengths_of_dotted_path(text, column, progress=progress)
    raise ValueError(
        f"LENGTHS must be a file ({', '.join(SUFFIXES)}) or a dotted path such as my_project.data.MyData, got {text!r}"
    )

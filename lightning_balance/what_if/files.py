"""Read lengths from a file: JSON, JSON lines, NumPy, text, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.validation import validate_lengths
from lightning_balance.what_if.columns import choose_column, lengths_of_column

__all__ = ["SUFFIXES", "read_lengths"]

_NPY = b"\x93NUMPY"
_QUOTED = re.compile(r'(?<![^,;\t\n])"(?:[^"]|"")*"')
"""A quoted cell of a CSV file: a quote inside a cell that does not begin with one is a character like others."""


def read_lengths(path: Path, column: str | None = None) -> NDArray[np.int64]:
    r"""Read one length per sample.

    ========== ==========================================================================================
    file       holds
    ========== ==========================================================================================
    .json      a list of numbers; an object with a list under `column` or ``lengths``; a list of objects
    .jsonl     a number or an object a line
    .npy       an array of numbers
    .txt       numbers between spaces or line ends
    .csv       a line a sample, with a header unless all are numbers; ``,``, ``;`` or tabs in between
    .parquet   a table (needs pyarrow)
    ========== ==========================================================================================

    In objects and tables the length is in `column`, or in the one that is named ``length``, ``lengths`` or
    ``num_tokens``, or in the only one. A column of lists, such as ``input_ids``, has its entries counted.

    Args:
        path: the file.
        column: name of a column, or its number in a CSV file without a header, counted from 0.

    Raises:
        ImportError: a library that the format needs is not installed.
        OSError: the file cannot be read.
        TypeError: values that are not numbers.
        ValueError: another kind of file, no such column, or not lengths; the sentence names the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.csv"
        ...     _ = path.write_text("name,length\na,3\nb,5\n")
        ...     read_lengths(path)
        array([3, 5])
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"LENGTHS must be one of {', '.join(SUFFIXES)}, got {str(path)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"LENGTHS must be a file, but {str(path)!r} is a folder")
    try:
        return validate_lengths(reader(path, column))
    except RecursionError as error:
        raise ValueError(f"{path}: its lists or objects are nested too deeply to be lengths") from error
    except (TypeError, ValueError, EOFError, csv.Error) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


def _read_json(path: Path, column: str | None) -> Any:
    content = json.loads(_text(path))
    if isinstance(content, dict):
        return lengths_of_column(
            content, choose_column(content, column or ("lengths" if "lengths" in content else None))
        )
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return _lengths_of_objects(content, column, "entry")
    return _without_column(content, column)


def _read_json_lines(path: Path, column: str | None) -> Any:
    rows = [_parse_line(line, number) for number, line in enumerate(_text(path).split("\n"), start=1) if line.strip()]
    if rows and isinstance(rows[0], dict):
        return _lengths_of_objects(rows, column, "line")
    return _without_column(rows, column)


def _read_npy(path: Path, column: str | None) -> Any:
    with path.open("rb") as file:
        if file.read(len(_NPY)) != _NPY:
            raise ValueError("it holds no NumPy array, as numpy.save writes one")
    try:
        array = np.load(path, allow_pickle=False)
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise ValueError("its array holds Python objects, not numbers: save one of integers") from error
    return _without_column(array, column)


def _read_txt(path: Path, column: str | None) -> Any:
    return _numbers(_without_column(_text(path).split(), column), "word")


def _read_csv(path: Path, column: str | None) -> Any:
    text = _text(path)
    first_line = _QUOTED.sub("", text).lstrip("\r\n").split("\n", 1)[0]
    delimiter = max(",;\t", key=first_line.count)
    usual_limit = csv.field_size_limit(len(text) + 1)  # a column of texts beside the lengths may have long ones
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
    finally:
        csv.field_size_limit(usual_limit)
    if not rows:
        return []
    has_header = not all(_is_number(cell) for cell in rows[0])
    names = [cell.strip() for cell in rows[0]] if has_header else [str(place) for place in range(len(rows[0]))]
    body = rows[1:] if has_header else rows
    place = names.index(choose_column(dict.fromkeys(names), column))
    for number, row in enumerate(body, start=1):
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} cells, expected {len(names)} as in the first line")
    return _numbers([row[place] for row in body], "row")


def _read_parquet(path: Path, column: str | None) -> Any:
    try:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
        import pyarrow.types as kinds
    except ImportError as error:
        raise ImportError("reading .parquet needs pyarrow: pip install 'lightning-balance[report]'") from error
    path.open("rb").close()  # Python's own sentence for a file that cannot be read
    schema = pq.read_schema(path)
    name = choose_column(dict.fromkeys(schema.names), column)
    values = pq.read_table(path, columns=[name]).column(name)
    if values.null_count:
        raise ValueError(f"column {name!r} has {values.null_count} empty values; every sample needs a length")
    kind = values.type
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        values = pc.list_value_length(values)
    elif not (kinds.is_integer(kind) or kinds.is_floating(kind)):
        raise TypeError(f"column {name!r} must hold numbers or lists, got {kind}")
    return values.to_numpy()


_READERS: dict[str, Callable[[Path, str | None], Any]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".npy": _read_npy,
    ".txt": _read_txt,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _parse_line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from error


def _lengths_of_objects(rows: Sequence[Any], column: str | None, what: str) -> Any:
    name = choose_column(rows[0], column)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or name not in row:
            raise ValueError(f"{what} {number} has no {name!r}, as the first one has")
    return lengths_of_column({name: [row[name] for row in rows]}, name)


def _without_column(values: Any, column: str | None) -> Any:
    if column is not None:
        raise ValueError(f"--column {column} needs a file with named columns, and this one has bare numbers")
    return values


def _numbers(words: Iterable[str], what: str) -> Any:
    words = list(words)
    try:
        return np.array(words).astype(np.int64) if words else []
    except (ValueError, OverflowError):  # "3.0" is a whole number too; too large ones are refused with the others
        return np.array([_number(word, f"{what} {number}") for number, word in enumerate(words, start=1)])


def _number(word: str, where: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{where} must be a whole number, got {word!r}") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

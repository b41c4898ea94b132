"""Lengths from files: every format gives the same ones, and every mistake one sentence that names the file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_balance.lengths import samples
from lightning_balance.what_if import columns, read_lengths
from tests.what_if.inputs import LENGTHS

LISTS = [[7] * length for length in LENGTHS[:20].tolist()]


def write(path: Path, content: Any) -> Path:
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_text(content, encoding="utf-8")
    return path


def as_csv(header: list[str] | None, rows: list[list[Any]], path: Path, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows] if header else rows)
    return path


NUMBERS = LENGTHS.tolist()
WITH_NAMES = [{"name": f"a, {place}", "length": length} for place, length in enumerate(NUMBERS)]
TABLE = pa.table({"name": [row["name"] for row in WITH_NAMES], "length": NUMBERS})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.json", json.dumps(NUMBERS)),
        ("object.json", json.dumps({"name": "x", "lengths": NUMBERS})),
        ("objects.json", json.dumps(WITH_NAMES)),
        ("numbers.jsonl", "\n".join(map(str, NUMBERS))),
        ("objects.jsonl", "\n".join(map(json.dumps, WITH_NAMES)) + "\n\n"),
        ("array.npy", LENGTHS),
        ("small.npy", LENGTHS.astype(np.uint16)),
        ("half.npy", LENGTHS.astype(np.float16)),
        ("floats.npy", LENGTHS.astype(np.float32)),
        ("lines.txt", "\n".join(map(str, NUMBERS))),
        ("words.txt", " ".join(f"{length}.0" for length in NUMBERS)),
        ("upper.TXT", "\n".join(map(str, NUMBERS))),
        ("marked.txt", "\ufeff" + "\n".join(map(str, NUMBERS))),  # a byte order mark, as some editors write it
        ("numbers.csv", "\n".join(map(str, NUMBERS))),
        ("header.csv", "tokens_in_text\n" + "\n".join(map(str, NUMBERS))),
        ("windows.csv", "length\r\n" + "\r\n".join(map(str, NUMBERS)) + "\r\n"),
        ("table.parquet", TABLE),
        ("one_column.parquet", pa.table({"anything": pa.array(NUMBERS, pa.int32())})),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:20] else "",
)
@pytest.mark.filterwarnings("error")
def test_every_format_gives_the_same_lengths(name, content, tmp_path) -> None:
    lengths = read_lengths(write(tmp_path / name, content))
    assert lengths.dtype == np.int64
    assert lengths.tolist() == NUMBERS


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_file_may_have_other_columns_with_anything_in_them(delimiter, tmp_path) -> None:
    text = f'a "quoted"{delimiter}\nword\u2028and ' + "x" * 200_000
    path = as_csv(["text", "length"], [[text, length] for length in NUMBERS[:9]], tmp_path / "a.csv", delimiter)
    assert read_lengths(path).tolist() == NUMBERS[:9]
    assert csv.field_size_limit() == 131_072  # for everybody else it stays


@pytest.mark.parametrize(
    "header",
    [
        '"prompt; context; answer",length',
        'length;"a, b, ""c"", d"',
        '\n"two\nlines; of; it",length',
        'a 5" disk;length',
    ],
)
def test_what_stands_between_cells_is_not_looked_for_in_quotes(header, tmp_path) -> None:
    delimiter = ";" if header.startswith(("length", "a")) else ","
    rows = "3;x\n4;y\n" if header.startswith("length") else f"x{delimiter}3\ny{delimiter}4\n"
    assert read_lengths(write(tmp_path / "a.csv", f"{header}\n{rows}")).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps({"texts": 3, "mine": NUMBERS})),
        ("a.jsonl", "\n".join(json.dumps({"length": 1, "mine": length}) for length in NUMBERS)),
        ("a.csv", "length,mine\n" + "\n".join(f"1,{length}" for length in NUMBERS)),
        ("a.parquet", pa.table({"length": [1] * len(NUMBERS), "mine": NUMBERS})),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_column_can_be_chosen(name, content, tmp_path) -> None:
    assert read_lengths(write(tmp_path / name, content), "mine").tolist() == NUMBERS


def test_a_csv_file_without_header_has_numbered_columns(tmp_path) -> None:
    path = as_csv(None, [[1, length] for length in NUMBERS], tmp_path / "a.csv")
    assert read_lengths(path, "1").tolist() == NUMBERS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps({"name": "x", "input_ids": LISTS})),
        ("a.jsonl", "\n".join(json.dumps({"input_ids": tokens, "label": 3}) for tokens in LISTS)),
        ("a.parquet", pa.table({"label": [3] * 20, "input_ids": LISTS})),
        ("large.parquet", pa.table({"input_ids": pa.array(LISTS, pa.large_list(pa.int32()))})),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_sequences_have_their_entries_counted(name, content, tmp_path) -> None:
    assert read_lengths(write(tmp_path / name, content)).tolist() == NUMBERS[:20]


def test_names_of_columns_are_those_that_samples_have() -> None:
    assert columns.LENGTH_KEYS == samples.LENGTH_KEYS
    assert columns.SEQUENCE_KEYS == samples.SEQUENCE_KEYS


@pytest.mark.parametrize(
    ("name", "content", "column", "sentence"),
    [
        ("a.xlsx", "", None, "LENGTHS must be one of .json, .jsonl, .npy, .txt, .csv, .parquet, got "),
        ("a.json", "{}", None, "a.json: it has no columns, so none that holds lengths"),
        ("a.json", "[{}]", None, "a.json: it has no columns, so none that holds lengths"),
        ("a.jsonl", "{}", "a", "a.jsonl: it has no columns, so none that holds lengths"),
        ("a.json", '{"a": [1], "b": [2]}', None, "choose one of 'a', 'b' with --column"),
        ("a.json", '{"a": [1], "b": [2]}', "c", "a.json: --column c is none of its columns 'a', 'b'"),
        ("a.json", "[1, 2", None, "a.json: Expecting"),
        ("a.json", "[]", None, "a.json: lengths is empty"),
        ("a.json", "[1, [2, 3]]", None, "a.json: lengths must be 1-D"),
        ("a.json", '[{"a": [1]}, {"a": null}]', None, "a.json: column 'a' holds lists, but entry 2 is None (NoneType)"),
        ("a.json", "[1, null, 3]", None, "a.json: lengths must be numbers, but lengths[1] is None (NoneType)"),
        ("a.json", '[1, 2, "x"]', None, "a.json: lengths must be numbers, but lengths[2] is 'x' (str)"),
        ("a.json", '["one"]', None, "a.json: lengths must be numbers"),
        ("a.json", "[1, 2]", "length", "a.json: --column length needs a file with named columns"),
        ("a.json", "[1, -2, 3]", None, "a.json: lengths[1] is -2; every length must be at least 1"),
        ("a.json", "[1, 2.5]", None, "a.json: lengths[1] is 2.5; every length must be a whole number"),
        ("a.json", '[{"length": 1}, {"size": 2}]', None, "a.json: entry 2 has no 'length'"),
        ("a.json", "[" * 200_000, None, "a.json: its lists or objects are nested too deeply to be lengths"),
        ("a.jsonl", "[" * 200_000, None, "a.jsonl: its lists or objects are nested too deeply to be lengths"),
        ("a.txt", f"1 {10**20}", None, "a.txt: lengths[1] is 1e+20; lengths above 1099511627776 are not supported"),
        ("a.csv", f"length\n{10**20}\n5\n", None, "a.csv: lengths[0] is 1e+20; lengths above"),
        ("a.json", f"[{10**20}]", None, "a.json: lengths must be numbers"),
        ("a.jsonl", '{"length": 1}\n{"length"', None, "a.jsonl: line 2 is no JSON"),
        ("a.jsonl", '{"length": 1}\n2', None, "a.jsonl: line 2 has no 'length'"),
        ("a.jsonl", "", None, "a.jsonl: lengths is empty"),
        ("a.txt", "1 two", None, "a.txt: word 2 must be a whole number, got 'two'"),
        ("a.txt", "1 0", None, "a.txt: lengths[1] is 0"),
        ("a.txt", "", None, "a.txt: lengths is empty"),
        ("a.npy", "", None, "a.npy: it holds no NumPy array, as numpy.save writes one"),
        ("a.npy", "no array", None, "a.npy: it holds no NumPy array, as numpy.save writes one"),
        ("a.npy", "PK\x03\x04", None, "a.npy: it holds no NumPy array"),  # as numpy.savez begins
        ("a.npy", np.array([{}, 3]), None, "a.npy: its array holds Python objects, not numbers: save one of integers"),
        ("a.npy", np.ones((2, 3)), None, "a.npy: lengths must be 1-D"),
        ("a.csv", "", None, "a.csv: lengths is empty"),
        ("a.csv", "length\n", None, "a.csv: lengths is empty"),
        ("a.csv", "a,b\n1,2\n", None, "a.csv: several columns may hold the lengths: choose one of 'a', 'b'"),
        ("a.csv", "a,b\n1,2\n", "c", "a.csv: --column c is none of its columns 'a', 'b'"),
        ("a.csv", "length,b\n1,2\n3\n", None, "a.csv: row 2 has 1 cells, expected 2"),
        ("a.csv", "length\n1\nmany\n", None, "a.csv: row 2 must be a whole number, got 'many'"),
        ("a.csv", "length,a\n1,b\n,c\n", None, "a.csv: row 2 must be a whole number, got ''"),
        ("a.parquet", "no table", None, "a.parquet: "),
        ("a.parquet", pa.table({"length": [1, None]}), None, "a.parquet: column 'length' has 1 empty values"),
        ("a.parquet", pa.table({"text": ["ab"]}), None, "a.parquet: column 'text' must hold numbers or lists"),
        ("a.parquet", pa.table({"a": [1], "b": [1]}), "c", "a.parquet: --column c is none of its columns 'a', 'b'"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_file(name, content, column, sentence, tmp_path) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises((TypeError, ValueError)) as error:
        read_lengths(path, column)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.npy", "a.txt", "a.csv", "a.parquet"])
def test_a_file_that_is_not_there_is_named(name, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        read_lengths(tmp_path / name)


def test_a_folder_is_no_file(tmp_path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OSError, match=r"a\.json' is a folder"):
        read_lengths(tmp_path / "a.json")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch) -> None:
    import sys

    path = write(tmp_path / "a.parquet", TABLE)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"\.parquet needs pyarrow: pip install 'lightning-balance\[report\]'"):
        read_lengths(path)

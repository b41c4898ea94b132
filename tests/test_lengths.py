"""Lengths of any dataset: from what is given or stored, without reading samples; else by one scan."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_balance.lengths import is_scan_needed, resolve_lengths, sample_length

LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, 60, 100)]


class Counting(Dataset[Any]):
    """Samples are made by `make(length)`; every index that is read is kept."""

    def __init__(self, make: Callable[[int], Any], lengths: list[int] = LENGTHS) -> None:
        self.make, self.sizes, self.reads = make, lengths, list[Any]()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.make(self.sizes[index])


class Unreadable(Dataset[Any]):
    """A dataset that must not be read."""

    def __init__(self, num_samples: int = len(LENGTHS), **attributes: Any) -> None:
        self.num_samples = num_samples
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(f"sample {index} was read")


class Wrapper(Dataset[Any]):
    """Hands out the samples of the dataset inside."""

    def __init__(self, dataset: Any, make: Callable[[Any], Any] = lambda sample: sample) -> None:
        self.dataset, self.make = dataset, make

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.dataset[index])


def tokens(length: int) -> dict[str, Any]:
    return {"input_ids": list(range(length)), "labels": [0]}


def known(dataset: Any, lengths: Any = None, **options: Any) -> list[int]:
    """Lengths that must come without a scan, a warning or a progress bar."""
    assert not is_scan_needed(dataset, lengths, options.get("datamodule"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolve_lengths(dataset, lengths, **options)
    assert found.dtype == np.int64
    return found.tolist()


def scanned(dataset: Any, lengths: Any = None, **options: Any) -> list[int]:
    assert is_scan_needed(dataset, lengths, options.get("datamodule"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reading")
        return resolve_lengths(dataset, lengths, progress=False, **options).tolist()


# --- given ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        LENGTHS,
        tuple(LENGTHS),
        np.array(LENGTHS, dtype=np.uint16),
        np.array(LENGTHS, dtype=np.float32),
        torch.tensor(LENGTHS),
        torch.tensor(LENGTHS, dtype=torch.bfloat16),
        torch.tensor(LENGTHS).unbind(),
        pa.array(LENGTHS),
        pa.chunked_array([LENGTHS[:30], LENGTHS[30:]]),
        pd.Series(LENGTHS, index=range(7, 107)),
        hf.Dataset.from_dict({"n": LENGTHS})["n"],
        hf.Dataset.from_dict({"n": LENGTHS}).with_format("torch")["n"],
        hf.Dataset.from_dict({"n": LENGTHS}).with_format("arrow")["n"],
        hf.Dataset.from_dict({"n": LENGTHS}).with_format("pandas")["n"],
    ],
    ids=lambda given: type(given).__name__,
)
def test_any_array_is_taken_without_reading_samples(given: Any) -> None:
    assert known(Unreadable(), given) == LENGTHS


def test_lengths_are_clipped_to_max_length() -> None:
    assert known(Unreadable(), LENGTHS, max_length=20) == [min(length, 20) for length in LENGTHS]
    assert known(Unreadable(lengths=LENGTHS), max_length=20) == [min(length, 20) for length in LENGTHS]
    for bad in (0, -1, 2.5, True):
        with pytest.raises((TypeError, ValueError), match="max_length must be"):
            resolve_lengths(Unreadable(), LENGTHS, max_length=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (LENGTHS[:-1], r"lengths has 99 entries but the dataset has 100 samples"),
        ([*LENGTHS[:-1], -5], r"lengths\[99\] is -5"),
        ([*LENGTHS[:-1], 0], r"lengths\[99\] is 0"),
        ([*LENGTHS[:-1], float("nan")], r"lengths\[99\] is nan"),
        ([*LENGTHS[:-1], 1.5], r"lengths\[99\] is 1.5"),
        ([0] * 100, r"lengths\[0\] is 0.*all lengths are zero"),
        ([*LENGTHS[:-1], None], r"lengths must be numbers, but lengths\[99\] is None"),
        ([*LENGTHS[:-1], "x"], r"lengths must be numbers, but lengths\[99\] is 'x' \(str\)"),
        (["a"] * 100, r"lengths must be numbers"),
        ([True] * 100, r"lengths must be numbers"),
        ([[1], [2, 3]] * 50, r"lengths must be 1-D"),
        (np.ones((100, 1)), r"lengths must be 1-D.*\(100, 1\)"),
        ({"a": 3}, r"lengths must"),
        (7, r"lengths must be 1-D"),
    ],
    ids=str,
)
def test_bad_lengths_are_refused_by_name(bad: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        resolve_lengths(Unreadable(), bad)


def test_a_callable_measures_every_sample_once_without_a_warning() -> None:
    dataset = Counting(lambda length: SimpleNamespace(size=length))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolve_lengths(dataset, lambda sample: sample.size, progress=False)
    assert found.tolist() == LENGTHS
    assert dataset.reads == list(range(100))
    assert is_scan_needed(dataset, len)


@pytest.mark.parametrize("number", [np.int32(7), torch.tensor(7), torch.tensor([7])[0], 7])
def test_a_callable_may_return_any_integer(number: Any) -> None:
    assert scanned([1, 2], lambda sample: number) == [7, 7]


@pytest.mark.parametrize("value", [3.0, "3", None, True, [3], np.float32(3), np.True_, torch.tensor(True)])
def test_a_callable_that_returns_no_int_is_refused_with_the_index(value: Any) -> None:
    with pytest.raises(TypeError, match=r"the callable in lengths gave .* for sample 2; it must give an int"):
        resolve_lengths(range(5), lambda sample: value if sample == 2 else 1, progress=False)


# --- stored -----------------------------------------------------------------------------------------------------------


def test_a_lengths_attribute_or_method_is_used() -> None:
    assert known(Unreadable(lengths=torch.tensor(LENGTHS))) == LENGTHS
    assert known(Unreadable(lengths=lambda: LENGTHS)) == LENGTHS
    assert known(Unreadable(), datamodule=SimpleNamespace(lengths=LENGTHS)) == LENGTHS
    assert known(Unreadable(), datamodule=SimpleNamespace(lengths=lambda: LENGTHS)) == LENGTHS
    assert known(Unreadable(lengths=LENGTHS), datamodule=SimpleNamespace(lengths=[1, 2])) == LENGTHS
    assert known(Unreadable(lengths=LENGTHS), datamodule=SimpleNamespace(lengths=None)) == LENGTHS


def test_a_stored_name_or_sample_function_counts_as_if_it_were_given() -> None:
    assert known(Unreadable(sizes=LENGTHS), datamodule=SimpleNamespace(lengths="sizes")) == LENGTHS
    assert scanned(Counting(str), datamodule=SimpleNamespace(lengths=lambda sample: int(sample))) == LENGTHS
    with pytest.raises(TypeError, match="must take no argument or one sample, but it needs 2"):
        resolve_lengths(Unreadable(lengths=lambda a, b: a))


def test_a_name_may_be_an_attribute_of_lengths_or_of_sequences() -> None:
    assert known(Unreadable(sizes=np.array(LENGTHS)), "sizes") == LENGTHS
    assert known(Unreadable(sizes=lambda: LENGTHS), "sizes") == LENGTHS
    assert known(Unreadable(texts=["x" * length for length in LENGTHS]), "texts") == LENGTHS
    assert known(Wrapper(Unreadable(sizes=LENGTHS)), "sizes") == LENGTHS


def test_an_error_in_stored_lengths_says_where_they_are() -> None:
    with pytest.raises(ValueError, match=r"lengths has 2 entries.*100 samples.*come from SimpleNamespace\.lengths"):
        resolve_lengths(Unreadable(), datamodule=SimpleNamespace(lengths=[0.8, 0.2]))
    with pytest.raises(ValueError, match=r"lengths\[0\] is 0.*come from Unreadable\.lengths\(\)"):
        resolve_lengths(Unreadable(lengths=lambda: [0, *LENGTHS[1:]]))


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def huggingface(sizes: list[int] = LENGTHS, **columns: Any) -> hf.Dataset:
    return hf.Dataset.from_dict({"input_ids": [list(range(size)) for size in sizes], **columns})


def rows_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading a row of a Hugging Face dataset in any format but Arrow fail."""
    original = hf.Dataset.__getitem__

    def checked(self: hf.Dataset, key: Any) -> Any:
        assert self.format["type"] == "arrow", f"row {key} was decoded"
        return original(self, key)

    monkeypatch.setattr(hf.Dataset, "__getitem__", checked)


HUGGINGFACE_VIEWS: dict[str, Callable[[hf.Dataset], hf.Dataset]] = {
    "as it is": lambda d: d,
    "selected range": lambda d: d.select(range(10, 60)),
    "selected": lambda d: d.select([5, 5, 80, 3]),
    "shuffled": lambda d: d.shuffle(seed=1),
    "filtered": lambda d: d.filter(lambda row: len(row["input_ids"]) > 20),
    "shuffled and selected": lambda d: d.shuffle(seed=1).select(range(3, 77)),
    "sorted": lambda d: d.add_column("key", LENGTHS[::-1]).sort("key"),
    "concatenated": lambda d: hf.concatenate_datasets([d.shuffle(seed=2), d, d.select([1, 0])]),
    "torch format": lambda d: d.shuffle(seed=1).with_format("torch"),
    "other column in format": lambda d: d.add_column("other", LENGTHS).with_format("numpy", columns=["other"]),
    "sharded": lambda d: d.shard(num_shards=3, index=1),
    "mapped": lambda d: d.map(lambda row: {"input_ids": row["input_ids"] * 2}),
}


@pytest.mark.parametrize("view", HUGGINGFACE_VIEWS.values(), ids=HUGGINGFACE_VIEWS.keys())
@pytest.mark.parametrize("name", [None, "input_ids"])
def test_huggingface_columns_are_measured_without_decoding(
    view: Callable[[hf.Dataset], hf.Dataset], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = view(huggingface())
    expected = [len(row) for row in dataset.with_format(None)["input_ids"]]
    rows_are_unread(monkeypatch)
    assert known(dataset, name) == expected


def test_the_check_that_rows_are_unread_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_are_unread(monkeypatch)
    with pytest.raises(AssertionError, match="row 0 was decoded"):
        resolve_lengths(huggingface(), lambda row: len(row["input_ids"]), progress=False)


def test_every_chunk_and_slice_of_a_long_table_is_read() -> None:
    lengths = np.random.default_rng(3).integers(1, 4, 5300).tolist()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.zeros(offsets[-1], np.int8)))
    table = pa.table({"input_ids": pa.chunked_array([rows[:7], rows[7:2500], rows[2500:2500], rows[2500:]])})
    dataset = hf.Dataset(table)
    assert known(dataset) == lengths
    order = np.random.default_rng(4).permutation(5300)
    assert known(dataset.select(order)) == np.array(lengths)[order].tolist()


@pytest.mark.parametrize(
    ("feature", "rows"),
    [
        (hf.Sequence(hf.Value("int32")), [[1, 2], [3], [4, 5, 6]]),
        (hf.LargeList(hf.Value("int32")), [[1, 2], [3], [4, 5, 6]]),
        (hf.Value("string"), ["ab", "ü", "abc"]),
        (hf.Value("large_string"), ["ab", "c", "abc"]),
        (hf.Value("binary"), [b"ab", b"c", b"abc"]),
        (hf.Value("uint8"), [2, 1, 3]),
        (hf.Sequence(hf.Sequence(hf.Value("float32"))), [[[1.0]] * 2, [[1.0]], [[1.0]] * 3]),
        (hf.Array2D(shape=(None, 2), dtype="float32"), [np.ones((2, 2)), np.ones((1, 2)), np.ones((3, 2))]),
    ],
    ids=str,
)
def test_a_named_column_of_any_measurable_type_is_read(feature: Any, rows: list[Any]) -> None:
    dataset = hf.Dataset.from_dict({"x": rows}, features=hf.Features({"x": feature}))
    assert known(dataset, "x") == [2, 1, 3]
    assert known(dataset.select([2, 0]), "x") == [3, 2]


def test_fixed_size_lists_have_their_size() -> None:
    dataset = hf.Dataset.from_dict({"x": [[1, 2]] * 3}, features=hf.Features({"x": hf.Sequence(hf.Value("int8"), 2)}))
    assert known(dataset, "x") == [2, 2, 2]


@pytest.mark.parametrize("name", ["length", "lengths", "num_tokens"])
def test_an_integer_column_of_lengths_comes_before_the_sequence(name: str) -> None:
    dataset = huggingface(**{name: [length + 1 for length in LENGTHS]})
    assert known(dataset) == [length + 1 for length in LENGTHS]
    seconds = huggingface(**{name: [length / 2 for length in LENGTHS]})
    assert known(seconds) == LENGTHS  # not integers: something else


def test_unknown_and_unmeasurable_columns_are_refused() -> None:
    dataset = huggingface(weight=[0.5] * 100)
    for view in (dataset, Subset(dataset, [0, 1]), ConcatDataset([Subset(dataset, [1]), dataset])):
        with pytest.raises(ValueError, match=r"lengths='text' is not a column.* columns are 'input_ids', 'weight'"):
            resolve_lengths(view, "text")
    with pytest.raises(TypeError, match=r"lengths cannot be read from column 'weight' of type double"):
        resolve_lengths(dataset, "weight")
    with pytest.raises(ValueError, match=r"lengths cannot be read from column 'n': row 1 is null"):
        resolve_lengths(hf.Dataset.from_dict({"n": [1, None, 3]}), "n")


def test_rows_that_are_made_by_a_transform_are_read() -> None:
    dataset = huggingface().with_transform(lambda rows: {"input_ids": [row[::2] for row in rows["input_ids"]]})
    assert scanned(dataset) == [(length + 1) // 2 for length in LENGTHS]
    text = hf.Dataset.from_dict({"text": ["ab", "c"]}).with_transform(lambda rows: {"ids": [[1] * 5, [1] * 6]})
    with pytest.raises(ValueError, match="nor a key of sample 0"):
        scanned(text, "tokens")


def test_a_batch_axis_in_a_column_is_not_taken_for_the_length() -> None:
    dataset = hf.Dataset.from_dict({"input_ids": [[[1, 2, 3]], [[4, 5]]]})
    assert scanned(dataset) == [3, 2]


# --- datasets of datasets ---------------------------------------------------------------------------------------------


def test_a_subset_of_a_subset_needs_no_scan() -> None:
    inner = Subset(Unreadable(lengths=LENGTHS), [9, 3, 3, 50, 7])
    assert known(Subset(inner, [4, 0])) == [LENGTHS[7], LENGTHS[9]]
    assert known(Subset(inner, np.array([3]))) == [LENGTHS[50]]  # type: ignore[arg-type]
    train, _ = torch.utils.data.random_split(huggingface(), [0.7, 0.3])
    assert known(train) == [LENGTHS[index] for index in train.indices]


def test_a_subset_may_leave_out_empty_samples() -> None:
    dataset = Unreadable(4, lengths=[3, 0, 4, 0])
    assert known(Subset(dataset, [0, 2])) == [3, 4]
    assert known(Subset(Unreadable(3, lengths=[3, None, 4]), [0, 2])) == [3, 4]
    with pytest.raises(ValueError, match=r"lengths\[1\] is 0.*a Subset of Unreadable\.lengths"):
        resolve_lengths(Subset(dataset, [0, 1]))


def test_a_concat_dataset_asks_each_part_and_scans_the_others() -> None:
    silent = Counting(tokens, [5, 6])
    dataset = ConcatDataset([huggingface([3, 4]), Unreadable(2, lengths=[8, 9]), Subset(huggingface([1, 2]), [1])])
    assert known(dataset) == [3, 4, 8, 9, 2]
    assert scanned(ConcatDataset([dataset, silent])) == [3, 4, 8, 9, 2, 5, 6]
    assert silent.reads == [0, 1]


def test_a_wrapped_dataset_is_followed_when_its_lengths_are_known() -> None:
    assert known(Wrapper(Wrapper(huggingface()))) == LENGTHS
    assert known(Wrapper(Subset(huggingface(), [2, 1]))) == [LENGTHS[2], LENGTHS[1]]
    assert known(Wrapper(huggingface(text=["abc"] * 100)), "text") == [3] * 100
    assert known(Wrapper(ConcatDataset([huggingface(), huggingface()])), "input_ids") == LENGTHS * 2


def test_a_wrapper_that_makes_the_sequence_is_read_itself() -> None:
    texts = hf.Dataset.from_dict({"text": ["ab", "c"]})
    dataset = Wrapper(texts, lambda row: {"input_ids": [1] * 5 * len(row["text"])})
    assert scanned(dataset) == [10, 5]
    assert scanned(dataset, "input_ids") == [10, 5]
    assert scanned(Wrapper(Subset(texts, [1]), dataset.make), "input_ids") == [5]


def test_a_wrapper_of_another_size_is_not_trusted() -> None:
    dataset = Wrapper(huggingface([3, 4]))
    dataset.__class__ = type(
        "Twice", (Wrapper,), {"__len__": lambda self: 4, "__getitem__": lambda self, i: "x" * (i + 1)}
    )
    assert scanned(dataset) == [1, 2, 3, 4]


def test_a_concat_subclass_that_changes_samples_is_read_itself() -> None:
    class Longer(ConcatDataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) + "!"

    assert scanned(Longer([["a", "bc"], ["d"]])) == [2, 3, 2]  # type: ignore[list-item]


# --- the scan ---------------------------------------------------------------------------------------------------------


def test_a_scan_reads_each_sample_once_in_order_with_python_ints() -> None:
    dataset = Counting(tokens)
    with pytest.warns(UserWarning, match="reading 100 samples one by one.*to avoid this pass `lengths`") as caught:
        found = resolve_lengths(dataset, progress=False)
    assert found.tolist() == LENGTHS
    assert dataset.reads == list(range(100))
    assert {type(index) for index in dataset.reads} == {int}
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.filterwarnings("ignore:reading")
def test_a_scan_shows_one_progress_bar_if_asked(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    resolve_lengths(ConcatDataset([Counting(tokens), Counting(tokens)]), progress=progress)
    error = capfd.readouterr().err
    assert ("Reading lengths: 100%" in error) == progress
    assert ("200/200" in error) == progress


def test_a_key_is_scanned_as_an_integer_or_as_a_sequence() -> None:
    assert scanned(Counting(lambda n: {"x": [0] * n, "y": [0]}), "x") == LENGTHS
    assert scanned(Counting(lambda n: {"size": torch.tensor(n), "x": [1]}), "size") == LENGTHS
    with pytest.raises(ValueError, match=r"lengths='z' is neither an attribute .* sample 0 \(has the keys 'x', 'y'\)"):
        scanned(Counting(lambda n: {"x": n, "y": n}), "z")
    with pytest.raises(ValueError, match=r"lengths='z' is neither .* sample 0 \(has SimpleNamespace\)"):
        scanned(Counting(lambda n: SimpleNamespace(n=n)), "z")
    with pytest.raises(TypeError, match=r"lengths='x' gave 0.5 \(float\) for sample 0"):
        scanned(Counting(lambda n: {"x": 0.5}), "x")


class Batch(NamedTuple):
    input: Any
    target: Any


class Graph:
    """What PyTorch Geometric (attribute) and DGL (method) have in common."""

    def __init__(self, num_nodes: Any) -> None:
        self.num_nodes = num_nodes


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"labels": [1] * 9, "input_ids": [1] * 7, "attention_mask": [1] * 9}, 7),
        ({"input_ids": torch.ones(1, 7), "pixels": torch.ones(3, 9)}, 7),
        ({"input_ids": [[1] * 7]}, 7),
        ({"input_ids": torch.ones(7), "length": torch.tensor(3)}, 3),
        ({"input_ids": torch.ones(7), "length": 0.3}, 7),
        ({"input_features": np.ones((7, 80)), "labels": [1, 2]}, 7),
        ({"input_values": np.ones(7), "labels": [1, 2]}, 7),
        ({"x": np.ones((7, 3)), "y": 1.0, "name": "abc"}, 7),
        ({"text": "abcdefg", "label": 3}, 7),
        (torch.ones(7, 2), 7),
        (torch.ones(1, 7), 1),
        (np.ones(7), 7),
        ([1] * 7, 7),
        ("abcdefg", 7),
        (b"abcdefg", 7),
        ((torch.ones(7), 3), 7),
        (Batch(torch.ones(7), torch.ones(2)), 7),
        (({"input_ids": [1] * 7}, 0), 7),
        ((1, 2, 3, 4, 5, 6, 7), 7),
        (Graph(7), 7),
        (Graph(lambda: 7), 7),
        (Graph(torch.tensor(7)), 7),
    ],
)
def test_the_length_of_a_sample(sample: Any, length: int) -> None:
    assert sample_length(sample) == length


def test_the_length_of_a_tokenizer_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"attention_mask": [1] * 9, "input_ids": [1] * 7})
    assert sample_length(encoding) == 7


@pytest.mark.parametrize(
    ("sample", "sentence"),
    [
        ({"source": [1], "target": [1, 2]}, r"sample 4 has the keys 'source', 'target'; pass `lengths` as"),
        ({"label": 3}, r"sample 4 has the keys 'label'"),
        ({}, r"sample 4 has the keys none"),
        (SimpleNamespace(a=1), r"sample 4 is a SimpleNamespace; pass `lengths`"),
        (3, r"sample 4 is a int"),
        (torch.tensor(3), r"sample 4 is a Tensor"),
        ((3, [1, 2]), r"sample 4 is a tuple of \(int, list\)"),
        ((), r"sample 4 is a tuple of \(\)"),
        (None, r"sample 4 is a NoneType"),
    ],
    ids=repr,
)
def test_a_sample_without_a_length_is_refused_with_the_way_out(sample: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=f"lengths were not found: {sentence}"):
        sample_length(sample, index=4)


def test_a_tensor_dataset_is_scanned_by_its_first_tensor() -> None:
    assert scanned(TensorDataset(torch.ones(4, 7, 2), torch.ones(4))) == [7] * 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), huggingface().to_iterable_dataset()], ids=["torch", "huggingface"])
@pytest.mark.parametrize("lengths", [None, [1, 2, 3], len])
def test_an_iterable_dataset_is_refused_by_name(dataset: Any, lengths: Any) -> None:
    with pytest.raises(
        TypeError, match=r"lengths of an IterableDataset \((Stream|IterableDataset)\).*map-style dataset"
    ):
        resolve_lengths(dataset, lengths)
    with pytest.raises(TypeError, match="IterableDataset"):
        is_scan_needed(dataset, lengths)


def test_what_is_no_single_indexable_dataset_is_refused() -> None:
    with pytest.raises(TypeError, match=r"lengths need a dataset with a length, but len\(generator\) fails"):
        resolve_lengths(x for x in "abc")
    with pytest.raises(
        TypeError, match=r"lengths need one dataset, got a DatasetDict with the entries 'train', 'test'"
    ):
        resolve_lengths(hf.DatasetDict(train=huggingface(), test=huggingface()))
    with pytest.raises(TypeError, match=r"lengths need a dataset with __getitem__, got set"):
        resolve_lengths({1, 2})
    with pytest.raises(ValueError, match=r"lengths is empty"):
        resolve_lengths([], progress=False)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_second_run_reads_only_the_probes(tmp_path: Path) -> None:
    first, second = Counting(tokens), Counting(tokens)
    assert scanned(first, cache_dir=tmp_path / "new" / "folder") == LENGTHS
    assert sorted(first.reads) == list(range(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_lengths(second, cache_dir=tmp_path / "new" / "folder", progress=False).tolist() == LENGTHS
    assert len(second.reads) == 32
    assert {type(index) for index in second.reads} == {int}


def test_the_cache_keeps_lengths_before_clipping(tmp_path: Path) -> None:
    assert max(scanned(Counting(tokens), cache_dir=tmp_path, max_length=5)) == 5
    assert scanned(Counting(tokens), cache_dir=tmp_path) == LENGTHS


class OtherCounting(Counting):
    pass


@pytest.mark.parametrize(
    "other",
    [
        Counting(tokens, [LENGTHS[0] + 1, *LENGTHS[1:]]),
        Counting(tokens, LENGTHS[:99]),
        Subset(Counting(tokens), range(100)),
        Wrapper(Counting(tokens)),
        OtherCounting(tokens),
    ],
    ids=["another length", "another count", "a subset", "a wrapper", "another class"],
)
def test_another_dataset_is_scanned_anew(other: Any, tmp_path: Path) -> None:
    scanned(Counting(tokens), cache_dir=tmp_path)
    with pytest.warns(UserWarning, match="reading"):
        resolve_lengths(other, cache_dir=tmp_path, progress=False)


def test_subsets_with_other_indices_and_other_options_do_not_share_a_file(tmp_path: Path) -> None:
    constant = Counting(tokens, [3] * 60)
    scanned(Subset(constant, list(range(50))), cache_dir=tmp_path)
    scanned(Subset(constant, list(range(10, 60))), cache_dir=tmp_path)
    scanned(constant, "input_ids", cache_dir=tmp_path)
    scanned(constant, lambda sample: len(sample["input_ids"]), cache_dir=tmp_path)
    scanned(constant, lambda sample: len(sample["input_ids"]) + 0, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_huggingface_data_that_differ_between_the_probes_are_told_apart(tmp_path: Path) -> None:
    changed = [*LENGTHS[:1], 59, *LENGTHS[2:]]

    def measure(row: Any) -> int:
        return len(row["input_ids"])

    assert scanned(huggingface(), measure, cache_dir=tmp_path) == LENGTHS
    assert scanned(huggingface(changed), measure, cache_dir=tmp_path) == changed
    assert scanned(Wrapper(huggingface()), measure, cache_dir=tmp_path) == LENGTHS
    assert scanned(Wrapper(huggingface(changed)), measure, cache_dir=tmp_path) == changed


@pytest.mark.filterwarnings("ignore:reading")
@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"not numpy at all"])
def test_a_damaged_file_is_reported_and_replaced(damage: bytes, tmp_path: Path) -> None:
    scanned(Counting(tokens), cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    with pytest.warns(UserWarning, match=r"cannot be read .*measured again"):
        assert resolve_lengths(Counting(tokens), cache_dir=tmp_path, progress=False).tolist() == LENGTHS
    assert np.load(file).tolist() == LENGTHS
    assert list(tmp_path.iterdir()) == [file]


def test_an_unusable_folder_is_noticed_before_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    dataset = Counting(tokens)
    with pytest.raises(OSError, match="file"):
        resolve_lengths(dataset, cache_dir=tmp_path / "file")
    assert dataset.reads == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files, not even from root")
def test_a_folder_that_takes_no_files_is_noticed_before_all_is_read() -> None:
    dataset = Counting(tokens)
    with pytest.raises(OSError, match=r"the folder /proc cannot keep lengths: .*; give another cache folder, or none"):
        resolve_lengths(dataset, cache_dir="/proc", progress=False)
    assert len(dataset.reads) == 32


def test_known_lengths_write_no_cache(tmp_path: Path) -> None:
    known(huggingface(), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


SCAN_WITH_A_FUNCTION = """
import sys
from lightning_balance.lengths import resolve_lengths
reads = []
class Data:
    def __len__(self): return 50
    def __getitem__(self, index): reads.append(index); return "x" * (index + 1)
inner = lambda sample: (lambda: len(sample))()
resolve_lengths(Data(), inner, cache_dir=sys.argv[1], progress=False)
print(len(reads))
"""


def test_the_cache_of_a_callable_holds_in_another_process(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", SCAN_WITH_A_FUNCTION, str(tmp_path)]
    outputs = [
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True) for _ in range(2)
    ]
    assert [output.stdout.strip() for output in outputs] == ["50", "32"]

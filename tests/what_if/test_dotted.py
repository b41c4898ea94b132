"""Lengths behind a dotted path: a dataset, a loader or a data module, its class or a function that makes it."""

from __future__ import annotations

import sys
import textwrap

import pytest

from lightning_balance.what_if.dotted import import_dotted, is_dotted_path, lengths_of_dotted_path
from lightning_balance.what_if.inputs import find_lengths

MODULE = """
import lightning as L
from torch.utils import data as td
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_balance as lb


class Texts(Dataset):
    def __init__(self, texts=("a", "bcd", "ef", "ghij")):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": list(self.texts[index]), "label": 3, "size": 10 + index}


class Known(Texts):
    lengths = (1, 3, 2, 4)

    def __getitem__(self, index):
        raise AssertionError("nobody has to read samples whose lengths are known")


class Data(L.LightningDataModule):
    def __init__(self, batch_size=3):
        super().__init__()
        self.batch_size = batch_size
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        assert self.calls == ["prepare_data", "fit"]
        return DataLoader(Known(), batch_size=self.batch_size, shuffle=True)


class WithLengths(Data):
    lengths = [9, 8, 7, 6]

    def train_dataloader(self):
        return DataLoader(Texts(), batch_size=2)


class TwoLoaders(Data):
    def train_dataloader(self):
        return [DataLoader(Known()), DataLoader(Known())]


class ForPrediction(Data):
    train_dataloader = L.LightningDataModule.train_dataloader


class LikeData:
    def train_dataloader(self):
        return DataLoader(Known())


class Broken(Data):
    def setup(self, stage):
        raise KeyError("no such folder")


class Needy(Texts):
    def __init__(self, folder, *, size):
        super().__init__()


class Stream(IterableDataset):
    def __iter__(self):
        return iter("abc")


def make_dataset():
    return Known()


def make_datamodule(batch_size=5):
    return Data(batch_size)


def make_loader():
    return DataLoader(Known(), batch_size=7)


def make_batch_sampler():
    return DataLoader(Known(), batch_sampler=td.BatchSampler(td.SequentialSampler(Known()), 3, drop_last=True))


def make_balanced():
    sampler = lb.BalancedBatchSampler([2, 2, 5, 2], batch_size=2, shuffle=False, drop_last=True)
    return DataLoader(Known(), batch_sampler=sampler)


def make_unbatched():
    return DataLoader(Texts(), batch_size=None)


def make_own_sampler():
    return DataLoader(Texts(), sampler=[3, 0])


def make_stream_loader():
    return DataLoader(Stream())


class Endless(Dataset):
    def __getitem__(self, index):
        return [index]


def make_endless_loader():
    return DataLoader(Endless())


def make_from_datasets():
    return L.LightningDataModule.from_datasets(Known(), batch_size=2)


def make_needy(folder):
    return Known()


def make_number():
    return 3


dataset, datamodule, texts = Known(), Data(batch_size=4), ["a", "bcd", "ef", "ghij"]


class Space:
    Inner = Known
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with a package `my_project`, which is the current one."""
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "__init__.py").write_text("")
    (tmp_path / "my_project" / "data.py").write_text(MODULE)
    (tmp_path / "my_project" / "needs.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_project"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        ("Known", None),
        ("dataset", None),
        ("make_dataset", None),
        ("Space.Inner", None),
        ("Data", 3),
        ("datamodule", 4),
        ("make_datamodule", 5),
        ("make_loader", 7),
    ],
)
@pytest.mark.parametrize("separator", [".", ":"])
def test_lengths_are_found_behind(name, batch_size, separator) -> None:
    found = find_lengths(f"my_project.data{separator}{name}")
    assert found.lengths.tolist() == [1, 3, 2, 4]
    assert found.batch_size == batch_size


def test_samples_are_read_where_nothing_tells_their_lengths() -> None:
    with pytest.warns(UserWarning, match="reading 4 samples one by one"):
        found = lengths_of_dotted_path("my_project.data.Texts", progress=False)
    assert found.lengths.tolist() == [1, 3, 2, 4]
    with pytest.warns(UserWarning, match="reading 4 samples one by one"):
        assert lengths_of_dotted_path("my_project.data.texts", progress=False).lengths.tolist() == [1, 3, 2, 4]


def test_a_column_is_a_key_of_the_samples() -> None:
    with pytest.warns(UserWarning, match="one by one"):
        found = lengths_of_dotted_path("my_project.data.Texts", "size", progress=False)
    assert found.lengths.tolist() == [10, 11, 12, 13]


def test_a_data_module_may_know_the_lengths() -> None:
    found = lengths_of_dotted_path("my_project.data.WithLengths")
    assert (found.lengths.tolist(), found.batch_size) == ([9, 8, 7, 6], 2)
    assert (found.shuffle, found.drop_last) == (False, False)


def test_a_batch_sampler_says_what_is_planned_as_it_does_in_training() -> None:
    found = lengths_of_dotted_path("my_project.data.make_batch_sampler")
    assert (found.lengths.tolist(), found.batch_size) == ([1, 3, 2, 4], 3)
    assert (found.shuffle, found.drop_last) == (False, True)


def test_a_balanced_sampler_of_the_user_s_own_brings_lengths_and_order() -> None:
    found = lengths_of_dotted_path("my_project.data.make_balanced")
    assert (found.lengths.tolist(), found.batch_size) == ([2, 2, 5, 2], 2)
    assert (found.shuffle, found.drop_last) == (False, True)


def test_a_training_loader_may_be_set_on_the_data_module_itself() -> None:
    assert lengths_of_dotted_path("my_project.data.make_from_datasets").batch_size == 2


def test_the_demo_is_found() -> None:
    assert import_dotted("lightning_balance.demo.FunctionsDataModule").__name__ == "FunctionsDataModule"


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("my_project.data.Dataa", ValueError, "my_project.data has no 'Dataa'; it has Broken, Data, "),
        ("my_project.data.Space.Outer", ValueError, "my_project.data.Space has no 'Outer'; it has Inner"),
        ("my_project.data", ValueError, "'my_project.data' is a module: name a dataset or data module in it"),
        ("my_project.nothing.Data", ValueError, "my_project has no 'nothing'"),
        ("no_project.data.Data", ImportError, "'no_project.data.Data' is neither a file nor a module"),
        ("my_project.data.Needy", TypeError, "called without arguments, but it needs folder, size: give a function"),
        ("my_project.data.make_needy", TypeError, "called without arguments, but it needs folder"),
        ("my_project.data.make_number", TypeError, "must be a dataset, a DataLoader or a LightningDataModule"),
        ("my_project.data.TwoLoaders", TypeError, "train_dataloader() must return one torch.utils.data.DataLoader"),
        ("my_project.data.ForPrediction", TypeError, "a ForPrediction without train_dataloader, which training"),
        ("my_project.data.LikeData", TypeError, "is a LikeData without prepare_data, setup, which training calls"),
        ("my_project.data.Stream", TypeError, "IterableDataset (Stream)"),
        ("my_project.data.make_stream_loader", TypeError, "BalanceCallback cannot balance the IterableDataset Stream"),
        ("my_project.data.make_endless_loader", TypeError, "need a dataset with a length, but len(Endless) fails"),
        ("my_project.data.make_unbatched", ValueError, "the training DataLoader has batch_size=None"),
        ("my_project.data.make_own_sampler", TypeError, "the training DataLoader has the sampler list"),
    ],
)
def test_a_mistake_is_one_sentence(path, error, sentence) -> None:
    with pytest.raises(error) as caught:
        find_lengths(path)
    assert sentence in str(caught.value)


def test_a_library_that_the_user_s_module_misses_is_named_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        find_lengths("my_project.needs.Data")


def test_what_the_user_s_code_raises_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"Broken\.setup\(\) raised KeyError: 'no such folder'") as caught:
        find_lengths("my_project.data.Broken")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("text", ["nothing", "some/folder", "data.xyz/x", "1a.b", "a..b", ""])
def test_what_is_neither_a_file_nor_a_path_is_said_to_be_so(text) -> None:
    assert not is_dotted_path(text)
    with pytest.raises(
        ValueError, match=r"LENGTHS must be a file .* or a dotted path such as my_project\.data\.MyData"
    ):
        find_lengths(text or "nothing")


def test_a_file_that_exists_is_a_file_whatever_its_name(tmp_path) -> None:
    (tmp_path / "my.lengths").write_text(textwrap.dedent("1 2 3"))
    with pytest.raises(ValueError, match=r"LENGTHS must be one of .*, got 'my\.lengths'"):
        find_lengths("my.lengths")

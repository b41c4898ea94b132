"""Lengths of a dataset or data module that a dotted path names."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FoundLengths", "import_dotted", "is_dotted_path", "lengths_of_dotted_path"]

_DOTTED = re.compile(r"[^\W\d]\w*([.:][^\W\d]\w*)+")


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLengths:
    """Lengths, and what the loader that they were found behind, if there was one, says about batches and order."""

    lengths: NDArray[np.int64]
    batch_size: int | None = None
    shuffle: bool = True
    drop_last: bool = False


def is_dotted_path(text: str) -> bool:
    """Return whether a text looks like ``package.module.name`` or ``package.module:name``.

    Example:
        >>> is_dotted_path("my_project.data.MyData"), is_dotted_path("../data.json")
        (True, False)
    """
    return _DOTTED.fullmatch(text) is not None


def lengths_of_dotted_path(text: str, column: str | None = None, *, progress: bool = True) -> FoundLengths:
    """Find the lengths of a dataset, a DataLoader or a LightningDataModule, as ``BalanceCallback`` would.

    The path names one of them, its class, or a function that returns it; classes and functions are called without
    arguments. A data module is prepared and set up for ``fit``, and its training loader is asked for. A loader that the
    callback would refuse is refused.

    Args:
        text: the dotted path; the current folder is searched too.
        column: attribute, column or key that holds lengths; ``None``: found.
        progress: show a progress bar where samples have to be read.

    Raises:
        ImportError: there is no such module.
        RuntimeError: the user's code raised something, which is the cause.
        TypeError: it needs arguments, or is none of these; its loader cannot be balanced; or no lengths can be found.
        ValueError: the module has no such name, the loader no batch size, or lengths that cannot be.
    """
    value = import_dotted(text)
    if inspect.isclass(value) or inspect.isroutine(value):
        _check_no_arguments(value, text)
        value = _call(text, value)
    # Not before: it loads torch.
    from torch.utils.data import DataLoader

    from lightning_balance.lengths import resolve_lengths
    from lightning_balance.loaders import check_loader, read_order
    from lightning_balance.sampler import BalancedBatchSampler

    datamodule = value if hasattr(value, "train_dataloader") else None
    if datamodule is not None:
        _check_data_module(datamodule, text)
        _call(f"{text}.prepare_data", datamodule.prepare_data)
        _call(f"{text}.setup", lambda: datamodule.setup("fit"))
        value = _call(f"{text}.train_dataloader", datamodule.train_dataloader)
        if not isinstance(value, DataLoader):
            raise TypeError(
                f"{text}.train_dataloader() must return one torch.utils.data.DataLoader, got a "
                f"{type(value).__name__}: give a function that returns one of its datasets"
            )
    loader = check_loader(value) if isinstance(value, DataLoader) else None
    if loader is not None and isinstance(own := loader.batch_sampler, BalancedBatchSampler):
        return FoundLengths(
            lengths=own.lengths, batch_size=own.batch_size, shuffle=own.shuffle, drop_last=own.drop_last
        )
    dataset = value if loader is None else loader.dataset
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"{text} must be a dataset, a DataLoader or a LightningDataModule, or make one, got a "
            f"{type(dataset).__name__}"
        )
    order = {} if loader is None else asdict(read_order(loader))
    return FoundLengths(lengths=resolve_lengths(dataset, column, datamodule=datamodule, progress=progress), **order)


def _check_data_module(datamodule: Any, text: str) -> None:
    from lightning.pytorch import LightningDataModule

    missing = [name for name in ("prepare_data", "setup") if not hasattr(datamodule, name)]
    if getattr(datamodule.train_dataloader, "__func__", None) is LightningDataModule.train_dataloader:
        missing.append("train_dataloader")  # Lightning's own only raises
    if missing:
        raise TypeError(
            f"{text} is a {type(datamodule).__name__} without {', '.join(missing)}, which training calls: define what "
            "is missing in a LightningDataModule, or name a dataset"
        )


def import_dotted(text: str) -> Any:
    """Return what ``package.module.name`` or ``package.module:name`` names; the current folder is searched too.

    Raises:
        ImportError: there is no such module; one that a found module misses is its own error.
        ValueError: the module has no such name; the sentence lists what it has.

    Example:
        >>> import_dotted("json.decoder.JSONDecoder").__name__
        'JSONDecoder'
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does; the installed command does not
    words = text.replace(":", ".").split(".")
    for size in range(len(words), 0, -1):
        name = ".".join(words[:size])
        try:
            value = importlib.import_module(name)
        except ModuleNotFoundError as error:
            is_ours = error.name is not None and (name == error.name or name.startswith(f"{error.name}."))
            if not is_ours:
                raise
            continue
        return _attribute(value, words[size:], name)
    raise ImportError(
        f"LENGTHS={text!r} is neither a file nor a module that can be imported: there is no module {words[0]!r} here "
        "or among the installed packages"
    )


def _attribute(value: Any, names: list[str], so_far: str) -> Any:
    if not names:
        raise ValueError(f"LENGTHS={so_far!r} is a module: name a dataset or data module in it, as {so_far}.MyData")
    for name in names:
        if not hasattr(value, name):
            known = [other for other in dir(value) if not other.startswith("_")][:12]
            raise ValueError(f"LENGTHS: {so_far} has no {name!r}; it has {', '.join(known) or 'no public names'}")
        value, so_far = getattr(value, name), f"{so_far}.{name}"
    return value


def _call(name: str, function: Callable[[], Any]) -> Any:
    """Call the user's code; what it raises is no mistake on the command line, and its traceback is worth seeing."""
    try:
        return function()
    except Exception as error:
        raise RuntimeError(f"{name}() raised {type(error).__name__}: {error}") from error


def _check_no_arguments(function: Any, text: str) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # builtins may have no signature
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if needed:
        raise TypeError(
            f"LENGTHS={text!r} is called without arguments, but it needs {', '.join(needed)}: give a function without "
            "arguments that returns it"
        )

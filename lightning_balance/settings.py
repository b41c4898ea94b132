"""The options of balancing, checked once, shared by the callback and the data module mixin (layer 0)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, cast

import numpy as np

from lightning_balance.calibration.file import is_cost_path, read_cost_file
from lightning_balance.cost import CostFunction, CostModel
from lightning_balance.validation import check_choice, check_positive_int

LossReduction = Literal["sample_mean", "token_mean", "causal_token_mean", "sum"]
Sync = Literal["auto", "micro_batch", "step"]
PlannedSync = Literal["micro_batch", "step"]
MaxTokens = int | Literal["auto"] | None
Oversize = Literal["single", "error", "skip"]
StepUnit = Literal["samples", "tokens"]
Stage = Literal["fit", "validate", "test", "predict"]

LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("sample_mean", "token_mean", "causal_token_mean", "sum")
SYNCS: tuple[Sync, ...] = ("auto", "micro_batch", "step")
OVERSIZE: tuple[Oversize, ...] = ("single", "error", "skip")
DEFAULT_MEMORY_FRACTION = 0.9
STEP_UNITS: tuple[StepUnit, ...] = ("samples", "tokens")
STAGES: tuple[Stage, ...] = ("fit", "validate", "test", "predict")

_reads_cost_files: ContextVar[bool] = ContextVar("_reads_cost_files", default=True)


@dataclass(frozen=True, kw_only=True, eq=False)  # arrays among the values: compare by differing_options
class BalanceSettings:
    """What a user can choose about balancing; the meaning of each option stands at :class:`BalanceCallback`.

    Raises:
        ValueError: an option is out of its range.
        TypeError: an option has the wrong type.

    Example:
        >>> BalanceSettings(max_tokens=8192).max_tokens
        8192
        >>> BalanceSettings(max_tokens=0)
        Traceback (most recent call last):
            ...
        ValueError: max_tokens must be an integer >= 1, got 0
    """

    max_tokens: MaxTokens = None
    samples_per_step: int | None = None
    lengths: Sequence[int] | str | Callable[[Any], int] | None = None
    max_length: int | None = None
    pad_to_multiple_of: int = 1
    cost: CostFunction | CostModel | Literal["auto"] = field(default_factory=CostModel)
    oversize: Oversize = "single"
    loss_reduction: LossReduction | Callable[[Any], Any] = "sample_mean"
    seed: int | None = None
    sync: Sync = "auto"
    step_unit: StepUnit = "samples"
    lookahead: int = 1
    max_shapes: int | None = None
    label_key: str = "labels"
    ignore_index: int = -100
    lengths_cache_dir: str | None = None
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    memory_limit_gib: float | None = None
    stages: Sequence[Stage] = ("fit",)
    eval_max_tokens: int | None = None
    print_summary: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_tokens == "auto":
            check_memory(self.memory_fraction, self.memory_limit_gib)
        elif (self.memory_fraction, self.memory_limit_gib) != (DEFAULT_MEMORY_FRACTION, None):
            raise ValueError(
                f"memory_fraction and memory_limit_gib bound the search of max_tokens='auto', but max_tokens is"
                f" {self.max_tokens!r}: leave them out"
            )
        optional = ("samples_per_step", "max_length", "max_shapes", "eval_max_tokens")
        numbers = [name for name in optional if getattr(self, name) is not None]
        if self.max_tokens not in (None, "auto"):
            numbers.append("max_tokens")
        for name in (*numbers, "pad_to_multiple_of", "lookahead"):
            object.__setattr__(self, name, check_positive_int(name, getattr(self, name)))  # Python's own integers
        object.__setattr__(self, "ignore_index", int(self.ignore_index))
        check_choice("oversize", self.oversize, OVERSIZE)
        check_choice("sync", self.sync, SYNCS)
        check_choice("step_unit", self.step_unit, STEP_UNITS)
        object.__setattr__(self, "stages", _check_stages(self.stages))
        if self.eval_max_tokens is not None and self.stages == ("fit",):
            raise ValueError(
                f"eval_max_tokens={self.eval_max_tokens} is the budget of validate, test and predict, but stages is"
                " ('fit',): add them to stages, or leave it out"
            )
        if self.step_unit == "tokens" and self.max_tokens is None:
            raise ValueError("step_unit='tokens' fills micro-batches to a budget and needs max_tokens, which is None")
        if self.step_unit == "tokens" and self.samples_per_step is not None:
            raise ValueError(
                f"samples_per_step={self.samples_per_step} sets the step by samples, step_unit='tokens' by the"
                f" budget: give"
                " one of them"
            )
        object.__setattr__(self, "loss_reduction", _resolve_loss_reduction(self.loss_reduction))
        object.__setattr__(self, "cost", _resolve_cost(self.cost))
        if self.seed is not None:
            object.__setattr__(self, "seed", _check_seed(self.seed))

    def _check_types(self) -> None:
        """Refuse values that the checks of ranges could not read, or that Python would take for something else."""
        if not _is_number(self.ignore_index, Integral):
            raise TypeError(f"ignore_index must be an integer, got {_typed(self.ignore_index)}")
        if not isinstance(self.label_key, str):
            raise TypeError(f"label_key must be a string, the key of a batch's labels, got {_typed(self.label_key)}")
        if not isinstance(self.print_summary, (bool, np.bool_)):
            raise TypeError(f"print_summary must be True or False, got {_typed(self.print_summary)}")
        if self.lengths_cache_dir is not None and not isinstance(self.lengths_cache_dir, (str, os.PathLike)):
            raise TypeError(
                f"lengths_cache_dir must be the path of a folder, or None, got {_typed(self.lengths_cache_dir)}"
            )

    def differing_options(self, other: BalanceSettings) -> list[str]:
        """Names of the options whose values are not equal.

        Example:
            >>> BalanceSettings(max_tokens=8).differing_options(BalanceSettings(seed=1))
            ['max_tokens', 'seed']
        """
        return [f.name for f in fields(self) if not _is_equal(getattr(self, f.name), getattr(other, f.name))]


OPTION_NAMES = tuple(f.name for f in fields(BalanceSettings))
OPTIONS_OF_WEIGHTS_AND_OUTPUT = frozenset(
    {"loss_reduction", "label_key", "ignore_index", "print_summary", "stages", "eval_max_tokens"}
)
"""Options that do not decide where training samples go."""


class HasBalanceSettings:
    """Takes the options of balancing as keyword arguments; base of the callback and of the data module mixin.

    Attributes:
        settings: the options, checked.
    """

    def __init__(
        self,
        *,
        max_tokens: MaxTokens = None,
        samples_per_step: int | None = None,
        lengths: Callable[[Any], int] | str | Sequence[int] | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
        cost: CostModel | CostFunction | str | None = None,
        oversize: Oversize = "single",
        loss_reduction: LossReduction | Callable[[Any], Any] | str = "sample_mean",
        seed: int | None = None,
        sync: Sync = "auto",
        step_unit: StepUnit = "samples",
        lookahead: int = 1,
        max_shapes: int | None = None,
        label_key: str = "labels",
        ignore_index: int = -100,
        lengths_cache_dir: str | None = None,
        memory_fraction: float = DEFAULT_MEMORY_FRACTION,
        memory_limit_gib: float | None = None,
        stages: Sequence[Stage] = ("fit",),
        eval_max_tokens: int | None = None,
        print_summary: bool = True,
    ) -> None:
        super().__init__()
        settings = BalanceSettings(
            max_tokens=max_tokens,
            samples_per_step=samples_per_step,
            lengths=lengths,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            cost=CostModel() if cost is None else cost,  # type: ignore[arg-type]  # strings are resolved by the settings
            oversize=oversize,
            loss_reduction=loss_reduction,  # type: ignore[arg-type]
            seed=seed,
            sync=sync,
            step_unit=step_unit,
            lookahead=lookahead,
            max_shapes=max_shapes,
            label_key=label_key,
            ignore_index=ignore_index,
            lengths_cache_dir=lengths_cache_dir,
            memory_fraction=memory_fraction,
            memory_limit_gib=memory_limit_gib,
            stages=stages,
            eval_max_tokens=eval_max_tokens,
            print_summary=print_summary,
        )
        self.settings = self._accept(settings)

    def _accept(self, settings: BalanceSettings) -> BalanceSettings:
        return settings


def describe(value: Any) -> int | float | str | None:
    """A plain value for an option, to compare across processes and checkpoints; functions are known by their name.

    Example:
        >>> describe(8192), describe(CostModel()), describe(max)
        (8192, 'CostModel(intercept=0.0, alpha=0.001)', 'max')
    """
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, CostModel):
        return repr(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def import_callable(path: str, argument: str) -> Callable[..., Any]:
    """Import the function that a dotted path names, as YAML files give it.

    Raises:
        ValueError: nothing callable is there; the sentence names ``argument`` and ``path``.

    Example:
        >>> import_callable("os.path.basename", "lengths")("a/b")
        'b'
    """
    module_name, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(
            f"{argument}={path!r} is not an importable function: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ValueError(f"{argument}={path!r} must name a function, but it is a {type(found).__name__}")
    return cast("Callable[..., Any]", found)


def _is_equal(one: Any, other: Any) -> bool:
    if hasattr(one, "__array__") or hasattr(other, "__array__"):
        return one is other or np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)


def check_memory(fraction: float, limit_gib: float | None) -> None:
    """Check the share and the limit of memory that a search for ``max_tokens`` may use.

    Raises:
        TypeError: one is no number.
        ValueError: one is out of its range.

    Example:
        >>> check_memory(0.9, None)
    """
    if not _is_number(fraction, Real):
        raise TypeError(f"memory_fraction must be a number above 0 and at most 1, got {_typed(fraction)}")
    if limit_gib is not None and not _is_number(limit_gib, Real):
        raise TypeError(f"memory_limit_gib must be a finite number above 0, or None, got {_typed(limit_gib)}")
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction must be above 0 and at most 1, got {fraction!r}")
    if limit_gib is not None and not 0 < limit_gib < inf:
        raise ValueError(f"memory_limit_gib must be a finite number above 0, or None, got {limit_gib!r}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, (bool, np.bool_))


def _typed(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _check_seed(seed: Any) -> int:
    if not _is_number(seed, Integral) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0 or None (take it from seed_everything), got {seed!r}")
    return int(seed)


def _check_stages(stages: Any) -> tuple[Stage, ...]:
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise ValueError(f"stages must be a list of some of {', '.join(map(repr, STAGES))}, got {stages!r}")
    for stage in stages:
        check_choice("every entry of stages", stage, STAGES)
    return tuple(stage for stage in STAGES if stage in stages)


def _resolve_loss_reduction(value: Any) -> Any:
    if callable(value) or (isinstance(value, str) and value in LOSS_REDUCTIONS):
        return value
    if isinstance(value, str) and "." in value:
        return import_callable(value, "loss_reduction")
    raise ValueError(
        f"loss_reduction must be one of {', '.join(map(repr, LOSS_REDUCTIONS))}, a function batch -> units, or the"
        f" dotted path of one, got {value!r}"
    )


@contextmanager
def without_cost_files() -> Iterator[None]:
    """Settings made inside take the default cost where a file is named, whether it exists or not."""
    token = _reads_cost_files.set(False)
    try:
        yield
    finally:
        _reads_cost_files.reset(token)


def _resolve_cost(value: Any) -> Any:
    if callable(value) or value == "auto":
        return value
    if isinstance(value, (str, os.PathLike)) and is_cost_path(value):
        return read_cost_file(value) if _reads_cost_files.get() else CostModel()
    if isinstance(value, str) and "." in value:
        return import_callable(value, "cost")
    raise TypeError(
        "cost must be a CostModel, a function (num_samples, padded_length) -> cost, the dotted path of one, a .yaml"
        f" file of lightning-balance calibrate, or 'auto', got {value!r}"
    )

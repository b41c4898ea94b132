"""Ranks that must agree: one error on all of them instead of a hang; and the end of their process group (layer 1).

A rank that fails alone leaves the others waiting in their next collective until a timeout hides the reason. Whatever
may fail on one rank only (its data, its seed, its settings) goes through :func:`on_every_rank`; what must be equal goes
through :func:`check_equal_on_ranks`.
"""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

MAX_RANKS_NAMED = 8
"""An error names so many of the ranks that have one value, and counts the others."""
_LAST_RELEASES_S = 0.1
"""Far longer than the threads of an idle group need to let go of what they hold."""


def has_process_group() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def end_process_group() -> None:
    """End the process group of this process, if it has one, while the interpreter is alive.

    A process with a gloo group may abort when its interpreter ends, with "terminate called without an active
    exception" and SIGABRT, however well its work went: gloo's threads let go of the tensors of the last collectives a
    moment later than the caller, and cannot do that in an interpreter that ends (pytorch/pytorch#190489). Lightning
    ends NCCL's groups at exit, but not gloo's. To be called when no rank needs the group any more.

    Example:
        >>> end_process_group()
    """
    if has_process_group():
        dist.destroy_process_group()
        time.sleep(_LAST_RELEASES_S)  # what still refers to a group, such as FSDP2's caches, keeps its threads


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """``value`` of every rank (of a group), in rank order; ``[value]`` without a process group. A collective call."""
    if not has_process_group():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_every_rank(attempt: Callable[[], Result]) -> Result:
    """Run ``attempt`` on every rank; if it fails on any, raise on all. A collective call.

    Raises:
        Exception: the rank's own error where it failed; elsewhere an error of the same built-in type (otherwise a
            ``RuntimeError``) that names the rank and repeats its sentence.

    Example:
        >>> on_every_rank(lambda: 1 + 1)
        2
    """
    result: Result
    own_error: Exception | None = None
    try:
        result = attempt()
    except Exception as error:  # noqa: BLE001 - every kind, raised again below once the other ranks know
        own_error = error
    report = None if own_error is None else (type(own_error).__name__, str(own_error))
    reports = gather_objects(report)
    if own_error is not None:
        raise own_error
    for rank, failed in enumerate(reports):
        if failed is not None:
            raise _same_kind(failed[0], f"rank {rank} failed: {failed[1]}")
    return result


def from_rank_zero(compute: Callable[[], Result]) -> Result:
    """Run ``compute`` on rank 0 only and hand its result, or its error, to every rank. A collective call.

    Example:
        >>> from_rank_zero(lambda: "scanned once")
        'scanned once'
    """
    is_distributed = has_process_group()
    result = on_every_rank(compute if not is_distributed or dist.get_rank() == 0 else lambda: None)
    if not is_distributed:
        return result  # type: ignore[return-value]  # rank 0 computed it
    holder: list[Any] = [result]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]  # type: ignore[no-any-return]


def check_equal_on_ranks(values: Mapping[str, Any], way_out: str) -> None:
    """Compare named values across ranks. A collective call.

    Args:
        values: small printable values, the same names on every rank.
        way_out: the end of the error sentence, what to do.

    Raises:
        ValueError: on every rank, when some rank differs from rank 0; names what differs, both values, and which ranks
            have them.

    Example:
        >>> check_equal_on_ranks({"seed": 0}, "call seed_everything with one seed")
    """
    difference = find_difference(gather_objects(dict(values)))
    if difference is not None:
        raise ValueError(f"{difference}; {way_out}")


def find_difference(values_of_ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what differs first between ranks, and which ranks have what; None where all are equal.

    Example:
        >>> find_difference([{"seed": 1}, {"seed": 1}, {"seed": 2}])
        'seed differs between ranks: ranks 0 and 1 have 1, rank 2 has 2'
    """
    for name, expected in values_of_ranks[0].items():
        found = [values.get(name) for values in values_of_ranks]
        others = [value for value in found if value != expected]
        if others:
            claims = [_who_has(value, [other == value for other in found]) for value in (expected, others[0])]
            return f"{name} differs between ranks: {', '.join(claims)}"
    return None


def _who_has(value: Any, is_theirs: list[bool]) -> str:
    ranks = [str(rank) for rank, theirs in enumerate(is_theirs) if theirs]
    if len(ranks) == 1:
        return f"rank {ranks[0]} has {value!r}"
    named = ranks[:MAX_RANKS_NAMED] + ([f"{len(ranks) - MAX_RANKS_NAMED} more"] if len(ranks) > MAX_RANKS_NAMED else [])
    return f"ranks {', '.join(named[:-1])} and {named[-1]} have {value!r}"


def _same_kind(name: str, sentence: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a kind that takes other arguments, such as UnicodeDecodeError
            return kind(sentence)
    return RuntimeError(sentence)

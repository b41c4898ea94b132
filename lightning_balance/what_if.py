"""`lightning-balance plan`: what balancing would do for the lengths in a file, without training or torch."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_balance.console import comparison_cells, print_table
from lightning_balance.cost import CostModel
from lightning_balance.epoch import plan_epoch
from lightning_balance.report import PlanSummary, comparison_rows, summarize, summarize_plain
from lightning_balance.validation import check_positive_int, validate_lengths

Lengths = npt.NDArray[np.int64]

_DESCRIPTION = """\
Compare one epoch of plain shuffled batches with the same epoch balanced: with the same number of micro-batches per
optimizer step ("rebalance"), and with as many as a budget of padded tokens needs ("token budget"). All three have the
same samples in every optimizer step unless --lookahead is above 1; then the table also says how much the number of
samples per step varies, how far samples move from their step of the plain shuffle, and how alike lengths in a step are
(0 % for random steps, 100 % for steps of one length each). Times are in the unit of the cost model,
intercept + n * L + alpha * n * L**2 for n samples padded to L tokens.
"""


def run_plan_command(words: Sequence[str]) -> None:
    """Parse the command's words, plan, and print the table; mistakes end the process with one sentence."""
    parser = _parser()
    options = parser.parse_args(words)
    try:
        lengths = read_lengths(options.lengths)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    try:
        if options.max_length is not None:
            lengths = np.minimum(lengths, check_positive_int("max_length", options.max_length))
        summaries = compare(
            lengths,
            batch_size=options.batch_size,
            num_ranks=options.num_ranks,
            num_slots=options.num_slots,
            max_tokens=options.max_tokens,
            cost=CostModel(intercept=options.intercept, alpha=options.alpha),
            sync=options.sync,
            pad_to_multiple_of=options.pad_to_multiple_of,
            lookahead=options.lookahead,
            seed=options.seed,
            epoch=options.epoch,
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, mean {lengths.mean():,.1f}")
    title = f"{options.num_ranks} ranks x {options.num_slots} slots x {options.batch_size} samples, sync {options.sync}"
    print_table(title, ["", *summaries], _cells(list(summaries.values()), options.lookahead > 1))


def read_lengths(path: Path) -> Lengths:
    """Read lengths from a `.json` file (a list, or an object with the key `lengths`), a `.npy` or a `.txt` file.

    Raises:
        OSError: the file cannot be read.
        ValueError: another kind of file, or not lengths.
    """
    readers = {".json": _read_json, ".npy": _read_npy, ".txt": _read_txt}
    if path.suffix not in readers:
        raise ValueError(f"LENGTHS must be a .json, .npy or .txt file, got {str(path)!r}")
    return validate_lengths(readers[path.suffix](path))


def compare(
    lengths: Lengths,
    *,
    batch_size: int,
    num_ranks: int,
    num_slots: int,
    max_tokens: int | None,
    cost: CostModel,
    sync: Literal["micro_batch", "step"],
    pad_to_multiple_of: int = 1,
    lookahead: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> dict[str, PlanSummary]:
    """Summarise plain, rebalanced and budgeted batches of the same epoch, by the head of their column, plain first.

    Without `max_tokens` the budget is `batch_size` samples of mean length, or the longest sample where that is more.

    Example:
        >>> summaries = compare(
        ...     np.array([3, 5, 9, 2] * 8), batch_size=2, num_ranks=2, num_slots=2, max_tokens=None,
        ...     cost=CostModel(), sync="step",
        ... )
        >>> list(summaries)
        ['plain', 'rebalance', 'token budget 10']
    """
    plain = summarize_plain(
        lengths,
        batch_size=batch_size,
        num_ranks=num_ranks,
        num_slots=num_slots,
        cost=cost,
        sync=sync,
        seed=seed,
        epoch=epoch,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    if max_tokens is None:
        longest = -(-int(lengths.max()) // pad_to_multiple_of) * pad_to_multiple_of
        max_tokens = max(longest, math.ceil(batch_size * lengths.mean()))

    def planned(*, fixed_slots: int | None = None, budget: int | None = None) -> PlanSummary:
        plan = plan_epoch(
            lengths,
            samples_per_step=batch_size * num_slots * num_ranks,
            num_ranks=num_ranks,
            num_slots=fixed_slots,
            max_tokens=budget,
            seed=seed,
            epoch=epoch,
            cost=cost,
            sync=sync,
            pad_to_multiple_of=pad_to_multiple_of,
            lookahead=lookahead,
        )
        return summarize(plan, lengths, cost=cost, sync=sync)

    return {
        "plain": plain,
        "rebalance": planned(fixed_slots=num_slots),
        f"token budget {max_tokens:,}": planned(budget=max_tokens),
    }


def _cells(summaries: Sequence[PlanSummary], with_randomness: bool) -> list[list[str]]:
    """One row a figure, its label and its value in each summary; the first summary is the plain one."""
    plain = summaries[0]
    columns = [
        comparison_cells(comparison_rows(summary, plain, with_randomness=with_randomness)) for summary in summaries
    ]
    return [[row[0][0], *(cell[1] for cell in row)] for row in zip(*columns, strict=True)]


def _read_json(path: Path) -> Any:
    content = json.loads(path.read_text())
    if isinstance(content, dict):
        if "lengths" not in content:
            raise ValueError(
                f"{str(path)!r} must hold a list, or an object with the key 'lengths', got keys {sorted(content)}"
            )
        return content["lengths"]
    return content


def _read_npy(path: Path) -> Any:
    return np.load(path, allow_pickle=False)


def _read_txt(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must hold whole numbers between spaces or line ends: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-balance plan", description=_DESCRIPTION, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "lengths", metavar="LENGTHS", type=Path, help="file with the samples' lengths: .json, .npy or .txt"
    )
    add = parser.add_argument
    add("--batch-size", "--batch_size", dest="batch_size", type=int, default=8, help="samples of a plain micro-batch")
    add("--ranks", "--num_ranks", dest="num_ranks", type=int, default=8, help="data-parallel ranks")
    add(
        "--accumulate",
        "--num_slots",
        dest="num_slots",
        type=int,
        default=1,
        help="micro-batches per rank and optimizer step (accumulate_grad_batches)",
    )
    add(
        "--max-tokens",
        "--max_tokens",
        dest="max_tokens",
        type=int,
        help="budget of padded tokens per micro-batch; None: batch_size mean lengths, at least the longest",
    )
    add(
        "--max-length",
        "--max_length",
        dest="max_length",
        type=int,
        help="clip lengths to this, as the collator truncates",
    )
    add(
        "--pad-to-multiple-of",
        "--pad_to_multiple_of",
        dest="pad_to_multiple_of",
        type=int,
        default=1,
        help="padded lengths are multiples of this",
    )
    add(
        "--sync",
        choices=("micro_batch", "step"),
        default="micro_batch",
        help="when ranks wait for each other: FSDP, DDP",
    )
    add("--lookahead", type=int, default=1, help="consecutive optimizer steps that may exchange samples")
    add("--intercept", type=float, default=0.0, help="cost of a micro-batch before its first token")
    add("--alpha", type=float, default=0.001, help="weight of the quadratic part of the cost (attention)")
    add("--seed", type=int, default=0, help="seed of the shuffle")
    add("--epoch", type=int, default=0, help="number of the epoch")
    return parser

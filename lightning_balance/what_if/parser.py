"""The words of `lightning-balance plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_balance.what_if.files import SUFFIXES
from lightning_balance.what_if.options import SYNC_NAMES

__all__ = ["make_parser"]

_DESCRIPTION = f"""\
Compare what plain shuffled batches, length-grouped batches and balanced ones would come to in one epoch, without
training: padding, waiting, modelled time, the largest micro-batch. Balanced means "rebalance", the same number of
micro-batches per optimizer step as before, and "token budget", as many as a budget of padded tokens needs; both keep
the samples of every step unless neighbouring steps may exchange some ("lookahead").

LENGTHS is a file ({", ".join(SUFFIXES)}) or a dotted path to a dataset, a DataLoader or a
LightningDataModule, its class or a function that returns it.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="lightning-balance plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lengths", metavar="LENGTHS", help="file or dotted path, see above")
    _add_run(parser)
    _add_lengths(parser)
    _add_cost(parser)
    _add_work(parser)
    _add_outputs(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the run").add_argument
    add("--ranks", "--num_ranks", dest="num_ranks", type=int, default=8, metavar="N", help="data-parallel ranks (8)")
    add(
        "--accumulate",
        "--num_slots",
        dest="num_slots",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches per rank and optimizer step, accumulate_grad_batches (1)",
    )
    add(
        "--batch-size",
        "--batch_size",
        dest="batch_size",
        type=int,
        metavar="N",
        help="samples of a plain micro-batch (that of the data module's loader, else 8)",
    )
    add(
        "--max-tokens",
        "--max_tokens",
        dest="max_tokens",
        type=_whole_numbers,
        action="extend",
        default=[],
        metavar="N[,N...]",
        help="budgets of padded tokens per micro-batch (a sweep between the longest sample and batch_size of them)",
    )
    add(
        "--lookahead",
        type=_whole_numbers,
        action="extend",
        default=[],
        metavar="N[,N...]",
        help="consecutive optimizer steps that may exchange samples, 1 for none (4)",
    )
    add(
        "--sync",
        choices=tuple(SYNC_NAMES),
        default="fsdp",
        help="when ranks wait: in every micro-batch (fsdp, ddp or micro_batch: Lightning does it under both),"
        " or once a step (fsdp)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the shuffle (0)")
    add("--epoch", type=int, default=0, metavar="N", help="number of the epoch (0)")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("lengths").add_argument
    add("--column", metavar="NAME", help="column, key or attribute that holds the lengths, or sequences to be counted")
    add(
        "--max-length",
        "--max_length",
        dest="max_length",
        type=int,
        metavar="N",
        help="clip lengths to this, as the collator truncates",
    )
    add(
        "--pad-to-multiple-of",
        "--pad_to_multiple_of",
        dest="pad_to_multiple_of",
        type=int,
        default=1,
        metavar="N",
        help="padded lengths are multiples of this (1)",
    )


def _add_cost(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the cost model", "intercept + n * L + alpha * n * L**2, n samples padded to L tokens"
    )
    group.add_argument(
        "--intercept", type=float, default=0.0, metavar="X", help="cost of a micro-batch before its first token (0)"
    )
    group.add_argument(
        "--alpha", type=float, default=0.001, metavar="X", help="weight of the quadratic part, attention (0.001)"
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how much is planned").add_argument
    add(
        "--steps",
        type=_steps,
        metavar="N|all",
        help="plan so many optimizer steps, drawn at random with the seed (as many as there is time for)",
    )
    add(
        "--time-limit",
        dest="time_limit_s",
        type=float,
        default=4.0,
        metavar="SECONDS",
        help="stop planning after so long, without --steps (4)",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files to write, any of them").add_argument
    add("--html", type=Path, metavar="FILE", help="a page with tables and drawings that needs no network")
    add("--png", type=Path, metavar="FILE", help="the drawings")
    add("--json", type=Path, metavar="FILE", help="every figure")


def _whole_numbers(text: str) -> list[int]:
    """Return the numbers of a comma-separated list.

    Raises:
        argparse.ArgumentTypeError: they are not whole numbers.

    >>> _whole_numbers("4096,8_192")
    [4096, 8192]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas in between, got {text!r}") from None


def _steps(text: str) -> int | str:
    """Return a number of steps, or ``"all"``.

    Raises:
        argparse.ArgumentTypeError: it is neither a number of at least 1 nor the word.
    """
    if text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, or all, got {text!r}")
    return int(text)

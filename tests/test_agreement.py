"""What one rank cannot do, all ranks say; what ranks disagree about, all of them name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_balance.agreement import (
    check_equal_on_ranks,
    find_difference,
    from_rank_zero,
    gather_objects,
    on_every_rank,
)
from tests.command import REPOSITORY
from tests.distributed import run_ranks
from tests.jobs import Job, torchrun


class OwnError(Exception):
    """An error that other ranks cannot know by its name."""


def raise_on(rank: int, error: Exception) -> int:
    if int(os.environ["RANK"]) == rank:
        raise error
    return 7


def outcome(attempt: Any) -> str:
    try:
        return repr(attempt())
    except Exception as error:  # noqa: BLE001 - every kind is compared below
        return f"{type(error).__name__}: {error}"


def run_agreement() -> dict[str, str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {
        "gather": outcome(lambda: gather_objects({"rank": rank})),
        "all succeed": outcome(lambda: on_every_rank(lambda: rank)),
        "rank 1 fails": outcome(lambda: on_every_rank(lambda: raise_on(1, ValueError("bad value 3")))),
        "rank 0 fails": outcome(lambda: on_every_rank(lambda: raise_on(0, TypeError("bad type")))),
        "own class": outcome(lambda: on_every_rank(lambda: raise_on(1, OwnError("odd")))),
        "odd constructor": outcome(
            lambda: on_every_rank(lambda: raise_on(1, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")))
        ),
        "key error": outcome(lambda: on_every_rank(lambda: raise_on(0, KeyError("name")))),
        "zero": outcome(lambda: from_rank_zero(lambda: f"computed on {rank}")),
        "zero fails": outcome(lambda: from_rank_zero(lambda: raise_on(0, ValueError("rank 0 cannot")))),
        "zero only": outcome(lambda: from_rank_zero(lambda: raise_on(1, ValueError("must not run on rank 1")))),
        "array": outcome(lambda: from_rank_zero(lambda: np.arange(3))),
        "equal": outcome(lambda: check_equal_on_ranks({"seed": 3, "n": None}, "do this")),
        "differ": outcome(lambda: check_equal_on_ranks({"same": 1, "seed": rank}, "do this")),
        "missing": outcome(lambda: check_equal_on_ranks({"seed": 1} if rank == 0 else {}, "do this")),
    }
    # Still in step after all these errors?
    total = [None, None]
    dist.all_gather_object(total, rank)
    return {**found, "after": repr(total)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, str]]:
    return run_ranks(run_agreement, 2, timeout_s=60)


def both(ranks: list[dict[str, str]], name: str) -> list[str]:
    return [rank[name] for rank in ranks]


def test_objects_come_in_rank_order(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "gather") == ["[{'rank': 0}, {'rank': 1}]"] * 2


def test_each_rank_gets_its_own_result(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "all succeed") == ["0", "1"]


def test_an_error_of_one_rank_is_raised_on_all_with_its_rank(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "rank 1 fails") == ["ValueError: rank 1 failed: bad value 3", "ValueError: bad value 3"]
    assert both(ranks, "rank 0 fails") == ["TypeError: bad type", "TypeError: rank 0 failed: bad type"]


def test_errors_of_unknown_classes_arrive_too(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "own class") == ["RuntimeError: rank 1 failed: odd", "OwnError: odd"]
    assert both(ranks, "key error") == ["KeyError: 'name'", "KeyError: \"rank 0 failed: 'name'\""]


def test_errors_whose_class_takes_other_arguments_arrive_too(ranks: list[dict[str, str]]) -> None:
    first, second = both(ranks, "odd constructor")
    assert first.startswith("RuntimeError: rank 1 failed: 'utf-8' codec can't decode")
    assert second.startswith("UnicodeDecodeError: 'utf-8' codec can't decode")


def test_rank_zero_computes_for_all(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "zero") == ["'computed on 0'"] * 2
    assert both(ranks, "zero only") == ["7", "7"]
    assert both(ranks, "array") == ["array([0, 1, 2])"] * 2
    assert both(ranks, "zero fails") == ["ValueError: rank 0 cannot", "ValueError: rank 0 failed: rank 0 cannot"]


def test_what_differs_is_named_with_both_values_on_all_ranks(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "equal") == ["None", "None"]
    sentence = "ValueError: seed differs between ranks: rank 0 has 0, rank 1 has 1; do this"
    assert both(ranks, "differ") == [sentence] * 2
    assert (
        both(ranks, "missing") == ["ValueError: seed differs between ranks: rank 0 has 1, rank 1 has None; do this"] * 2
    )


@pytest.mark.parametrize(
    ("seeds", "claims"),
    [
        ([1, 1, 2, 1], "ranks 0, 1 and 3 have 1, rank 2 has 2"),
        ([3, 1, 1, 1], "rank 0 has 3, ranks 1, 2 and 3 have 1"),
        ([0] * 12 + [7], "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more have 0, rank 12 has 7"),
    ],
)
def test_the_ranks_of_either_value_are_named(seeds: list[int], claims: str) -> None:
    assert find_difference([{"n": 4, "seed": seed} for seed in seeds]) == f"seed differs between ranks: {claims}"


def test_ranks_are_in_step_after_errors(ranks: list[dict[str, str]]) -> None:
    assert both(ranks, "after") == ["[0, 1]"] * 2


def test_a_single_process_needs_no_group() -> None:
    assert gather_objects(3) == [3]
    assert on_every_rank(lambda: 4) == 4
    assert from_rank_zero(lambda: 5) == 5
    check_equal_on_ranks({"seed": 1}, "do this")
    with pytest.raises(OwnError):
        on_every_rank(lambda: (_ for _ in ()).throw(OwnError()))


LETS_GO_OF_A_TENSOR_LATE = """\
import os, time
import torch, torch.distributed as dist
from lightning_balance.agreement import end_process_group

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

kept_until_the_interpreter_ends = EndsSlowly()
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(0.5)
dist.all_reduce(torch.ones(3), async_op=True)
end_process_group()
assert not dist.is_initialized()
"""


def test_a_rank_whose_group_was_ended_is_not_aborted_by_gloo(tmp_path: Path) -> None:
    """Without `end_process_group` rank 0 always aborts: its tensor is let go of while its interpreter ends slowly."""
    script = tmp_path / "rank.py"
    script.write_text(LETS_GO_OF_A_TENSOR_LATE)
    [command] = torchrun(script, num_ranks_per_node=2)
    with Job(command, cwd=tmp_path) as job:
        job.wait(timeout_s=60)


TWO_COMMANDS = """\
import os, sys
from pathlib import Path
from lightning_balance.agreement import has_process_group
from lightning_balance.cli import main

main([*sys.argv[1:], "--trainer.default_root_dir", "from Python"])
found = [has_process_group()]
main()
found.append(has_process_group())
Path(f"found-rank{os.environ['RANK']}.txt").write_text(str(found))
"""


def test_a_command_ends_the_group_of_its_process_but_not_that_of_a_caller(tmp_path: Path) -> None:
    script = tmp_path / "commands.py"
    script.write_text(TWO_COMMANDS)
    options = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
    sizes = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--data.num_functions", "64"]
    words = ["fit", "--config", str(REPOSITORY / "configs" / "rebalance_ddp.yaml"), *options, *sizes]
    [command] = torchrun(script, *words, num_ranks_per_node=2)
    with Job(command, cwd=tmp_path) as job:
        job.wait(timeout_s=120)
    for rank in range(2):
        assert (tmp_path / f"found-rank{rank}.txt").read_text() == "[True, False]"

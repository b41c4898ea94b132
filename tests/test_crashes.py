"""A job that is killed at any moment and started again ends as if nothing had happened: no sample lost, none repeated.

Each round runs a real training that is killed several times with SIGKILL, from inside a chosen phase or from outside,
and continues from its newest readable checkpoint, on two ranks or on one or two in turn. ``--crash-rounds 200`` with
``-m "slow or not slow"`` plays more rounds than CI does.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import CRASH_ROUNDS
from tests.crash import attempts
from tests.crash.history import (
    assert_equal_results,
    check_every_sample_trained_once,
    check_logs,
    newest_readable_checkpoint,
    read_result,
)
from tests.crash.job import Attempt, Books, JobSettings
from tests.crash.kills import KillPlan
from tests.crash.rounds import OTHER_DEVICE, Rounds
from tests.distributed import RanksError, RanksTimeoutError
from tests.forks import ForkServer

NUM_ROUNDS_IN_SHORT_RUNS = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        num_rounds = metafunc.config.getoption("--crash-rounds")
        marks = [() if seed < NUM_ROUNDS_IN_SHORT_RUNS else pytest.mark.slow for seed in range(num_rounds)]
        metafunc.parametrize("seed", [pytest.param(seed, marks=mark) for seed, mark in enumerate(marks)])


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Rounds]:
    begun = time.monotonic()
    played = Rounds(tmp_path_factory.mktemp("rounds"))
    yield played
    pytestconfig.stash[CRASH_ROUNDS] = f"{played.summary()} in {time.monotonic() - begun:.0f} s"


def test_a_round_of_kills_leaves_no_trace(rounds: Rounds, seed: int) -> None:
    """Rounds in turn: 2 ranks throughout, and 1 or 2 ranks from attempt to attempt."""
    played = rounds.play(seed, elastic=seed % 2 == 1)
    assert played.places, "nobody was killed"


# --- the harness itself -----------------------------------------------------------------------------------------------


def killed(
    tmp_path: Path, phase: str, *, ranks: tuple[int, ...] = (0, 1), occurrence: int = 3, event: int | str = 500
) -> Attempt:
    kill = KillPlan(phase=phase, occurrence=occurrence, event=event, ranks=ranks, note=tmp_path / "killed.txt")
    return Attempt(number=0, folder=tmp_path, num_ranks=2, kill=kill)


@pytest.mark.skipif(not OTHER_DEVICE.exists(), reason="needs a second file system, where a checkpoint is copied to")
def test_a_checkpoint_that_is_half_written_is_not_continued_from(tmp_path: Path) -> None:
    first = killed(tmp_path, "writing", event="sendfile", ranks=(0,))
    with tempfile.TemporaryDirectory(dir=OTHER_DEVICE) as temporary:
        if Path(temporary).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("both folders are on one file system")
        outcome = attempts.run(JobSettings(), first, env={"TMPDIR": temporary})
    assert outcome.place == "writing: c_call of sendfile"
    checkpoint, torn = newest_readable_checkpoint(first.checkpoints)
    assert [path.name for path in torn] == ["0-epoch=0-step=4.ckpt"]
    assert checkpoint is not None
    assert checkpoint.name == "0-epoch=0-step=3.ckpt"


def test_where_files_are_renamed_no_checkpoint_is_half_written(tmp_path: Path) -> None:
    first = killed(tmp_path, "writing", event="rename", ranks=(0,))
    assert attempts.run(JobSettings(), first, env={"TMPDIR": str(tmp_path)}).place
    checkpoint, torn = newest_readable_checkpoint(first.checkpoints)
    assert checkpoint is not None
    assert not torn


def test_a_survivor_saves_and_the_job_continues_from_there(tmp_path: Path) -> None:
    """Rank 1 dies inside a step; rank 0 finds out in a collective, and saves in on_exception."""
    settings = JobSettings(mode="token budget", accumulate=2, saves=("every fourth step, and on exceptions",))
    first = killed(tmp_path, "step", ranks=(1,), occurrence=5)
    attempts.run(settings, first, grace_s=5.0)
    checkpoint, _ = newest_readable_checkpoint(first.checkpoints)
    assert checkpoint is not None
    assert torch.load(checkpoint, weights_only=False)["global_step"] % 4
    second = replace(first, number=1, checkpoint=checkpoint, kill=None)
    assert attempts.run(settings, second).finished
    result = read_result(second)
    check_every_sample_trained_once(result, settings.loss_reduction)
    check_logs([first, second], result)


def test_a_job_that_does_not_end_is_a_failure_and_says_where_it_is(tmp_path: Path) -> None:
    attempt, no_rank_zero = Attempt(number=0, folder=tmp_path, num_ranks=2), {"RANK": "1"}
    with pytest.raises(RanksTimeoutError, match=r"ran past 2 s") as error:
        attempts.run(JobSettings(), attempt, limit_s=2, env=no_rank_zero)
    assert all("most recent call first" in output for output in error.value.outputs)


def test_an_error_of_the_job_is_a_failure_and_shown(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"failed(.|\n)*KeyError: 'no such mode'"):
        attempts.run(JobSettings(mode="no such mode"), Attempt(number=0, folder=tmp_path, num_ranks=2))


def train_a_step_twice(books: Books) -> None:
    books.steps.append({**books.steps[-1], "step": len(books.steps)})


def train_a_sample_in_two_steps(books: Books) -> None:
    books.steps[0]["weights"][next(iter(books.steps[1]["weights"]))] = 0.1


def train_a_sample_twice_in_a_step(books: Books) -> None:
    sample, weight = next(iter(books.steps[0]["weights"].items()))
    books.steps[0]["weights"][sample] = 2 * weight


def lose_a_step(books: Books) -> None:
    del books.steps[3]


def test_the_books_notice_what_goes_wrong(rounds: Rounds, tmp_path: Path) -> None:
    attempt = Attempt(number=0, folder=tmp_path, num_ranks=2)
    attempts.run(JobSettings(), attempt)
    expected = rounds.uninterrupted(JobSettings())
    check_every_sample_trained_once(read_result(attempt), "sample_mean")
    assert_equal_results(read_result(attempt), expected)
    for change in (train_a_step_twice, train_a_sample_in_two_steps, train_a_sample_twice_in_a_step, lose_a_step):
        result = read_result(attempt)
        change(result["books"])
        with pytest.raises(AssertionError):
            check_every_sample_trained_once(result, "sample_mean")
    result = read_result(attempt)
    result["books"].validations *= 2
    with pytest.raises(AssertionError):
        assert_equal_results(result, expected)
    result = read_result(attempt)
    result["optimizer"]["state"][0]["momentum_buffer"] *= 1.001
    with pytest.raises(AssertionError):
        assert_equal_results(result, expected)


def test_the_logs_notice_what_goes_wrong(tmp_path: Path) -> None:
    attempt = Attempt(number=0, folder=tmp_path, num_ranks=2)
    attempts.run(JobSettings(), attempt)
    result = read_result(attempt)
    check_logs([attempt], result)
    lines = attempt.log(1).read_text().splitlines(keepends=True)
    for changed in (lines[:-1], [*lines, lines[1].replace('"step": 0', '"step": 1')]):
        attempt.log(1).write_text("".join(changed))
        with pytest.raises(AssertionError):
            check_logs([attempt], result)


def test_a_server_leaves_no_rank_behind(tmp_path: Path) -> None:
    with ForkServer(preload="json") as server:
        rank = server.start(time.sleep, (600,), env={}, output=tmp_path / "output.txt", limit_s=600)
        assert rank.poll() is None
        other = server.start(time.sleep, (600,), env={}, output=tmp_path / "output.txt", limit_s=600)
        assert other.kill() == -signal.SIGKILL
        ended = server.start(os.getpid, (), env={}, output=tmp_path / "output.txt", limit_s=600)
        while ended.poll() is None:
            time.sleep(0.01)
        assert ended.poll() == 0
        assert Path(f"/proc/{ended.pid}").exists(), "its number may belong to another process when it is killed"
        assert ended.kill() == 0
    assert not Path(f"/proc/{rank.pid}").exists()

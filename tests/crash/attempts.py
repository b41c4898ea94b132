"""Run one attempt of the job on all its ranks, and see that it ends: by itself, or because it was killed on purpose."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.crash.job import Attempt, JobSettings, run_attempt
from tests.distributed import RanksError, RanksTimeoutError, free_port, rank_environment
from tests.forks import Rank, fork_server

POLL_S = 0.002
# After an error that was not planned the other ranks get this long to report theirs, and stacks to be written.
ERROR_GRACE_S, STACK_DUMP_S = 2.0, 0.5
RANK_LIMIT_S = 30.0  # so much later ranks end themselves, if nobody is left to kill them


@dataclass(frozen=True, kw_only=True)
class KillFromOutside:
    """SIGKILL from the harness, as a scheduler or the kernel sends it.

    Attributes:
        micro_batch: sent after rank 0 has begun so many micro-batches of the attempt.
        delay_s: so long after that.
        ranks: who dies.
    """

    micro_batch: int
    delay_s: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        finished: the job ended; otherwise it was killed as planned.
        place: where it was killed.
        seconds: wall time.
    """

    finished: bool
    place: str
    seconds: float


def run(
    settings: JobSettings,
    attempt: Attempt,
    kill: KillFromOutside | None = None,
    *,
    grace_s: float = 0.0,
    limit_s: float = 60.0,
    env: dict[str, str] | None = None,
) -> Outcome:
    """Run the attempt; ranks that survive another's planned death are killed after ``grace_s``.

    Raises:
        RanksTimeoutError: the attempt ran past ``limit_s`` although nobody was killed.
        RanksError: a rank failed although nobody was killed.
    """
    outputs = [attempt.folder / f"output-{attempt.number}-{rank}.txt" for rank in range(attempt.num_ranks)]
    port = free_port()
    ranks = [
        fork_server().start(
            run_attempt,
            (settings, attempt),
            env={**rank_environment(rank, attempt.num_ranks, port), **(env or {})},
            output=output,
            limit_s=limit_s + RANK_LIMIT_S,
        )
        for rank, output in enumerate(outputs)
    ]
    begun = time.monotonic()  # a server may have to import everything before its first fork
    place, reason = "", "failed"
    try:
        place = _watch(ranks, attempt, kill, begun + limit_s)
        _wait(ranks, grace_s if place else ERROR_GRACE_S)
    except TimeoutError:
        reason = f"ran past {limit_s:g} s"
        _dump_stacks(ranks)
    finally:
        exit_codes = [rank.kill() for rank in ranks]
    finished = exit_codes == [0] * len(ranks) and reason == "failed"
    if not place and not finished:
        error = RanksError if reason == "failed" else RanksTimeoutError
        texts = [output.read_text(errors="replace") for output in outputs]
        raise error(f"attempt {attempt.number} of {settings} {reason}; {attempt}", exit_codes, texts)
    return Outcome(finished=finished, place="" if finished else place, seconds=time.monotonic() - begun)


def _watch(ranks: list[Rank], attempt: Attempt, kill: KillFromOutside | None, deadline: float) -> str:
    """Wait until all ranks ended or one failed, which gives "", or until one was killed as planned: where.

    Raises:
        TimeoutError: the deadline passed.
    """
    due = None
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        # A survivor may fail by a death that cannot be waited for yet; the note was written before both.
        if attempt.kill is not None and any(codes) and attempt.kill.note.exists():
            return attempt.kill.note.read_text().strip()
        if all(code == 0 for code in codes) or any(codes):
            return ""
        if kill is not None and due is None and _num_micro_batches(attempt.log(0)) >= kill.micro_batch:
            due = time.monotonic() + kill.delay_s
        if kill is not None and due is not None and time.monotonic() >= due:
            for rank in kill.ranks:
                ranks[rank].kill()
            return f"outside: {1e3 * kill.delay_s:.1f} ms after micro-batch {kill.micro_batch}"
        time.sleep(POLL_S)
    raise TimeoutError


def _num_micro_batches(log: Path) -> int:
    return log.read_bytes().count(b"indices") if log.exists() else 0


def _wait(ranks: list[Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)


def _dump_stacks(ranks: list[Rank]) -> None:
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(STACK_DUMP_S if running else 0)

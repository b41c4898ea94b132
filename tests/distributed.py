"""Run a test function on several real processes, with a timeout that holds even when a rank hangs in a collective.

    def sum_of_ranks(factor):                       # at the top level of a test module
        torch.distributed.init_process_group("gloo")
        ...
        return total.item()

    def test_ranks_add_up():
        assert run_ranks(sum_of_ranks, 2, 10, timeout_s=60) == [10, 10]

Each rank is a fork of an interpreter that has done nothing but imports (tests/forks.py), with the environment that
torchrun would give it, so a `Trainer(devices=num_ranks)` inside the function joins the other ranks instead of launching
processes of its own. Arguments and results travel by pickle through a temporary folder. Ranks do not share a process
group with the test, nor with each other, and each one is killed together with its children (DataLoader workers) when
the test ends for any reason.
"""

import contextlib
import itertools
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests.forks import Rank, fork_server

Result = TypeVar("Result")

# After one rank failed the others get this long to report their own error; most are blocked in a collective by then.
GRACE_S = 10.0
STACK_DUMP_S = 0.5
POLL_S = 0.02
STDERR_TAIL_CHARS = 4000
STACKS_TAIL_CHARS = 20_000
"""After a timeout: the stacks of a rank and of its DataLoader workers, which may be the ones that hang."""


_CALLS = itertools.count()


class RanksError(RuntimeError):
    """Some rank failed or was killed. `exit_codes` and `outputs` (stdout and stderr together) have one entry a rank."""

    tail_chars = STDERR_TAIL_CHARS

    def __init__(self, headline: str, exit_codes: list[int], outputs: list[str]) -> None:
        tails = "\n".join(
            f"--- rank {rank} (exit code {code}) ---\n{output[-self.tail_chars :].strip() or '(no output)'}"
            for rank, (code, output) in enumerate(zip(exit_codes, outputs, strict=True))
        )
        super().__init__(f"{headline}\n{tails}")
        self.exit_codes = exit_codes
        self.outputs = outputs


class RanksTimeoutError(RanksError):
    """Some rank was still running after the timeout; its output ends with the stacks that it and its workers had."""

    tail_chars = STACKS_TAIL_CHARS


def run_ranks(
    function: Callable[..., Result],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call `function(*args)` in `num_ranks` new processes and return each rank's result, in rank order.

    Args:
        function: a function at the top level of an importable module.
        num_ranks: number of processes; 1 also runs in a process of its own.
        args: picklable positional arguments, the same for all ranks.
        timeout_s: seconds until every rank is killed.
        env: environment variables to add or replace.

    Raises:
        RanksTimeoutError: a rank was still running after `timeout_s`.
        RanksError: a rank raised, exited or was killed.
    """
    if "<" in function.__qualname__ or "." in function.__qualname__:
        raise TypeError(f"function must be at the top level of a module, got {function.__qualname__!r}")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        workdir = Path(folder)
        (workdir / "call.pkl").write_bytes(pickle.dumps((function, args)))
        port, call = free_port(), next(_CALLS)
        ranks = [
            # Hashes of strings differ between neighbouring ranks and, where a test starts ranks again, from the last.
            fork_server((rank + call) % 2).start(
                _run_as_rank,
                (workdir, rank),
                env={**rank_environment(rank, num_ranks, port), **(env or {})},
                output=workdir / f"output{rank}.txt",
                limit_s=timeout_s + 2 * GRACE_S,
            )
            for rank in range(num_ranks)
        ]
        try:
            timed_out = _wait(ranks, time.monotonic() + timeout_s)  # the server may have had to import everything first
        finally:
            exit_codes = [rank.kill() for rank in ranks]
        outputs = [(workdir / f"output{rank}.txt").read_text(errors="replace") for rank in range(num_ranks)]
        name = f"{function.__module__}.{function.__qualname__}"
        if timed_out:
            raise RanksTimeoutError(f"{name} on {num_ranks} ranks ran past {timeout_s:g} s", exit_codes, outputs)
        if any(exit_codes):
            raise RanksError(f"{name} failed on {num_ranks} ranks", exit_codes, outputs)
        if not all((workdir / f"result{rank}.pkl").exists() for rank in range(num_ranks)):
            raise RanksError(f"{name} ended without a result on some of {num_ranks} ranks", exit_codes, outputs)
        return [pickle.loads((workdir / f"result{rank}.pkl").read_bytes()) for rank in range(num_ranks)]


def free_port() -> int:
    """A port below the range the system gives out by itself, so that no other socket takes it in the meantime."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("found no free port between 15000 and 30000 in 100 tries")


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The variables torchrun sets on one node; TORCHELASTIC_RUN_ID is how Lightning recognises its launcher."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in [str(Path(__file__).parent.parent), *sys.path] if path),
    }


def _wait(ranks: list[Rank], deadline: float) -> bool:
    """Wait until all ranks ended, or the grace time after a first failure is over; True if the deadline passed."""
    grace_end = None
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if grace_end is None and any(rank.poll() for rank in ranks):
            grace_end = now + GRACE_S
        if grace_end is not None and now > grace_end:
            break
        if now > deadline:
            _dump_stacks(ranks)
            return True
        time.sleep(POLL_S)
    return False


def _dump_stacks(ranks: list[Rank]) -> None:
    """Ask each rank, and each of its forked workers, which have the handler too; in turn, as they share a file."""
    running = [rank.pid for rank in ranks if rank.poll() is None]
    for pid in [*running, *(worker for rank in running for worker in _children(rank))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")  # none where the system does not tell
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def _run_as_rank(workdir: Path, rank: int) -> None:
    function, args = pickle.loads((workdir / "call.pkl").read_bytes())
    (workdir / f"result{rank}.pkl").write_bytes(pickle.dumps(function(*args)))

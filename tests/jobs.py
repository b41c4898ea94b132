"""Start whole jobs as a user does (a script, torchrun, an interactive session), and end every process of them for sure.

    with Job([sys.executable, "train.py"], cwd=folder) as job:
        job.wait(timeout_s=60)                      # raises with the job's output when it failed or ran too long

Launchers start processes in sessions of their own (torchrun does), so that killing one process group is not enough.
Every process of a job inherits a variable that names the job, and when the `with` block ends, for any reason, whatever
carries it is killed. (On Linux; elsewhere only the process group is.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.command import RANK_VARIABLES, REPOSITORY
from tests.distributed import free_port

NAME_VARIABLE = "LIGHTNING_BALANCE_TEST_JOB"
TIMEOUT_VARIABLE = "LIGHTNING_BALANCE_TEST_JOB_TIMEOUT_S"
LAST_RESORT_S = 240.0
POLL_S = 0.02
OUTPUT_TAIL_CHARS = 6000


class Job:
    """One running command and everything that it starts.

    Args:
        command: the words of the command.
        cwd: folder to run in.
        stdin: text to type into it.
        env: environment variables to add or replace.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: Path, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        self.command = list(command)
        self._marker = f"{NAME_VARIABLE}={uuid.uuid4().hex}"
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115  closed by __exit__
        with tempfile.TemporaryFile("w+") as typed:
            typed.write(stdin)
            typed.seek(0)
            self._process = subprocess.Popen(
                self.command,
                cwd=cwd,
                env=self._environment(env or {}),
                stdin=typed,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        name, _, value = self._marker.partition("=")
        clean = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = os.pathsep.join([str(REPOSITORY), *(entry for entry in sys.path if entry)])
        return {**clean, **threads, "PYTHONPATH": path, name: value, TIMEOUT_VARIABLE: str(LAST_RESORT_S), **extra}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while pids := self._pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self._process.wait()
        self._output.close()

    def _pids(self) -> list[int]:
        """Running processes of the job; a process that ended and was not waited for has no environment."""
        marker, pids = self._marker.encode(), []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marker in environment.read_bytes().split(b"\0"):
                    pids.append(int(environment.parent.name))
        return pids

    @property
    def pid(self) -> int:
        """The command's own process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What the job has printed until now, stdout and stderr together."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def wait_for(self, path: Path, timeout_s: float) -> None:
        """Wait until a file exists.

        Raises:
            AssertionError: the job ended, or the time did.
        """
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            assert self._process.poll() is None, self._report(f"ended before it wrote {path.name}")
            assert time.monotonic() < deadline, self._report(f"did not write {path.name} in {timeout_s:g} s")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float, exit_codes: Sequence[int] = (0,)) -> str:
        """Wait for the job's end and return its output.

        Raises:
            AssertionError: it ran past the timeout, or its exit code is none of `exit_codes`.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._report(f"ran past {timeout_s:g} s")) from None
        assert code in exit_codes, self._report(f"ended with {code}")
        return self.output

    def _report(self, headline: str) -> str:
        return f"{' '.join(self.command)} {headline}:\n{self.output[-OUTPUT_TAIL_CHARS:]}"


def torchrun(script: Path, *words: str, num_nodes: int = 1, num_ranks_per_node: int = 1) -> list[list[str]]:
    """One torchrun command for each node of a job, all on the loopback device."""
    port = free_port()
    return [
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={num_nodes}", f"--nproc-per-node={num_ranks_per_node}", f"--node-rank={node}"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
            *(str(script), *words),
        ]
        for node in range(num_nodes)
    ]

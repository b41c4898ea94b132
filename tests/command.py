"""Run the package's command line as a user would, in a process group that is killed at the timeout."""

import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def run_command(*words, cwd, timeout_s=150.0):
    """Run `python -m lightning_balance WORDS`; return the finished process with stdout and stderr together in stdout.

    Ranks that Lightning launches are in the same process group, so none outlives the test.
    """
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    env.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", NO_COLOR="1", COLUMNS="120")
    command = [sys.executable, "-m", "lightning_balance", *map(str, words)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} ran past {timeout_s:g} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)

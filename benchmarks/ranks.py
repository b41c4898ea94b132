"""Run a function of a benchmark on several ranks, each a process with one thread, in a process group of their own."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIME_LIMIT_S = 3600.0


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *, time_limit_s: float = TIME_LIMIT_S, **arguments: Any
) -> Any:
    """Call a function on every rank; returns what it returned on rank 0.

    Args:
        function: of a module of this package; it may use the default process group (gloo, NCCL on GPUs).
        num_ranks: processes.
        time_limit_s: all processes are killed then.
        **arguments: of the function; they and the result go through JSON.

    Raises:
        RuntimeError: a rank failed.
        TimeoutError: it took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        named = {"module": _module_of(function), "function": function.__name__, "of_process": os.getpid()}
        task.write_text(json.dumps({**named, "arguments": arguments, "answer": str(answer)}))
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        process = subprocess.Popen(
            [*words, "-m", "benchmarks.ranks", str(task)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{function.__name__} on {num_ranks} ranks took more than {time_limit_s:.0f} s"
            ) from None
        finally:
            _kill(process)
        if code:
            raise RuntimeError(f"{function.__name__} failed on {num_ranks} ranks; its error is above")
        return json.loads(answer.read_text())


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def _module_of(function: Callable[..., Any]) -> str:
    """Return the module's importable name, also that of a script that runs as ``__main__``."""
    specification = sys.modules[function.__module__].__spec__
    assert specification is not None, "run the script with python -m"
    return specification.name


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher; ranks, in sessions of their own, see that it is gone."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _end_with(process: int, parent: int) -> None:
    """End this rank as soon as the script or the launcher is gone, also inside a collective."""
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(process, 0)
            time.sleep(0.5)
    os._exit(1)


def _run_as_rank(task: dict[str, Any]) -> None:
    threading.Thread(target=_end_with, args=(task["of_process"], os.getppid()), daemon=True).start()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    result = getattr(importlib.import_module(task["module"]), task["function"])(**task["arguments"])
    if dist.get_rank() == 0:
        Path(task["answer"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Whatever the function left behind, no thread of it can abort an interpreter that does not end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _run_as_rank(json.loads(Path(sys.argv[1]).read_text()))

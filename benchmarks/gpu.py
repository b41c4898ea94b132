"""What does balancing give on a GPU: training end to end, memory, the token budget sweep, the overhead?

One command runs four of the benchmarks on one GPU, each with a time limit, ten minutes together, and prints their
tables; what was measured up to a limit is kept. Needs torch, lightning, transformers and torchmetrics, no more. With
``--small`` the same scripts run at tiny sizes on the CPU, to see that they do. No figures of a GPU are published yet.

    python -m benchmarks.gpu                # writes results/gpu/*.json
    python -m benchmarks.gpu --small --out DIR
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.environment import RESULTS
from benchmarks.tables.documents import TABLES, table

MODEL = ["--accelerator", "gpu", "--num-ranks", "1", "--precision", "bf16-mixed"]
MODEL += ["--hidden-size", "512", "--num-layers", "8", "--num-heads", "8"]
SMALL = ["--hidden-size", "16", "--num-ranks", "1"]

# Seconds after which a script is stopped, its options on a GPU, and its options to try it on the CPU.
# fmt: off
SCRIPTS: dict[str, tuple[float, list[str], list[str]]] = {
    "end_to_end": (
        210,
        [*MODEL, "--steps", "16", "--rounds", "3", "--max-length", "4096"],
        [*SMALL, "--steps", "1", "--rounds", "1", "--max-length", "64"],
    ),
    "memory": (
        90,
        [*MODEL, "--samples", "4096", "--max-length", "4096", "--no-picture"],
        [
            *SMALL, "--samples", "64", "--max-length", "64", "--batch-sizes", "2", "4", "--most", "4",
            "--plan-ranks", "1", "--no-picture",
        ],
    ),
    "budget_sweep": (
        180,
        [*MODEL, "--scale", "0.5", "--steps", "2", "--rounds", "2"],
        [*SMALL, "--scale", "0.002", "--samples", "8", "--steps", "1", "--rounds", "1"],
    ),
    "overhead": (
        100,
        [*MODEL, "--rounds", "5", "--steps", "40", "--length", "1024"],
        [*SMALL, "--rounds", "1", "--steps", "7", "--length", "16"],
    ),
}
# fmt: on


def run(name: str, words: list[str], time_limit_s: float) -> bool:
    """Run a script; returns whether it ended in time and without an error."""
    begun = perf_counter()
    command = [sys.executable, "-m", f"benchmarks.{name}", *words]
    print("$", *command[1:], flush=True)
    try:
        code = subprocess.run(
            command, check=False, timeout=time_limit_s, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ).returncode
    except subprocess.TimeoutExpired:  # the script is killed; its ranks see that and end
        print(f"{name} was stopped after {time_limit_s:.0f} s", flush=True)
        return False
    print(
        f"{name} took {perf_counter() - begun:.0f} s" + (f" and failed with status {code}" if code else ""), flush=True
    )
    return code == 0


def main() -> None:
    """Run all scripts, one after another, and print what they found; one that fails does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="folder of the JSON files")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        parser.error("torch sees no GPU: try --small, which runs on the CPU")
    failed = []
    for name in options.only:
        time_limit_s, on_gpu, on_cpu = SCRIPTS[name]
        words = [*(on_cpu if options.small else on_gpu), "--out", str(options.out)]
        if not run(name, words, 600 if options.small else time_limit_s):
            failed.append(name)
    for name in (name for name, (script, _) in TABLES.items() if script in options.only):
        try:
            print(f"\n{name}\n\n{table(name, options.out)}", flush=True)
        except (FileNotFoundError, KeyError):  # nothing, or not all of it
            print(f"\n{name}: no result", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

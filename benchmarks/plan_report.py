"""What does `lightning-balance plan` say of the demo's data, and how long does it take for a million lengths?

    python -m benchmarks.plan_report
    python -m benchmarks.tables --write docs/plan.md

Runs the command as a user does, in processes of their own; saves what it says, and its picture in ``docs/pictures``.
Times are of the whole process: start, reading, planning, drawing. Planning stops at its time limit, so a busier machine
plans fewer steps in the same time; the number is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.options import positive_int
from lightning_balance.what_if import read_lengths

Json = dict[str, Any]

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
DEMO = "lightning_balance.demo.FunctionsDataModule"
DEMO_RUN = ("--ranks", "8", "--accumulate", "4")
MILLION_RUN = ("--ranks", "64", "--accumulate", "2", "--batch-size", "8")


def demo(picture: Path, *words: str, lengths: str = DEMO) -> Json:
    """Return the document of the demo's data, all steps planned; its picture is written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        _run("plan", lengths, *(words or DEMO_RUN), "--steps", "all", "--json", str(out), "--png", str(picture))
        document: Json = json.loads(out.read_text(encoding="utf-8"))
    return document


def many_lengths(num_samples: int, num_runs: int) -> list[Json]:
    """Time the command on lengths in a file, without and with all outputs, in turn."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, num_samples), 16, 1024).astype(np.int64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "lengths.npy", lengths)
        out = ["--json", str(folder / "out.json")]
        more = [word for kind in ("html", "png") for word in (f"--{kind}", str(folder / f"out.{kind}"))]
        rows: list[Json] = [{"outputs": "table, JSON", "runs": []}, {"outputs": "table, JSON, HTML, PNG", "runs": []}]
        for _ in range(num_runs):
            for row, words in zip(rows, (out, [*out, *more]), strict=True):
                seconds, processor_seconds = _run("plan", str(folder / "lengths.npy"), *MILLION_RUN, *words)
                document = json.loads((folder / "out.json").read_text(encoding="utf-8"))
                row["runs"].append(
                    {
                        "wall_s": seconds,
                        "processor_s": processor_seconds,
                        "num_steps": document["num_steps"],
                        "num_steps_planned": document["num_steps_planned"],
                        # null where one block of steps does not tell
                        "largest_speed_up_error": max(
                            method["speed_up_error"] or 0.0 for method in document["methods"]
                        ),
                    }
                )
    return rows


def reading(num_samples: int) -> Json:
    """Return the seconds that reading lengths takes from every kind of file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, num_samples), 16, 1024).astype(np.int64)
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "a.npy", lengths)
        (folder / "a.json").write_text(json.dumps(lengths.tolist()))
        (folder / "a.jsonl").write_text("\n".join(f'{{"length": {length}}}' for length in lengths.tolist()))
        (folder / "a.txt").write_text("\n".join(map(str, lengths.tolist())))
        (folder / "a.csv").write_text("name,length\n" + "".join(f"x,{length}\n" for length in lengths.tolist()))
        pq.write_table(pa.table({"length": lengths}), folder / "a.parquet")
        for path in sorted(folder.iterdir()):
            begin = time.perf_counter()
            read_lengths(path)
            seconds[path.suffix] = time.perf_counter() - begin
    return seconds


def _run(*words: str) -> tuple[float, float]:
    """Run the command; return wall-clock seconds and those of the processor."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "lightning_balance", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, used


def main() -> None:
    """Run, and save figures and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=positive_int, default=1_000_000, help="lengths in the file that is timed")
    parser.add_argument("--runs", type=positive_int, default=3, help="timed runs of each")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the picture")
    args = parser.parse_args()
    args.pictures.mkdir(parents=True, exist_ok=True)
    figures = {
        "demo": demo(args.pictures / "plan.png"),
        "million": many_lengths(args.samples, args.runs),
        "reading": reading(args.samples),
    }
    command = environment.command_line("plan_report", out="DIR", pictures="DIR")
    print(environment.save("plan_report", figures, command=command, folder=args.out).name)


if __name__ == "__main__":
    main()

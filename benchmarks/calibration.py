"""How well does the cost model fit this machine, and does a second calibration say the same?

Runs `lightning-balance calibrate` on the demo's YAML as a user does, several times in processes of their own.

    OMP_NUM_THREADS=1 python -m benchmarks.calibration     # about 3 minutes; writes results/calibration.json
    python -m benchmarks.tables --write docs/calibrate.md
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks import environment
from benchmarks.options import positive_int

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"


def calibrate(words: list[str]) -> dict[str, Any]:
    """Run the command; returns what its file says, without the measured points."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cost.yaml"
        command = [sys.executable, "-m", "lightning_balance", "calibrate", "--config", str(CONFIG)]
        subprocess.run(
            [*command, "--calibrate.out", str(out), *words], check=True, stdout=subprocess.DEVNULL, cwd=folder
        )
        content = yaml.safe_load(out.read_text(encoding="utf-8"))
    lengths = [point["padded_length"] for point in content["points"]]
    return {
        **{name: content[name] for name in ("intercept", "alpha", "seconds_per_token")},
        **content["fit"],
        "num_sizes": len(lengths),
        "longest": max(lengths),
    }


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=positive_int, default=3)
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    options, words = parser.parse_known_args()
    runs = []
    for _ in range(options.runs):
        runs.append(calibrate(words))
        print(runs[-1], flush=True)
    command = environment.command_line("calibration", out="DIR")
    print(environment.save("calibration", {"runs": runs}, command=command, folder=options.out))


if __name__ == "__main__":
    main()

"""Save figures together with what is needed to run them again: versions, hardware, command, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_balance.outputs import write_file

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("lightning-balance", "numpy", "torch", "transformers", "lhotse")


def describe(command: str) -> dict[str, Any]:
    """Return versions, hardware, commit and the command; no names of machines, users or folders."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "hardware": {
            "cpu": _cpu_model(),
            "num_cores": os.cpu_count(),
            "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        },
    }


def command_line(module: str, **paths: str) -> str:
    """Return the command that started this process, with values such as folders replaced by a word.

    Args:
        module: name of the script, as in ``python -m benchmarks.<module>``.
        **paths: what to write in place of the value after ``--<name>``.
    """
    words = [f"python -m benchmarks.{module}"]
    replaced = None
    for word in sys.argv[1:]:
        words.append(replaced or word)
        replaced = paths.get(word.removeprefix("--")) if word.startswith("--") else None
    return " ".join(words)


def save(name: str, figures: dict[str, Any], *, command: str, folder: Path = RESULTS) -> Path:
    """Save figures as ``<name>.json``; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_file(path, json.dumps({"environment": describe(command), **figures}, indent=1) + "\n")
    return path


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit that runs, marked where the package or a benchmark has been changed since."""
    root = Path(__file__).parents[1]
    try:
        run = [
            subprocess.run(
                ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=20
            ).stdout.strip()
            for words in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--", "lightning_balance", "benchmarks/*.py"),
            )
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run[0] + (" with changes" if run[1] else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

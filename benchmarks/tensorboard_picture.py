"""What does TensorBoard show of a balanced run?

    python -m benchmarks.tensorboard_picture

Trains the demo on two CPU processes with a TensorBoardLogger, opens its histograms in TensorBoard, and takes a picture
of them with headless Chromium (Debian's package ``chromium``) for ``docs/pictures``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import positive_int
from benchmarks.plan_report import PICTURES
from lightning_balance.outputs import whole_file

ROOT = Path(__file__).parents[1]
LOGGER = """\
trainer:
  accelerator: cpu
  log_every_n_steps: 2
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args:
      save_dir: runs
      name: demo
"""
START_LIMIT_S = 60.0
PAGE_LIMIT_MS = 30_000
"""How long the page's own clock runs before the picture is taken; the browser advances it as fast as it can."""


def train(folder: Path, num_epochs: int, num_functions: int) -> None:
    """Run the demo; TensorBoard's files come to ``folder/runs``."""
    (folder / "logger.yaml").write_text(LOGGER)
    configs = ["--config", str(ROOT / "configs" / "demo.yaml"), "--config", "logger.yaml"]
    sizes = ["--trainer.max_epochs", str(num_epochs), "--data.num_functions", str(num_functions)]
    subprocess.run(
        [sys.executable, "-m", "lightning_balance", "fit", *configs, *sizes],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve the files of a folder on a free port of this machine; yields the address.

    Raises:
        RuntimeError: the server did not answer in time, or ended; with what it said.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    # A relative name, since the page shows it.
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder.name, "--port", str(port)]
    address = f"http://localhost:{port}"
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, cwd=folder.parent, stdout=said, stderr=subprocess.STDOUT) as server,
    ):
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not _answers(address):
                if server.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise RuntimeError(
                        f"TensorBoard ended, or had no histograms within {START_LIMIT_S:g} s: {said.read()}"
                    )
                time.sleep(0.2)
            yield address
        finally:
            server.kill()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/data/plugin/histograms/tags", timeout=5) as answer:
            return b"balance/lengths" in answer.read()  # it reads its files while it answers already
    except OSError:
        return False


def take(address: str, picture: Path, chromium: str) -> None:
    """Write the picture of a page as PNG.

    Raises:
        RuntimeError: the browser took none; with what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        taken = Path(name) / "taken.png"
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={name}"),
            *("--window-size=1500,720", f"--virtual-time-budget={PAGE_LIMIT_MS}", f"--screenshot={taken}"),
        ]
        done = subprocess.run(
            [chromium, *options, address],
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180,
        )  # fmt: skip
        if done.returncode or not taken.exists():
            raise RuntimeError(f"{chromium} took no picture (exit status {done.returncode}): {done.stdout[-2000:]}")
        with whole_file(picture) as file:
            file.write(taken.read_bytes())


def main() -> None:
    """Train, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=positive_int, default=3, help="epochs, of which each gives a histogram")
    parser.add_argument("--functions", type=positive_int, default=600, help="samples of the demo's data")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the picture")
    parser.add_argument("--chromium", default="chromium", help="the browser, a name or a path (default: chromium)")
    args = parser.parse_args()
    if shutil.which(args.chromium) is None:
        parser.error(f"--chromium must be a browser that can be run, got {args.chromium}: install it or name another")
    args.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, args.epochs, args.functions)
        with tensorboard(folder / "runs") as address:
            take(f"{address}/?darkMode=false#histograms", args.pictures / "tensorboard.png", args.chromium)
    print("tensorboard.png")


if __name__ == "__main__":
    main()

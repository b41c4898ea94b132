"""The command ``lightning-balance set-max-tokens``: another token budget for a running job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_balance.console import output_of, say
from lightning_balance.control import request_max_tokens


def run_control_command(words: Sequence[str]) -> None:
    """Ask a running job for another token budget; mistakes end the process with one sentence."""
    parser = argparse.ArgumentParser(
        prog="lightning-balance set-max-tokens",
        description="Change the token budget of a running job, without a restart. The job takes it on all ranks after"
        " the same optimizer step, logs it as balance/max_tokens, and keeps it when it resumes.",
    )
    parser.add_argument("max_tokens", type=int, metavar="TOKENS", help="padded tokens per micro-batch")
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder that the job's first logger writes to, such as lightning_logs/version_0",
    )
    with output_of(parser.prog):  # --help
        options = parser.parse_args(words)
    try:
        run = request_max_tokens(options.run, options.max_tokens)
    except ValueError as error:
        parser.error(str(error))
    with output_of(parser.prog):
        say(
            f"asked the job in {options.run} (process {run.pid} on {run.host}) for {options.max_tokens:,} tokens per"
            f" micro-batch instead of {run.max_tokens:,}; it looks for requests every {run.every_n_steps} optimizer"
            " step(s)"
        )

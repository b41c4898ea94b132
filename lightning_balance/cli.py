"""The `lightning-balance` command: what-if plans without training, and training through LightningCLI."""

import importlib.util
import sys
from collections.abc import Sequence

_USAGE = """\
usage: lightning-balance COMMAND ...

Length-balanced distributed training for any LightningModule.

commands:
  plan                          show what balancing would do for given lengths or a dataset; trains nothing
  calibrate                     measure what micro-batches of a job cost on this machine, or how large they may be
  set-max-tokens                change the token budget of a running job
  fit, validate, test, predict  run a job described by --config FILE and options (LightningCLI)

lightning-balance COMMAND --help shows the options of a command.
"""
_STATUS_OF_SIGINT = 130
_TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
COMMANDS = ("plan", "calibrate", "set-max-tokens", *_TRAINER_COMMANDS)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; `args` is for calls from Python and defaults to the process's own arguments.

    A command from the process's own arguments is the last thing that the process does: its process group ends with it.
    Ctrl-C ends it with the status 130, as shells have it.
    """
    try:
        _run(args)
    except KeyboardInterrupt:
        sys.exit(_STATUS_OF_SIGINT)


def _run(args: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        from lightning_balance.console import output_of

        with output_of("lightning-balance"):
            print(_USAGE, end="")
    elif words[0] == "plan":
        from lightning_balance.what_if import run_plan_command

        run_plan_command(words[1:])
    elif words[0] == "set-max-tokens":
        from lightning_balance.control_command import run_control_command

        run_control_command(words[1:])
    elif words[0] in (*_TRAINER_COMMANDS, "calibrate"):
        if importlib.util.find_spec("jsonargparse") is None:
            sys.exit(f"lightning-balance {words[0]} needs jsonargparse: pip install 'lightning-balance[cli]'")
        _run_with_lightning(words[0], None if args is None else words)
    else:
        sys.exit(f"lightning-balance has no command {words[0]!r}: use one of {', '.join(COMMANDS)}, or --help")


def _run_with_lightning(command: str, args: list[str] | None) -> None:
    from lightning_balance.agreement import end_process_group

    if command == "calibrate":
        from lightning_balance.probing.command import CalibrateCLI
        from lightning_balance.settings import without_cost_files

        with without_cost_files():  # a config may name the file that is to be written
            CalibrateCLI(args=args)
    else:
        from lightning_balance.lightning_cli import BalanceCLI

        BalanceCLI(args=args)
    if args is None:
        end_process_group()

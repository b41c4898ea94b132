"""LightningCLI with CPU processes for machines without an accelerator, and a sentence for a mistake in our options."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Imported so that YAML and the command line may say `BalanceCallback` without the package's name.
from lightning_balance.callback import BalanceCallback as BalanceCallback


class BalanceCLI(LightningCLI):
    """LightningCLI for any model and datamodule given by `class_path`.

    `--num_cpu_processes N` applies where the trainer would run on the CPU and leaves `devices` to Lightning, whose
    `auto` is a single process there; one config then serves a laptop and a machine with GPUs. A mistake in the options
    of BalanceCallback itself, not of a class derived from it, ends the command with one sentence and the exit status 2.
    """

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(args=args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--num_cpu_processes`."""
        parser.add_argument(
            "--num_cpu_processes",
            type=int | None,
            default=None,
            help="Processes to train on when trainer.devices is 'auto' and there is no accelerator; null: one.",
        )

    def before_instantiate_classes(self) -> None:
        """Say how the callback is built, and turn `devices: auto` into the number of CPU processes where it applies."""
        self.parser.add_instantiator(self._make_callback, BalanceCallback, subclasses=False)
        config = self.config[str(self.subcommand)]
        num_processes = config.num_cpu_processes
        if num_processes is None:
            return
        if num_processes < 1:
            self.end_with(f"num_cpu_processes must be at least 1, or null for one process, got {num_processes}")
        if config.trainer.devices == "auto" and runs_on_cpu(config.trainer.accelerator):
            config.trainer.devices = num_processes

    def _make_callback(self, callback_class: type[BalanceCallback], **options: Any) -> BalanceCallback:
        """Build the callback; jsonargparse would hide its sentence among every other type that the value has not."""
        try:
            return callback_class(**options)
        except (TypeError, ValueError) as error:
            self.end_with(str(error))

    def end_with(self, sentence: str) -> NoReturn:
        """End the process with one sentence, as for a mistake in the command line.

        Every rank says it: a launcher ends the others when the first one ends, and machines may differ in their files.
        """
        self.parser.exit(2, f"lightning-balance {self.subcommand}: error: {sentence}\n")


def runs_on_cpu(accelerator: Any) -> bool:
    """Whether the trainer's `accelerator` argument means the CPU on this machine."""
    if accelerator == "auto":
        return not any(other.is_available() for other in (CUDAAccelerator, MPSAccelerator, XLAAccelerator))
    return accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)

"""LightningCLI with one addition: a number of processes for machines without an accelerator."""

from typing import Any

from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Imported so that YAML and the command line may say `BalanceCallback` without the package's name.
from lightning_balance.callback import BalanceCallback as BalanceCallback


class BalanceCLI(LightningCLI):
    """LightningCLI for any model and datamodule given by `class_path`.

    `--num_cpu_processes N` applies where the trainer would run on the CPU and leaves `devices` to Lightning, whose
    `auto` is a single process there; one config then serves a laptop and a machine with GPUs.
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
        """Turn `devices: auto` into the number of CPU processes where that applies."""
        config = self.config[str(self.subcommand)]
        num_processes = config.num_cpu_processes
        if num_processes is None:
            return
        if num_processes < 1:
            raise ValueError(f"num_cpu_processes must be at least 1, or null for one process, got {num_processes}")
        if config.trainer.devices == "auto" and runs_on_cpu(config.trainer.accelerator):
            config.trainer.devices = num_processes


def runs_on_cpu(accelerator: Any) -> bool:
    """Whether the trainer's `accelerator` argument means the CPU on this machine."""
    if accelerator == "auto":
        return not any(other.is_available() for other in (CUDAAccelerator, MPSAccelerator, XLAAccelerator))
    return accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)

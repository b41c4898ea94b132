"""`lightning-balance calibrate`: the job of a config, measured instead of trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_balance.calibration.error import CalibrationError
from lightning_balance.callback import BalanceCallback
from lightning_balance.datamodule import BalancedDataModuleMixin
from lightning_balance.lightning_cli import BalanceCLI
from lightning_balance.outputs import check_outputs
from lightning_balance.probing.calibration_callback import CalibrateOptions, CalibrationCallback
from lightning_balance.settings import BalanceSettings

NOT_FOR_CALIBRATION: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
    "fast_dev_run": False,
    "barebones": False,
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
"""Options of the trainer that write, log or end a run; a calibration has its own values, whatever the config says."""


class CalibratingTrainer(Trainer):
    """A trainer with the command that LightningCLI looks for."""

    def calibrate(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Measures what micro-batches cost on this machine, or how large they may be; trains nothing.

        Args:
            model: the module.
            train_dataloaders: its training loader.
            val_dataloaders: not used.
            datamodule: where the loader comes from.
            ckpt_path: not used: the values of weights change neither time nor memory.
            weights_only: not used.
        """
        if ckpt_path is not None:
            rank_zero_warn(f"calibrate measures with the module as it was built, without ckpt_path={ckpt_path}")
        self.fit(model, train_dataloaders=train_dataloaders, datamodule=datamodule)


class CalibrateCLI(BalanceCLI):
    """Runs the module and data of a config for `fit`, with the same options, and writes nothing but its own file."""

    def __init__(self, args: ArgsType = None) -> None:
        try:
            LightningCLI.__init__(self, trainer_class=CalibratingTrainer, save_config_callback=None, args=args)
        except CalibrationError as error:
            self.end_with(str(error))

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The only one, and the arguments that the command line has elsewhere."""
        return {"calibrate": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the calibration."""
        super().add_arguments_to_parser(parser)
        # No group: LightningCLI makes one of that name for the command itself.
        parser.add_class_arguments(CalibrateOptions, "calibrate", as_group=False)
        parser.add_argument(
            "--find-max-tokens",
            action="store_true",
            help="Find the largest max_tokens that fits into memory, instead of fitting the cost model.",
        )

    def before_instantiate_classes(self) -> None:
        """Check the options, and take out what writes, logs or ends a run."""
        config = self.config[str(self.subcommand)]
        super().before_instantiate_classes()
        try:
            self._options = CalibrateOptions(**config.calibrate.as_dict())
            if rank_zero_only.rank == 0 and not config.find_max_tokens:  # type: ignore[attr-defined]  # it has one
                check_outputs({"--calibrate.out": Path(self._options.out)})
        except ValueError as error:
            self.end_with(str(error))
        config.trainer.update(Namespace(NOT_FOR_CALIBRATION))  # type: ignore[no-untyped-call]

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        """The trainer of the config, with the calibration in place of its callbacks."""
        config = self.config_init[str(self.subcommand)]
        given = config.trainer.callbacks or []
        callbacks = given if isinstance(given, list) else [given]
        calibration = CalibrationCallback(
            _settings_of(callbacks, self.datamodule), self._options, find_max_tokens=config.find_max_tokens
        )
        calibration.only_for = self.datamodule  # a data module that would bring a BalanceCallback along does not
        kept = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
        return super().instantiate_trainer(**{**arguments, "callbacks": [calibration, *kept], "logger": DummyLogger()})


def _settings_of(callbacks: list[Any], datamodule: Any) -> BalanceSettings:
    """The options of balancing that `fit` would use."""
    for callback in callbacks:
        if isinstance(callback, BalanceCallback):
            return callback.settings
    return datamodule.settings if isinstance(datamodule, BalancedDataModuleMixin) else BalanceSettings()

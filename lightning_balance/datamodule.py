"""A LightningDataModule that brings its own balancing along (layer 2)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import Self

from lightning_balance import _lightning
from lightning_balance.callback import BalanceCallback
from lightning_balance.settings import OPTION_NAMES, BalanceSettings, HasBalanceSettings


class BalancedDataModuleMixin(HasBalanceSettings):
    """Balanced training for everyone who uses this data module, without a change to their Trainer.

    When a trainer takes the data module, the mixin adds a :class:`BalanceCallback` with its options to that trainer; it
    balances this data module's training loader only. A trainer that has a ``BalanceCallback`` already keeps it, and
    nothing is balanced twice. Takes the options of :class:`BalanceCallback`.

    Put it left of ``LightningDataModule``. On the right it works too: ``LightningDataModule.__init__`` drops the
    arguments that it is given (PL#16206), so the options are taken from the call that made the data module.

    Example:
        >>> from lightning.pytorch import LightningDataModule
        >>> class Texts(BalancedDataModuleMixin, LightningDataModule):
        ...     def __init__(self, folder: str, **balance):
        ...         super().__init__(**balance)
        ...         self.save_hyperparameters()
        >>> texts = Texts("data", max_tokens=8192)
        >>> texts.settings.max_tokens, dict(texts.hparams)
        (8192, {'folder': 'data', 'max_tokens': 8192})
    """

    _trainer: Trainer | None = None
    _given: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note the options of the call, in case ``LightningDataModule.__init__`` drops them."""
        self = super().__new__(cls)
        self._given = {name: value for name, value in options.items() if name in OPTION_NAMES}
        return self

    def _accept(self, settings: BalanceSettings) -> BalanceSettings:
        is_default = not settings.differing_options(BalanceSettings())
        return BalanceSettings(**self._given) if is_default and self._given else settings

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that uses this data module; Lightning sets it before it asks for data."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        if trainer is not None:
            self._attach(trainer)

    def _attach(self, trainer: Trainer) -> None:
        if not hasattr(self, "settings"):
            raise TypeError(
                f"{type(self).__name__}.__init__ does not call BalancedDataModuleMixin.__init__, which sets the"
                f" options:"
                " call super().__init__()"
            )
        callbacks = _lightning.callbacks(trainer)
        present = [callback for callback in callbacks if isinstance(callback, BalanceCallback)]
        if any(callback.only_for is self for callback in present):
            return
        # Callbacks that came with other data modules stay out of the way, but Lightning tells callbacks of one class
        # apart by their class only when it stores their state: let this one take their place.
        for callback in present:
            if callback.only_for is not None:
                callbacks.remove(callback)
                present.remove(callback)
        if present:
            if self.settings.differing_options(BalanceSettings()):
                rank_zero_warn(
                    f"the trainer has a BalanceCallback of its own, so the balancing options of"
                    f" {type(self).__name__} are"
                    " ignored: give the options to one of the two"
                )
            return
        own = BalanceCallback()
        own.settings = self.settings
        own.only_for = self
        callbacks.insert(0, own)  # before the callbacks that save checkpoints

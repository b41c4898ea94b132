"""Where a run goes on from a checkpoint that is saved now, whoever saves it in whatever hook (layer 2)."""

from __future__ import annotations

from typing import Any

from lightning_balance import _lightning
from lightning_balance._lightning import LoopPlace
from lightning_balance.fitting import BalancedFit


def loop_place(fit: BalancedFit) -> LoopPlace:
    """The place from which Lightning's loops do what is still to be done, and nothing twice.

    That is the beginning of the optimizer step that is under way, because no checkpoint holds gradients; with the
    validation that is due there, if it has not ended; before the hooks of the epoch's end, if they have not begun.
    """
    trainer, epoch = fit.trainer, fit.sampler.epoch
    position = fit.position
    num_undone = fit.num_batches_into_step(position)
    num_batches, num_logged_steps = position - num_undone, _lightning.num_logged_steps(trainer)
    is_last = position == fit.num_batches_of_epoch
    if is_last and _lightning.has_processed(trainer, epoch):
        return LoopPlace(epoch=epoch + 1, num_logged_steps=num_logged_steps)
    if not num_batches:
        return LoopPlace(epoch=epoch, num_undone=num_undone, num_logged_steps=num_logged_steps)
    is_under_way = _lightning.is_ending_batch(trainer) or trainer.validating
    in_all = _lightning.num_batches_in_all(trainer) - num_undone
    return LoopPlace(
        epoch=epoch,
        num_batches=num_batches,
        num_undone=num_undone,
        is_last=is_last,
        is_validation_due=_lightning.validates_after(trainer, num_batches, in_all),
        is_validated=num_undone > 0 or not _is_validation_ahead(fit),
        num_logged_steps=num_logged_steps + (is_under_way and not num_undone),
    )


def num_batches_validated(fit: BalancedFit) -> int:
    """Batches of the epoch after which no validation is ahead; more than are done where a step validated midway."""
    return max(fit.position - _is_validation_ahead(fit), fit.num_validated_before)


def _is_validation_ahead(fit: BalancedFit) -> bool:
    """Whether a validation after the latest batch, if one is due, has not ended."""
    return _lightning.is_ending_batch(fit.trainer) or fit.is_validation_ahead


def checkpoint_state(fit: BalancedFit) -> dict[str, Any]:
    """What :class:`BalanceCallback` keeps in the checkpoint."""
    return {**fit.state(), "validated": num_batches_validated(fit)}

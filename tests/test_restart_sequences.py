"""Runs crash anywhere, again and again, and go on under other options: every sample of an epoch is trained once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_balance import BalanceCallback
from tests.stopping import SavesAndRaises, StopError
from tests.toys import ScalarModel, equal_samples, loader, trainer

NUM_EPOCHS = 3
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 26},
    {"max_tokens": 26, "sync": "micro_batch"},
    {"max_tokens": 26, "step_unit": "tokens"},
    {"max_tokens": 60, "step_unit": "tokens", "lookahead": 2},
    {"lookahead": 3},
    {"max_tokens": 40, "lookahead": 2},
)
SAME_STEPS: tuple[dict[str, Any], ...] = tuple({"samples_per_step": 5, **mode} for mode in MODES[:3])
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Counting(ScalarModel):
    """Keeps in its checkpoints how often each sample was in a finished optimizer step of each epoch."""

    counts: torch.Tensor

    def __init__(self, num_samples: int) -> None:
        super().__init__(lr=0.001)
        self.register_buffer("counts", torch.zeros(NUM_EPOCHS, num_samples, dtype=torch.int64))


class Counts(Callback):
    """Counts the samples of a step when it ends, as the surviving history has them; copies in fillers are none."""

    def __init__(self, balance: BalanceCallback) -> None:
        self.balance = balance
        self.open: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        place = self.balance._place
        assert place is not None
        if place.plan.num_samples[place.slot, 0]:
            self.open += batch["index"].tolist()
        if place.is_last:
            module.counts[trainer.current_epoch, self.open] += 1
            self.open = []


def run(
    num_samples: int, options: dict[str, Any], crash: SavesAndRaises | None, checkpoint: Path | None, is_first: bool
) -> Counting | None:
    """Run on; None where it crashed."""
    lengths = np.random.default_rng(num_samples).integers(1, 12, num_samples).tolist()
    data = equal_samples(lengths)
    model = Counting(num_samples)
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **options["mode"])
    crashes = [] if crash is None else [crash]
    callbacks = [Counts(balance), *crashes, balance] if is_first else [balance, Counts(balance), *crashes]
    used = trainer(
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=options["accumulate"],
        val_check_interval=options["val_check_interval"],
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    try:
        used.fit(model, loader(data, options["batch_size"], shuffle=True), loader(data, 12), ckpt_path=checkpoint)
    except StopError:
        return None
    return model


def go_on_until_the_end(
    rng: random.Random, num_samples: int, modes: Any, keeps_options: bool, folder: Path
) -> Counting:
    options: dict[str, Any] = {}
    checkpoint = None
    for attempt in range(12):
        if not (options and keeps_options):
            options = {
                "mode": rng.choice(modes),
                "accumulate": rng.choice([1, 2, 3]),
                "batch_size": rng.choice([1, 2, 4]),
                "val_check_interval": rng.choice([1.0, 0.5]),
            }
        path = folder / f"{attempt}.ckpt"
        crash = SavesAndRaises(rng.choice(HOOKS), path, rng.choice([1, 2, 3, 4, 5, 6, 8])) if attempt < 11 else None
        model = run(num_samples, options, crash, checkpoint, rng.random() < 0.5)
        if model is not None:
            return model
        checkpoint = path
    raise AssertionError("the last attempt has no crash")


@pytest.mark.parametrize("keeps_options", [True, False], ids=["same options", "other options"])
@pytest.mark.parametrize("seed", range(12))
def test_every_sample_is_trained_once_whatever_happens(seed: int, keeps_options: bool, tmp_path: Path) -> None:
    rng = random.Random(seed)
    num_samples = rng.choice([7, 24, 31])
    model = go_on_until_the_end(rng, num_samples, MODES, keeps_options, tmp_path)
    assert model.counts.tolist() == [[1] * num_samples] * NUM_EPOCHS


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_a_fixed_number_of_samples_lead_to_the_same_weights(seed: int, tmp_path: Path) -> None:
    whole = run(
        31, {"mode": SAME_STEPS[0], "accumulate": 1, "batch_size": 1, "val_check_interval": 1.0}, None, None, True
    )
    assert whole is not None
    model = go_on_until_the_end(random.Random(seed), 31, SAME_STEPS, False, tmp_path)
    assert model.layer.weight.item() == pytest.approx(whole.layer.weight.item(), rel=1e-6)

"""Public reports about epochs, lengths of the loader and restarts, each as its smallest run with the right value.

Other reports are tests beside what they concern; a search for a number, such as ``PL#18023``, finds them.
PL = Lightning-AI/pytorch-lightning, HF = huggingface/transformers.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

import lightning_balance
from lightning_balance import BalanceCallback, BalancedBatchSampler
from tests.distributed import run_ranks
from tests.stopping import StopAfter
from tests.toys import ScalarModel, equal_samples, loader, trainer

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


class IsLast(Callback):
    """Notes at every batch whether the trainer calls it the epoch's last one, and the loader's length."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append((trainer.is_last_batch, len(trainer.train_dataloader)))


def fit(
    num_samples: int, *callbacks: Callback, max_epochs: int, ckpt_path: Path | None = None, **loader_arguments: Any
) -> ScalarModel:
    model = ScalarModel()
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False)
    data = equal_samples([4] * num_samples)
    trainer(callbacks=[balance, *callbacks], max_epochs=max_epochs).fit(
        model, loader(data, 2, shuffle=True, **loader_arguments), loader(data, 8), ckpt_path=ckpt_path
    )
    return model


def epoch_of(model: ScalarModel, epoch: int) -> list[list[int]]:
    return [batch for batch, of_epoch in zip(model.served, model.epochs, strict=True) if of_epoch == epoch]


def test_set_epoch_reaches_the_sampler() -> None:
    """PL#13316: three epochs, three orders, each of all samples."""
    model = fit(8, max_epochs=3)
    orders = [list(itertools.chain(*epoch_of(model, epoch))) for epoch in range(3)]
    assert sorted(set(model.epochs)) == [0, 1, 2]
    assert [sorted(order) for order in orders] == [list(range(8))] * 3
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_the_first_epoch_after_a_resume_is_its_own(workers: dict[str, Any], tmp_path: Path) -> None:
    """PL#21938: 2 epochs, then a resume to 3: epoch 2 is not epoch 0 again."""
    path = tmp_path / "two.ckpt"
    whole = fit(8, max_epochs=3)
    fit(8, StopAfter(8, path), max_epochs=3, **workers)
    resumed = fit(8, max_epochs=3, ckpt_path=path, **workers)
    assert epoch_of(resumed, 2) == epoch_of(whole, 2) == resumed.served


def test_the_length_is_exact() -> None:
    """PL#2351, PL#18058: 5 real micro-batches on 2 ranks are served as 3 and 3, which is what len says."""
    ranks = [BalancedBatchSampler([4] * 10, max_tokens=8, num_replicas=2, rank=rank) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [len(list(rank)) for rank in ranks] == [3, 3]


def test_without_shuffle_ranks_read_in_order_in_every_epoch() -> None:
    """PL#20326, PL#21131: 8 equal lengths on 2 ranks."""
    ranks = [BalancedBatchSampler([4] * 8, batch_size=1, num_replicas=2, rank=rank, shuffle=False) for rank in range(2)]
    for epoch in range(2):
        for rank in ranks:
            rank.set_epoch(epoch)
        steps = [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
        assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_exactly_the_unseen_batches_follow(tmp_path: Path) -> None:
    """PL#19764, PL#18780: stopped at batch 4 of 6; NeMo#11481: at 2 of 6, two layers must not both skip."""
    whole = fit(12, max_epochs=1)
    for stop in (4, 2):
        path = tmp_path / f"{stop}.ckpt"
        fit(12, StopAfter(stop, path), max_epochs=1)
        assert fit(12, max_epochs=1, ckpt_path=path).served == whole.served[stop:]


def test_a_skip_is_applied_once(tmp_path: Path) -> None:
    """open-instruct#681: after a resume in epoch 0, epochs 1 and 2 are whole."""
    path = tmp_path / "stopped.ckpt"
    fit(12, StopAfter(4, path), max_epochs=3)
    resumed = fit(12, max_epochs=3, ckpt_path=path)
    assert [len(epoch_of(resumed, epoch)) for epoch in range(3)] == [2, 6, 6]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_the_epochs_seed_is_kept(workers: dict[str, Any], tmp_path: Path) -> None:
    """ms-swift#10050: stopped at batch 4 of epoch 1, the rest is that of the run that never stopped."""
    path = tmp_path / "stopped.ckpt"
    whole = fit(12, max_epochs=2)
    fit(12, StopAfter(6 + 4, path), max_epochs=2, **workers)
    assert fit(12, max_epochs=2, ckpt_path=path, **workers).served == whole.served[10:]


def test_the_length_after_a_resume_is_the_epochs(tmp_path: Path) -> None:
    """fairseq#4973: len stays the full epoch's, and the last batch is the one that is called so."""
    path, last = tmp_path / "stopped.ckpt", IsLast()
    fit(12, StopAfter(4, path), max_epochs=1)
    fit(12, last, max_epochs=1, ckpt_path=path)
    assert last.seen == [(False, 6), (True, 6)]


def test_every_offset_continues(tmp_path: Path) -> None:
    """speculators#603: offsets 1 to 6 of 6 (0 is a new run)."""
    whole = fit(12, max_epochs=2)
    for offset in range(1, 7):
        path = tmp_path / f"{offset}.ckpt"
        fit(12, StopAfter(offset, path), max_epochs=2)
        assert fit(12, max_epochs=2, ckpt_path=path).served == whole.served[offset:]


def test_the_state_says_what_it_is() -> None:
    """pytorch/data#1513: version, epoch, seed, position, ranks, accumulation, settings, fingerprint of the lengths."""
    sampler = BalancedBatchSampler([4] * 12, batch_size=2, num_slots=2, num_replicas=2, rank=0, seed=7)
    state = sampler.state_at(1)
    expected = {"version": 2, "epoch": 0, "seed": 7, "position": 1, "num_replicas": 2, "num_slots": 2}
    assert {name: state[name] for name in expected} == expected
    assert {"lengths", "num_samples", "max_tokens", "lookahead", "cost", "sync", "shuffle"} <= set(state)


def fit_with_another_version() -> str:
    if os.environ["RANK"] == "1":
        lightning_balance.__version__ = "0.0.1"
    try:
        trainer("ddp", 2, callbacks=[BalanceCallback(print_summary=False)]).fit(
            ScalarModel(), loader(equal_samples([4] * 8), 2)
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_versions_of_the_package_stop_with_one_sentence() -> None:
    one, other = run_ranks(fit_with_another_version, 2, timeout_s=60)
    assert one == other
    assert "lightning_balance.__version__ differs between ranks: rank 0 has" in one
    assert "rank 1 has '0.0.1'" in one

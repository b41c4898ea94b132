"""cost="auto": the plan follows the run's own times, changes only between epochs, and is the same on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_balance import BalanceCallback, CostModel
from lightning_balance.calibration.online import MIN_MEASURED, WARM_UP, OnlineCost, slowest_per_slot
from tests import toys
from tests.distributed import run_ranks

TRUTH = CostModel(intercept=60.0, alpha=0.02)
SECONDS_PER_TOKEN = 1e-4
LENGTHS = np.random.default_rng(2).integers(2, 90, 120).tolist()


# ---------------------------------------------------------------------- the model


def measured(model, num=64, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    sizes = zip(rng.integers(1, 9, num).tolist(), rng.integers(4, 300, num).tolist(), strict=True)
    return [(n, length, 1e-5 * model.cost(n, length) * float(np.exp(rng.normal(0, noise)))) for n, length in sizes]


def test_a_run_of_another_cost_is_recognised():
    found = OnlineCost().renewed(measured(TRUTH, noise=0.02))
    assert found.intercept == pytest.approx(60, rel=0.3)
    assert found.alpha == pytest.approx(0.02, rel=0.2)


def test_a_model_that_fits_already_is_not_exchanged_for_one_of_noise():
    online = OnlineCost(model=TRUTH)
    assert online.renewed(measured(TRUTH, noise=0.05)) is TRUTH


def test_too_few_measurements_change_nothing():
    online = OnlineCost()
    assert online.renewed(measured(TRUTH, num=MIN_MEASURED - 1)) is online.model
    assert online.renewed([(1, 8, 1.0)] * 100) is online.model
    assert online.renewed([]) is online.model


def test_the_first_micro_batches_of_a_run_do_not_count():
    online = OnlineCost()
    for number in range(WARM_UP + 3):
        online.add(1, 8, 1.0 + number)
    assert online.measured == [(1, 8, 1.0 + number) for number in range(WARM_UP, WARM_UP + 3)]


def test_a_slot_of_waiting_ranks_is_the_slowest_ones():
    rows = slowest_per_slot([[(1, 8, 2.0), (3, 8, 3.0)], [(2, 8, 2.0), (1, 8, 3.0)]], CostModel())
    assert rows == [(2, 8, 2.0), (3, 8, 3.0)]


# ---------------------------------------------------------------------- in training


class Slow(toys.ScalarModel):
    """Takes the time that TRUTH says, in its forward: some 25 ms, far above what a busy machine adds."""

    def training_step(self, batch, batch_idx):
        time.sleep(SECONDS_PER_TOKEN * TRUTH.cost(*batch["x"].shape))
        return super().training_step(batch, batch_idx)


class Costs(Callback):
    """The cost of the plan at every micro-batch, and the plan's digest: {epoch: set of both}."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        (callback,) = [other for other in trainer.callbacks if isinstance(other, BalanceCallback)]
        sampler = callback._fit.sampler
        self.seen.setdefault(trainer.current_epoch, set()).add((sampler.description()["cost"], sampler.plan.digest))


def train(*, strategy="single", num_ranks=1, cost="auto", accumulate=3, **arguments):
    seed_everything(1)
    callback, costs = BalanceCallback(cost=cost, loss_reduction="token_mean", print_summary=False), Costs()
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulate, **arguments}
    arguments["callbacks"] = [callback, costs, *arguments.get("callbacks", [])]
    ckpt_path = arguments.pop("ckpt_path", None)
    model = Slow()
    run = toys.trainer(strategy, num_ranks, **arguments)
    run.fit(model, toys.loader(toys.equal_samples(LENGTHS), 2, shuffle=True), ckpt_path=ckpt_path)
    return model, callback, costs.seen


def test_the_plan_changes_at_an_epochs_beginning_and_not_within():
    model, callback, seen = train()
    assert {epoch: len(found) for epoch, found in seen.items()} == {0: 1, 1: 1}
    assert next(iter(seen[0]))[0] == repr(CostModel())
    learned = callback._fit.factory.online.model
    assert next(iter(seen[1]))[0] == repr(learned)
    assert learned != CostModel()
    assert learned.alpha > 5 * CostModel().alpha
    for epoch in (0, 1):
        served = [i for served, at in zip(model.served, model.epochs, strict=True) if at == epoch for i in served]
        assert sorted(set(served)) == list(range(len(LENGTHS)))


def costs_of_a_rank(strategy, accumulate):
    _, callback, seen = train(strategy=strategy, num_ranks=2, accumulate=accumulate, max_epochs=3)
    return seen, callback._fit.factory.online.model, len(callback._fit.factory.online.measured)


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 3), ("ddp", 1), ("fsdp2", 3)])
def test_two_ranks_agree_on_the_plan_that_their_own_times_make(strategy, accumulate):
    (seen, model, num), (seen_by_the_other, model_of_the_other, num_of_the_other) = run_ranks(
        costs_of_a_rank, 2, strategy, accumulate
    )
    assert seen == seen_by_the_other
    assert model == model_of_the_other
    assert num == num_of_the_other > 0
    assert [len(found) for found in seen.values()] == [1, 1, 1]
    assert model.alpha > 3 * CostModel().alpha
    assert {cost for cost, _ in seen[2]} == {repr(model)}


def test_a_run_resumed_within_an_epoch_keeps_the_plan_it_had(tmp_path):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole, _, seen = train(callbacks=[saving], enable_checkpointing=True)
    num_steps = len(LENGTHS) // 6
    resumed, _, seen_again = train(ckpt_path=tmp_path / f"step={num_steps + 7}.ckpt")
    assert seen_again == {1: seen[1]}
    assert seen[0].isdisjoint(seen[1])  # the checkpoint's cost is one that only the run knew
    num_left = len(resumed.served)
    assert 0 < num_left < len([epoch for epoch in whole.epochs if epoch == 1])
    assert resumed.served == whole.served[-num_left:]


def test_without_auto_the_cost_stays_and_nothing_is_timed():
    _, callback, seen = train(cost=CostModel(intercept=3.0))
    assert {cost for found in seen.values() for cost, _ in found} == {repr(CostModel(intercept=3.0))}
    assert callback._stopwatch is None


def test_the_summary_of_a_run_whose_cost_changed_is_printed(capsys):
    seed_everything(1)
    callback = BalanceCallback(cost="auto", loss_reduction="token_mean")
    run = toys.trainer(callbacks=[callback], max_epochs=2, accumulate_grad_batches=3)
    run.fit(Slow(), toys.loader(toys.equal_samples(LENGTHS), 2, shuffle=True))
    assert "modelled time per sample" in capsys.readouterr().out
    assert callback._report.monitor.run.modelled_samples == len(LENGTHS)
    assert callback._report.monitor.run.num_samples == 2 * len(LENGTHS)

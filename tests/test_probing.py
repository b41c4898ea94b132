"""Single micro-batches outside of training: the same computation, and no trace of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn

from lightning_balance.calibration.grid import GridPoint
from lightning_balance.probing.live_bytes import LiveBytes
from lightning_balance.probing.micro_batches import MicroBatches
from lightning_balance.probing.prober import Prober
from lightning_balance.probing.snapshot import Snapshot
from lightning_balance.probing.timing import measure_grid
from tests import toys
from tests.budgeted import Sensitive, token_loader

LENGTHS = [3, 9, 5, 14, 30, 8, 22, 11]


class InTraining(Callback):
    """Calls a function once the run is set up, and keeps what it returns."""

    def __init__(self, function):
        self.function = function
        self.found = None

    def on_train_start(self, trainer, pl_module):
        self.found = self.function(trainer)


def in_training(function, model=None):
    """What `function(trainer)` returns inside a real fit."""
    seed_everything(3)
    calls = InTraining(function)
    toys.trainer(callbacks=[calls], max_steps=1).fit(model or Sensitive(), token_loader(LENGTHS))
    return calls.found


def micro_batches():
    return MicroBatches(token_loader(LENGTHS), np.array(LENGTHS))


def random_state():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


# ---------------------------------------------------------------------- no trace


def probe_and_compare(trainer):
    module, prober = trainer.lightning_module, Prober(trainer)
    module.extra = {"scores": [torch.ones(2)], "names": {"a"}}
    state, before = random_state(), module.weights()
    metric = module.seen_loss.metric_state
    with prober.leaving_no_trace():
        batch = prober.to_device(micro_batches().longest(3))
        prober.optimizer_step(batch)
        prober.forward_backward(batch)
        module.extra["scores"][0] += 1
        module.extra["names"].add("b")
        module.late = 1
        assert random_state() != state
        changed = [name for name, value in module.weights().items() if not torch.equal(value, before[name])]
        assert module.num_calls == 2
    assert len(changed) > 5  # the check below can fail
    assert all(torch.equal(value, before[name]) for name, value in module.weights().items())
    assert random_state() == state
    assert module.seen_loss.metric_state == metric
    assert (module.num_calls, module.history, module.largest) == (0, [], 0)
    assert module.extra["scores"][0].tolist() == [1, 1]
    assert module.extra["names"] == {"a"}
    assert not hasattr(module, "late")
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(not optimizer.state for optimizer in trainer.optimizers)
    return True


def test_after_a_probe_everything_is_as_it_was():
    assert in_training(probe_and_compare)


def step_and_fail(prober):
    with prober.leaving_no_trace():
        prober.optimizer_step(prober.to_device(micro_batches().longest(3)))
        raise RuntimeError("on purpose")


def fail_inside(trainer):
    module, before, kept = trainer.lightning_module, trainer.lightning_module.weights(), trainer.callbacks
    with pytest.raises(RuntimeError, match="on purpose"):
        step_and_fail(Prober(trainer))
    assert "log" not in vars(module)
    assert trainer.callbacks is kept
    return all(torch.equal(value, before[name]) for name, value in module.weights().items())


def test_after_an_error_inside_a_probe_everything_is_as_it_was():
    assert in_training(fail_inside)


def test_gradients_and_the_optimizers_state_that_were_there_come_back():
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    gradient = layer.weight.grad.clone()
    moment = optimizer.state[layer.weight]["exp_avg"].clone()
    snapshot = Snapshot(layer, [optimizer])
    optimizer.param_groups[0]["lr"] = 5.0
    layer(torch.ones(1, 3) * 7).sum().backward()
    optimizer.step()
    layer.zero_grad()
    snapshot.restore()
    assert torch.equal(layer.weight.grad, gradient)
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], moment)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[layer.weight]["step"] == 1


# ---------------------------------------------------------------------- the same computation


def probed_gradient(trainer):
    prober = Prober(trainer)
    made = MicroBatches(toys.loader(toys.equal_samples([1, 2, 3]), 1), np.array([1, 2, 3]))
    with prober.leaving_no_trace():
        prober.forward_backward(prober.to_device(made.longest(2)))
        once = trainer.lightning_module.gradient()
        prober.forward_backward(prober.to_device(made.longest(1)))
        return once, trainer.lightning_module.gradient()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_probe_computes_the_modules_gradients_in_the_trainers_precision(precision):
    calls = InTraining(probed_gradient)
    run = toys.trainer(callbacks=[calls], precision=precision)
    run.fit(toys.ScalarModel(), toys.loader(toys.equal_samples([1, 2]), 1))
    assert calls.found == pytest.approx(((2 * 2 + 3 * 3) / 5, (2 * 2 + 3 * 3) / 5 + 3), rel=0.01)


# ---------------------------------------------------------------------- memory and time


def counted(num_rows):
    layer = nn.Sequential(nn.Linear(100, 400, bias=False), nn.ReLU(), nn.Linear(400, 1, bias=False))
    with LiveBytes(layer.parameters()) as live:
        standing = live.now
        layer(torch.ones(num_rows, 100)).sum().backward()
    return standing, live.peak


def test_the_count_is_exact_for_what_a_network_keeps():
    standing, peak = counted(1000)
    assert standing == 4 * (100 * 400 + 400)
    # The input, the activation before and after the ReLU, and its gradient before and after the ReLU's backward.
    assert 4 * 1000 * (100 + 400 + 400) < peak - standing < 4 * 1000 * (100 + 4 * 400 + 4) + standing


def test_the_count_is_the_same_every_time():
    assert len({counted(333) for _ in range(5)}) == 1


def test_more_rows_count_in_proportion():
    small, large = counted(1000)[1], counted(2000)[1]
    assert 1.8 < large / small < 2


def measure(trainer):
    ticks = iter(range(10_000))
    points = [GridPoint(1, 30), GridPoint(2, 9), GridPoint(4, 3)]
    module = trainer.lightning_module
    found = measure_grid(
        Prober(trainer), micro_batches(), points, num_repeats=2, progress=False, clock=lambda: float(next(ticks))
    )
    return *found, module.num_calls


def test_every_point_is_measured_in_every_round_after_a_warm_up():
    points, seconds, num_calls = in_training(measure)
    assert points == [GridPoint(1, 30), GridPoint(2, 9), GridPoint(4, 3)]
    assert seconds.tolist() == [[1.0, 1.0]] * 3  # one tick between two readings of the clock
    assert num_calls == 0


class TooLarge(Sensitive):
    def training_step(self, batch, batch_idx):
        if len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
def test_a_point_that_runs_out_of_memory_is_left_out_with_a_warning():
    def measure_and_stop(trainer):
        trainer.should_stop = True
        return measure(trainer)

    with pytest.warns(UserWarning, match="4 samples padded to 3 tokens run out of memory and are left out"):
        points, seconds, _ = in_training(measure_and_stop, TooLarge())
    assert points == [GridPoint(1, 30), GridPoint(2, 9)]
    assert seconds.shape == (2, 2)


def test_batches_have_the_size_that_is_asked_for():
    made = micro_batches()
    for num_samples, length in [(1, 30), (2, 9), (4, 3), (16, 14)]:
        assert made.padded_to(num_samples, length)["input_ids"].shape == (num_samples, length)
    assert made.longest(2)["input_ids"].shape == (2, 30)
    assert made.shortest(max_tokens=24, max_samples=8)["input_ids"].shape == (3, 8)
    assert made.fullest(max_tokens=31, max_samples=8)["input_ids"].numel() == 30

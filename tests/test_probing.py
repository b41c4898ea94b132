"""Single micro-batches outside of training: the same computation, and no trace of it."""

from __future__ import annotations

import random
from collections import deque

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


class Holder(nn.Module):
    """Has one value, as an attribute."""

    def __init__(self, value):
        super().__init__()
        self.value = value


DEEP = [1]
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("make", "change", "read"),
    [
        (lambda: torch.ones(1, 2).expand(3, 2), lambda h: setattr(h, "value", None), lambda h: h.value.tolist()),
        (lambda: torch.ones(1, 2).expand(3, 2), lambda h: h.value[0].mul_(3), lambda h: h.value.tolist()),
        (lambda: torch.zeros(2), lambda h: h.value.resize_(5).fill_(7), lambda h: h.value.tolist()),
        (lambda: torch.eye(3).to_sparse(), lambda h: h.value.mul_(2), lambda h: h.value.to_dense().tolist()),
        (lambda: torch.eye(3).to_sparse_csr(), lambda h: h.value.mul_(2), lambda h: h.value.to_dense().tolist()),
        (lambda: DEEP, lambda h: h.value.append(2), lambda h: len(h.value)),
        (lambda: deque([1, 2], maxlen=2), lambda h: h.value.append(3), lambda h: list(h.value)),
        (lambda: np.zeros(2), lambda h: h.value.__iadd__(1), lambda h: h.value.tolist()),
        (lambda: torch.Generator().manual_seed(1), lambda h: h.value.manual_seed(2), lambda h: h.value.initial_seed()),
        (lambda: np.random.default_rng(1), lambda h: h.value.random(), lambda h: str(h.value.bit_generator.state)),
        (lambda: random.Random(1), lambda h: h.value.random(), lambda h: h.value.getstate()),
        (lambda: [nn.Linear(1, 1)], lambda h: h.value[0].weight.data.add_(1), lambda h: h.value[0].weight.item()),
        (lambda: {"a": Holder(1)}, lambda h: setattr(h.value["a"], "value", 2), lambda h: h.value["a"].value),
        (lambda: nn.Linear(1, 1), lambda h: h.value.requires_grad_(False), lambda h: h.value.weight.requires_grad),
        (lambda: 0, lambda h: setattr(h, "hook_calls", 1), lambda h: hasattr(h, "hook_calls")),
        (lambda: 0, lambda h: setattr(h, "late", nn.Linear(1, 1)), lambda h: hasattr(h, "late")),
    ],
)  # fmt: skip
def test_what_a_module_holds_comes_back(make, change, read):
    holder = Holder(make())
    before = read(holder)
    snapshot = Snapshot(holder, [])
    change(holder)
    snapshot.restore()
    assert read(holder) == before


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute of its own."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        self.history = [*getattr(self, "history", []), self.num_steps]
        return super().step(closure)


class WithCountingOptimizer(Sensitive):
    def configure_optimizers(self):
        optimizer = Counting(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, optimizer, *args):
        # torch runs it twice a step where it has wrapped SGD's own step before.
        HOOKS_RUN.add(optimizer.num_steps)


HOOKS_RUN = set()
"""Steps of the optimizer after which its hook ran."""


def step_and_look(trainer):
    prober, (optimizer,) = Prober(trainer), trainer.optimizers
    with prober.leaving_no_trace():
        prober.optimizer_step(prober.to_device(micro_batches().longest(3)))
        assert optimizer.num_steps == 1
    return optimizer.num_steps, hasattr(optimizer, "history"), len(HOOKS_RUN)


def test_an_optimizers_own_attributes_come_back_and_its_step_hooks_do_not_run():
    HOOKS_RUN.clear()
    assert in_training(step_and_look, WithCountingOptimizer()) == (0, False, 0)
    assert sorted(HOOKS_RUN) == [1]  # the hook is there again in the training


class Sealed(list):
    """Cannot be emptied."""

    def clear(self):
        raise TypeError("sealed")


class WithSealed(Sensitive):
    def __init__(self):
        super().__init__()
        self.sealed = Sealed([1])
        self.after = [1]


def test_one_value_that_cannot_be_put_back_is_an_error_but_all_others_come_back():
    module = WithSealed()
    snapshot = Snapshot(module, [])
    module.after.append(2)
    module.num_calls = 9
    with pytest.raises(RuntimeError, match=r"1 of the module's values cannot be put back .*: sealed"):
        snapshot.restore()
    assert (module.after, module.num_calls) == ([1], 0)


def fail_with_sealed(trainer):
    with pytest.raises(RuntimeError, match="on purpose"):
        step_and_fail(Prober(trainer))
    return trainer.lightning_module.num_calls


def test_an_error_inside_a_probe_is_told_also_where_something_cannot_be_put_back():
    assert in_training(fail_with_sealed, WithSealed()) == 0


class StartsWithHooks(Sensitive):
    """Needs what its hooks make, logs in them, and registers a hook of torch's in one."""

    def on_train_start(self):
        self.log("beta", 1.0)
        self.beta = 0.5
        self.out.register_forward_hook(lambda *_: FORWARDS.append(1))

    def on_train_epoch_start(self):
        self.losses = []

    def on_train_batch_start(self, batch, batch_idx):
        self.tokens = batch["input_ids"].numel()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.beta / self.tokens
        self.losses.append(float(loss))
        return loss


FORWARDS = []


def probe_with_hooks(trainer):
    module, prober = trainer.lightning_module, Prober(trainer)
    with prober.leaving_no_trace():
        prober.forward_backward(prober.to_device(micro_batches().longest(3)))
        assert (len(module.losses), len(FORWARDS)) == (1, 1)
        FORWARDS.clear()
    return [name for name in ("beta", "losses", "tokens") if hasattr(module, name)], dict(trainer.callback_metrics)


def test_a_probe_calls_the_modules_hooks_of_a_beginning_epoch_and_leaves_no_trace_of_them():
    assert in_training(probe_with_hooks, StartsWithHooks()) == ([], {})
    assert len(FORWARDS) == 1  # the training's one step calls the one hook of its own on_train_start


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


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_a_sparse_tensor_counts_with_its_indices_and_values(layout):
    with LiveBytes([]) as live:
        sparse = getattr(torch.eye(100), f"to_sparse_{layout}")()
    num_bytes = {"coo": 2 * 8 * 100, "csr": 8 * 201, "csc": 8 * 201}[layout] + 4 * 100
    assert sparse._nnz() == 100
    assert num_bytes <= live.now <= num_bytes + 800  # compressed indices may be a slice of the others


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

"""max_tokens="auto": the largest budget that fits, found before training without a trace in the training."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from lightning_balance import BalanceCallback
from lightning_balance.demo import PadCollator
from lightning_balance.memory import GIB
from lightning_balance.probing.live_bytes import LiveBytes
from tests import toys
from tests.budgeted import AsksForSteps, Sensitive, token_loader
from tests.distributed import RanksError, run_ranks

LENGTHS = np.random.default_rng(1).integers(2, 40, 48).tolist()
LIMIT_GIB = 0.0006


def train(max_tokens, *, strategy="single", num_ranks=1, kind=Sensitive, options=None, batch_size=8, **arguments):
    """Train, and return the module and the callback."""
    seed_everything(7)
    model = kind(is_normed=strategy != "fsdp2")
    options = {} if options is None else options
    if max_tokens == "auto":
        options = {"memory_limit_gib": LIMIT_GIB, **options}
    callback = BalanceCallback(max_tokens=max_tokens, loss_reduction="token_mean", print_summary=False, **options)
    arguments = {"max_epochs": 2, **arguments, "callbacks": [callback, *arguments.get("callbacks", [])]}
    ckpt_path = arguments.pop("ckpt_path", None)
    toys.trainer(strategy, num_ranks, **arguments).fit(model, token_loader(LENGTHS, batch_size), ckpt_path=ckpt_path)
    return model, callback


def differing(one, other):
    """Names of values that are not the same bit for bit."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_run_with_auto_gives_bitwise_the_weights_of_one_with_the_number_it_found():
    found_by, callback = train("auto")
    assert max(LENGTHS) < callback.max_tokens < 8 * max(LENGTHS)  # neither one sample nor a whole step: the limit
    told, _ = train(callback.max_tokens)
    assert differing(found_by.weights(), told.weights()) == []
    assert found_by.history == told.history
    assert found_by.num_calls == told.num_calls
    assert found_by.largest <= callback.max_tokens


def test_the_comparison_of_weights_can_fail():
    one, callback = train("auto")
    other, _ = train(callback.max_tokens, max_epochs=1)
    assert differing(one.weights(), other.weights())


def auto_and_told(strategy):
    found_by, callback = train("auto", strategy=strategy, num_ranks=2)
    told, _ = train(callback.max_tokens, strategy=strategy, num_ranks=2)
    return callback.max_tokens, differing(found_by.weights(), told.weights()), found_by.history == told.history


def assert_two_ranks_agree(results):
    assert results[0][0] == results[1][0]
    assert [result[1:3] for result in results] == [([], True)] * 2


@pytest.mark.slow
def test_two_ranks_with_auto_give_bitwise_the_weights_of_two_with_the_number_under_fsdp2():
    assert_two_ranks_agree(run_ranks(auto_and_told, 2, "fsdp2"))


def auto_and_told_and_with_one_large_rank():
    equal = auto_and_told("ddp")
    limit = LIMIT_GIB * (1.7 if dist.get_rank() == 0 else 1)
    _, callback = train("auto", strategy="ddp", num_ranks=2, options={"memory_limit_gib": limit}, max_epochs=1)
    return *equal, callback.max_tokens


@pytest.mark.slow
def test_two_ranks_with_auto_do_likewise_under_ddp_and_the_rank_with_the_least_memory_decides():
    results = run_ranks(auto_and_told_and_with_one_large_rank, 2)
    assert_two_ranks_agree(results)
    assert [result[3] for result in results] == [results[0][0]] * 2
    assert results[0][0] < 16 * max(LENGTHS)  # less than a whole step: the limit decided


class Watches(Callback):
    """Counts the tensors of the training itself."""

    def on_train_start(self, trainer, pl_module):
        self.live = LiveBytes([*pl_module.parameters(), *pl_module.buffers()])
        self.live.__enter__()

    def on_train_end(self, trainer, pl_module):
        self.live.__exit__(None, None, None)


@pytest.mark.slow
def test_training_with_the_budget_found_stays_within_the_limit_and_uses_it():
    watches = Watches()
    train("auto", callbacks=[watches])
    assert 0.8 < watches.live.peak / (LIMIT_GIB * 0.9 * GIB) <= 1


@pytest.mark.slow
def test_the_same_budget_is_found_every_time():
    assert len({train("auto", max_epochs=1)[1].max_tokens for _ in range(3)}) == 1


@pytest.mark.slow
def test_twice_the_memory_holds_more_tokens():
    small, large = (
        train("auto", options={"memory_limit_gib": limit}, batch_size=24, max_epochs=1)[1].max_tokens
        for limit in (LIMIT_GIB, 2 * LIMIT_GIB)
    )
    assert large > 1.5 * small


@pytest.mark.parametrize(
    ("options", "num_samples"), [({}, 8), ({"samples_per_step": 6}, 6), ({"step_unit": "tokens"}, len(LENGTHS))]
)
def test_with_memory_in_plenty_a_whole_step_is_one_micro_batch_and_memory_is_not_the_limit(
    options, num_samples, caplog
):
    caplog.set_level("INFO")
    _, callback = train("auto", options={"memory_limit_gib": 8, **options}, max_steps=1)
    assert callback.max_tokens == num_samples * max(LENGTHS)
    assert f"={callback.max_tokens} fits into 7.2 GiB; memory is not the limit: no optimizer step" in caplog.text
    assert "largest that fits" not in caplog.text


def test_too_little_memory_for_the_longest_sample_is_an_error_that_says_how_much_it_needs():
    with pytest.raises(ValueError, match=r"the longest sample alone, 39 padded tokens, needs 0\.\d+ GiB, but"):
        train("auto", options={"memory_limit_gib": 1e-5})


def test_the_cpu_needs_a_limit():
    with pytest.raises(ValueError, match="needs memory_limit_gib"):
        train("auto", options={"memory_limit_gib": None})


def test_limits_without_auto_are_refused():
    with pytest.raises(ValueError, match="bound the search of max_tokens='auto', but max_tokens is 64"):
        BalanceCallback(max_tokens=64, memory_limit_gib=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_fraction": 0.0}, "memory_fraction must be above 0 and at most 1, got 0.0"),
        ({"memory_fraction": 1.5}, "memory_fraction must be above 0 and at most 1, got 1.5"),
        ({"memory_limit_gib": 0.0}, "memory_limit_gib must be a finite number above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BalanceCallback(max_tokens="auto", **options)


def test_a_module_that_asks_for_the_steps_first_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="lightning-balance calibrate --find-max-tokens"):
        train("auto", kind=AsksForSteps)


class RunsOutOfMemory(Sensitive):
    """Raises the accelerator's error, halfway through the forward, above a number of tokens."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch["input_ids"].numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def test_running_out_of_memory_is_caught_and_leaves_no_trace():
    found_by, callback = train("auto", kind=RunsOutOfMemory, options={"memory_limit_gib": 8})
    assert 95 <= callback.max_tokens <= 103  # whatever the data can fill to at most 100 tokens
    assert found_by.largest <= 100
    told, _ = train(callback.max_tokens, kind=RunsOutOfMemory)
    assert differing(found_by.weights(), told.weights()) == []


class Fails(Sensitive):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("no such kernel")


def test_another_error_is_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="no such kernel"):
        train("auto", kind=Fails)


class AsksTheTrainer(Sensitive):
    """Weighs its loss by what the trainer knows of the run, from its hooks on."""

    def on_train_start(self):
        self.num_batches = len(self.trainer.train_dataloader)

    def on_train_epoch_start(self):
        self.history = []

    def training_step(self, batch, batch_idx):
        share = self.global_step / self.trainer.estimated_stepping_batches
        assert self.num_batches > 0
        assert self.trainer.num_training_batches < 1000
        return super().training_step(batch, batch_idx) * (1 + share)


def test_a_training_step_may_rely_on_start_hooks_and_ask_the_trainer_for_steps_and_batches():
    found_by, callback = train("auto", kind=AsksTheTrainer)
    told, _ = train(callback.max_tokens, kind=AsksTheTrainer)
    assert differing(found_by.weights(), told.weights()) == []
    assert found_by.num_batches == told.num_batches


class FailsOnOneRank(Sensitive):
    def __init__(self, **options):
        super().__init__(**options)
        self.seen_loss = MeanMetric(sync_on_compute=False)  # no collective inside of the step

    def training_step(self, batch, batch_idx):
        if dist.get_rank() == 1:
            raise LookupError("a bug on rank 1 only")
        return super().training_step(batch, batch_idx)


def fail_on_one_rank(strategy):
    try:
        train("auto", strategy=strategy, num_ranks=2, kind=FailsOnOneRank)
    except LookupError as error:
        return str(error)


@pytest.mark.slow
def test_a_bug_on_one_rank_is_told_on_both_under_ddp():
    assert run_ranks(fail_on_one_rank, 2, "ddp", timeout_s=60) == [
        "rank 1 failed: a bug on rank 1 only",
        "a bug on rank 1 only",
    ]


def tell_the_bug():
    if fail_on_one_rank("fsdp2"):
        os.write(2, b"rank 1 knows its bug")
        os._exit(3)


@pytest.mark.slow
def test_a_bug_on_one_rank_is_raised_there_at_once_under_fsdp2_whose_ranks_wait_inside():
    with pytest.raises(RanksError) as raised:
        run_ranks(tell_the_bug, 2, timeout_s=60)
    assert raised.value.exit_codes[1] == 3
    assert "rank 1 knows its bug" in raised.value.outputs[1]


class FailingCollator(PadCollator):
    def __call__(self, samples):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise LookupError("rank 1 cannot read its sample")
        return super().__call__(samples)


def fail_to_collate():
    callback = BalanceCallback(max_tokens="auto", memory_limit_gib=LIMIT_GIB, lengths=LENGTHS)
    loader = token_loader(LENGTHS, 8)
    loader.collate_fn = FailingCollator()
    try:
        toys.trainer("ddp", 2, callbacks=[callback]).fit(Sensitive(), loader)
    except LookupError as error:
        return str(error)


@pytest.mark.slow
def test_a_batch_that_one_rank_cannot_make_is_told_on_both_under_ddp_with_buffers():
    results = run_ranks(fail_to_collate, 2, timeout_s=60)
    assert results == ["rank 1 failed: rank 1 cannot read its sample", "rank 1 cannot read its sample"]


class Hooks(Callback):
    """Names the hooks that were called before training began."""

    def __init__(self):
        self.called = []

    def on_before_backward(self, trainer, pl_module, loss):
        self.called.append(trainer.global_step)


def test_nothing_is_logged_and_no_callback_called_while_budgets_are_tried(tmp_path):
    hooks = Hooks()
    model, _ = train(
        "auto", callbacks=[hooks], logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1), log_every_n_steps=1
    )
    assert len(hooks.called) == model.num_calls == len(model.history)
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    steps = [line.split(",")[rows[0].split(",").index("step")] for line in rows[1:]]
    assert max(map(int, steps)) == 11  # 48 samples, 8 a step, 2 epochs


def test_a_resumed_run_keeps_the_budget_it_had(tmp_path, caplog):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    caplog.set_level("INFO")
    _, first = train("auto", callbacks=[saving], enable_checkpointing=True)
    assert "is the largest that fits" in caplog.text
    caplog.clear()
    resumed, second = train("auto", ckpt_path=tmp_path / "step=5.ckpt")
    assert "is the largest that fits" not in caplog.text
    assert second.max_tokens == first.max_tokens
    assert resumed.largest <= first.max_tokens


@pytest.mark.parametrize(("now", "factor"), [({"batch_size": 16}, 2), ({"batch_size": 4}, 1)], ids=["more", "fewer"])
def test_a_run_that_resumes_with_more_samples_in_a_step_looks_again(now, factor, tmp_path):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    plenty = {"options": {"memory_limit_gib": 8}}
    _, before = train("auto", callbacks=[saving], enable_checkpointing=True, max_steps=2, **plenty)
    _, resumed = train("auto", ckpt_path=tmp_path / "step=2.ckpt", max_steps=4, **plenty, **now)
    assert resumed.max_tokens == factor * before.max_tokens


def test_a_step_of_a_window_may_have_most_of_its_samples():
    _, alone = train("auto", options={"memory_limit_gib": 8})
    _, in_window = train("auto", options={"memory_limit_gib": 8, "lookahead": 2})
    assert in_window.max_tokens == 2 * alone.max_tokens


@pytest.mark.slow
def test_a_run_that_resumes_with_less_memory_looks_again(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    _, before = train("auto", callbacks=[saver], enable_checkpointing=True)
    less = {"memory_limit_gib": LIMIT_GIB * 0.8}
    _, fresh = train("auto", options=less)
    _, resumed = train("auto", options=less, ckpt_path=tmp_path / "step=2.ckpt")
    assert fresh.max_tokens < before.max_tokens
    assert resumed.max_tokens < before.max_tokens

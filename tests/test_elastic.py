"""An epoch goes on under any other plan: every sample once, in the order of the shuffle, on any number of ranks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback

from lightning_balance import BalanceCallback, BalancedBatchSampler, BalancedDataModuleMixin, plan_epoch
from lightning_balance.agreement import gather_objects
from lightning_balance.epoch import EpochPlan
from tests.distributed import run_ranks
from tests.stopping import StopAfter, StopAtStep
from tests.test_resume import gather as weight_of
from tests.toys import ScalarModel, equal_samples, loader, trainer

PLANS: tuple[dict[str, Any], ...] = (
    {"samples_per_step": 4, "num_ranks": 2},
    {"samples_per_step": 5, "num_ranks": 1, "num_slots": 3},
    {"samples_per_step": 4, "num_ranks": 4, "lookahead": 3},
    {"samples_per_step": 6, "num_ranks": 2, "max_tokens": 30},
    {"samples_per_step": 6, "num_ranks": 3, "max_tokens": 30, "lookahead": 2, "num_slots": 6},
    {"max_tokens": 60, "num_ranks": 2},
    {"max_tokens": 60, "num_ranks": 1, "num_slots": 2, "lookahead": 2},
)


def served(plan: EpochPlan, steps: Iterable[int]) -> list[int]:
    return [sample for step in steps for sample in plan.step(step).order.tolist()]


# --- plans ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=120)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    parts=st.lists(st.tuples(st.sampled_from(PLANS), st.floats(0, 1)), min_size=2, max_size=4),
    shuffle=st.booleans(),
)
def test_whatever_plans_follow_each_other_every_sample_is_served_once(
    lengths: list[int], parts: list[tuple[dict[str, Any], float]], shuffle: bool
) -> None:
    begin, samples = None, []
    for index, (options, share) in enumerate(parts):
        plan = plan_epoch(lengths, seed=5, epoch=2, shuffle=shuffle, begin=begin, **options)
        stop = plan.steps.start + round(share * len(plan.steps)) if index < len(parts) - 1 else plan.num_steps
        samples += served(plan, range(plan.steps.start, stop))
        begin = plan.progress(stop)
        assert begin.num_samples == len(samples)
        assert begin.num_steps == stop
        if stop < plan.num_steps:
            assert plan.locate(begin.num_micro_batches) == (stop, 0)
        else:
            assert begin.num_micro_batches == plan.num_micro_batches
    assert sorted(samples) == list(range(len(lengths)))
    assert plan.num_samples == len(lengths)


@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_the_rest_keeps_the_order_of_the_shuffle(before: dict[str, Any], stop: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 80)
    first = plan_epoch(lengths, seed=1, **before)
    rest = plan_epoch(lengths, seed=1, samples_per_step=3, num_ranks=2, begin=first.progress(stop))
    order = np.random.default_rng([1, 0]).permutation(80)
    left = order[~np.isin(order, served(first, range(stop)))]
    for index, step in enumerate(rest.steps):
        assert set(rest.step(step).order.tolist()) == set(left[3 * index : 3 * index + 3].tolist())


def test_samples_that_another_budget_leaves_out_are_not_served() -> None:
    lengths = [3, 40, 5, 6, 40, 2, 7, 8]
    first = plan_epoch(lengths, samples_per_step=2, num_ranks=1, shuffle=False)
    options: dict[str, Any] = {"num_ranks": 1, "max_tokens": 20, "oversize": "skip", "shuffle": False}
    rest = plan_epoch(lengths, samples_per_step=2, begin=first.progress(1), **options)
    assert served(rest, rest.steps) == [3, 2, 6, 5, 7]
    last = plan_epoch(lengths, samples_per_step=1, num_ranks=1, shuffle=False, begin=rest.progress(2))
    assert served(last, last.steps) == [5, 6, 7]  # what was skipped on the way stays so: the epoch has passed it
    assert rest.progress(2).num_places == 5


def test_a_bijective_shuffle_goes_on_as_well() -> None:
    lengths = np.full(2**21 + 9, 4)
    first = plan_epoch(lengths, samples_per_step=2**19, num_ranks=2, seed=1)
    rest = plan_epoch(lengths, samples_per_step=2**20, num_ranks=1, seed=1, begin=first.progress(3))
    samples = served(first, range(3)) + served(rest, rest.steps)
    assert np.array_equal(np.sort(samples), np.arange(len(lengths)))


def test_drop_last_leaves_out_the_tail_of_the_rest_but_never_all_of_it() -> None:
    lengths = [4] * 18
    first = plan_epoch(lengths, samples_per_step=4, num_ranks=1, drop_last=True)
    for samples_per_step, num_rest in ((8, 8), (16, 10)):
        rest = plan_epoch(
            lengths, samples_per_step=samples_per_step, num_ranks=1, drop_last=True, begin=first.progress(2)
        )
        assert len(served(rest, rest.steps)) == num_rest
    filled = plan_epoch(lengths, max_tokens=64, num_ranks=1, drop_last=True, begin=first.progress(2))
    assert len(served(filled, filled.steps)) == 10


def test_a_plan_has_only_its_own_steps_and_micro_batches() -> None:
    whole = plan_epoch([4] * 12, samples_per_step=2, num_ranks=1, num_slots=2)
    rest = plan_epoch([4] * 12, samples_per_step=4, num_ranks=2, begin=whole.progress(2))
    assert (rest.num_steps, rest.steps, rest.num_micro_batches) == (4, range(2, 4), 6)
    assert rest.locate(4) == (2, 0)
    with pytest.raises(IndexError, match=r"micro_batch_index must be in \[4, 6\), got 3"):
        rest.locate(3)
    with pytest.raises(IndexError, match=r"step must be in \[2, 4\), got 1"):
        rest.step(1)
    with pytest.raises(IndexError):
        whole.progress(7)


def test_plans_that_begin_elsewhere_have_other_digests() -> None:
    options: dict[str, Any] = {"samples_per_step": 2, "num_ranks": 1, "lookahead": 2}
    whole = plan_epoch([4] * 12, **options)
    digests = {plan_epoch([4] * 12, **options, begin=whole.progress(step)).digest for step in range(1, 5)}
    assert len(digests | {whole.digest}) == 5


# --- samplers ---------------------------------------------------------------------------------------------------------

SAMPLERS: tuple[dict[str, Any], ...] = (
    {"batch_size": 2, "num_replicas": 2},
    {"batch_size": 1, "num_replicas": 4, "num_slots": 2},
    {"max_tokens": 40, "num_replicas": 1, "num_slots": 2, "lookahead": 2},
    {"samples_per_step": 6, "max_tokens": 30, "num_replicas": 3},
)


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(SAMPLERS, 2)))
def test_a_state_goes_on_under_other_options(before: dict[str, Any], after: dict[str, Any]) -> None:
    lengths = np.random.default_rng(3).integers(1, 30, 47)
    running = BalancedBatchSampler(lengths, rank=0, **before)
    running.set_epoch(1)
    iterator = iter(running)
    position = running.plan.progress(3).num_micro_batches
    for _ in range(position):
        next(iterator)
    state = running.state_dict()
    ranks = [BalancedBatchSampler(lengths, rank=rank, **after) for rank in range(after["num_replicas"])]
    for rank in ranks:
        rank.load_state_dict(state)
        assert len(rank) == position + len(list(rank))
    plan = ranks[0].plan
    samples = [sample for rank in ranks for micro_batch in rank for sample in micro_batch]
    assert set(samples) | set(served(running.plan, range(3))) == set(range(47))
    assert sorted(served(plan, plan.steps) + served(running.plan, range(3))) == list(range(47))
    ranks[0].set_epoch(2)
    assert ranks[0].plan.steps.start == 0


def test_a_continued_epoch_goes_on_twice() -> None:
    """Stopped again inside a rest, under the rest's own options and under others."""
    lengths = np.random.default_rng(3).integers(1, 30, 47)
    one = BalancedBatchSampler(lengths, rank=0, num_replicas=2, batch_size=2, lookahead=3)
    first_state = one.state_at(2)
    two = BalancedBatchSampler(lengths, rank=0, num_replicas=1, batch_size=3, lookahead=2)
    two.load_state_dict(first_state)
    whole_rest = list(two)
    state = two.state_at(5)
    again = BalancedBatchSampler(lengths, rank=0, num_replicas=1, batch_size=3, lookahead=2)
    again.load_state_dict(state)
    assert list(again) == whole_rest[3:]
    third = BalancedBatchSampler(lengths, rank=0, num_replicas=1, batch_size=1)
    third.load_state_dict(state)
    done = served(one.plan, range(2)) + served(two.plan, range(2, 5))
    assert sorted(done + served(third.plan, third.plan.steps)) == list(range(47))


def test_an_epoch_that_is_over_is_over_under_any_options() -> None:
    one = BalancedBatchSampler([4] * 12, rank=0, num_replicas=2, batch_size=2)
    list(one)
    other = BalancedBatchSampler([4] * 12, rank=0, num_replicas=1, batch_size=1)
    other.load_state_dict(one.state_dict())
    assert list(other) == []
    other.set_epoch(1)
    assert sorted(itertools.chain(*other)) == list(range(12))


# --- training ---------------------------------------------------------------------------------------------------------

DATA = equal_samples(np.random.default_rng(7).integers(1, 12, 24).tolist())


@dataclass
class Part:
    """What one run of several trained; ``served`` over all ranks, with the copies that fillers are."""

    served: list[list[int]]
    epochs: list[int]
    num_steps: int
    weight: float
    num_validations: int
    estimated_steps: int

    def samples(self, epoch: int) -> set[int]:
        batches = zip(self.served, self.epochs, strict=True)
        return {sample for batch, of_epoch in batches if of_epoch == epoch for sample in batch}


def train(
    options: dict[str, Any],
    *callbacks: Callback,
    place: tuple[str, int] = ("single", 1),
    accumulate: int = 1,
    batch_size: int = 2,
    checkpoint: Path | None = None,
    num_workers: int = 0,
    model: ScalarModel | None = None,
    **arguments: Any,
) -> Part:
    model = model or ScalarModel(lr=0.01)
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, seed=3, **options)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulate, **arguments}
    used = trainer(*place, callbacks=[balance, *callbacks], **arguments)
    asks = AsksForSteps()
    used.callbacks.append(asks)  # type: ignore[attr-defined]
    data = loader(DATA, batch_size, shuffle=True, num_workers=num_workers)
    used.fit(model, data, loader(DATA, 12), ckpt_path=checkpoint)
    served, epochs = [], []
    for rank_served, rank_epochs in gather_objects((model.served, model.epochs)):
        served += rank_served
        epochs += rank_epochs
    return Part(served, epochs, used.global_step, weight_of(model), model.num_validations, asks.num_steps)


class AsksForSteps(Callback):
    num_steps = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.num_steps = trainer.estimated_stepping_batches


def train_rank(options: dict[str, Any], stop: int | None, path: Path, arguments: dict[str, Any]) -> Part:
    return train(options, *([] if stop is None else [StopAtStep(stop, path)]), **arguments)


def train_on(ranks: int, options: dict[str, Any], stop: int | None, path: Path, **arguments: Any) -> Part:
    arguments["place"] = (arguments.pop("strategy", "ddp"), ranks)
    return run_ranks(train_rank, ranks, options, stop, path, arguments, timeout_s=120)[0]


def check_trained_once(parts: list[Part]) -> None:
    """Parts of one epoch, then a whole one: no part trains what another did, and together they train everything."""
    in_epoch_0 = [part.samples(0) for part in parts]
    assert set.union(*in_epoch_0) == set(range(24))
    assert sum(map(len, in_epoch_0)) == 24
    assert parts[-1].samples(1) == set(range(24))


@pytest.mark.parametrize("options", [{}, {"max_tokens": 30}], ids=str)
def test_two_ranks_then_one_then_four_train_what_one_run_does(options: dict[str, Any], tmp_path: Path) -> None:
    """The same samples in every step, so that even the weights are those of the run that never stopped."""
    options = {"samples_per_step": 4, **options}
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    whole = train(options)
    parts = [train_on(2, options, 2, one), train(options, StopAtStep(3, two), checkpoint=one)]
    parts.append(train_on(4, options, None, two, checkpoint=two))
    check_trained_once(parts)
    assert [part.num_steps for part in parts] == [2, 3, whole.num_steps]
    assert {part.estimated_steps for part in [*parts, whole]} == {whole.num_steps}
    assert parts[-1].weight == pytest.approx(whole.weight, rel=1e-6)
    assert parts[-1].num_validations == whole.num_validations == 2


def test_another_number_of_fsdp2_ranks_continues(tmp_path: Path) -> None:
    options = {"samples_per_step": 4, "max_tokens": 30}
    path = tmp_path / "saved"
    whole = train(options)
    parts = [train_on(2, options, 2, path, strategy="fsdp2")]
    parts.append(train_on(1, options, None, path, strategy="fsdp2", checkpoint=path))
    check_trained_once(parts)
    assert parts[-1].num_steps == whole.num_steps
    assert parts[-1].weight == pytest.approx(whole.weight, rel=1e-6)


def test_the_rest_of_one_rank_is_served_once_by_two(tmp_path: Path) -> None:
    """HF#40245: 16 samples, batch 4, one step on 1 rank, then 2 ranks: samples 4..15 once."""
    path = tmp_path / "saved.ckpt"
    run_ranks(train_sixteen, 1, 1, path)
    assert sorted(run_ranks(train_sixteen, 2, None, path)[0]) == list(range(4, 16))


def train_sixteen(stop: int | None, path: Path) -> list[int]:
    model = ScalarModel()
    callbacks = [BalanceCallback(print_summary=False), *([] if stop is None else [StopAtStep(stop, path)])]
    trainer("ddp", int(os.environ["WORLD_SIZE"]), callbacks=callbacks).fit(
        model, loader(equal_samples([3] * 16), 4), ckpt_path=None if stop else path
    )
    return [sample for served in gather_objects(model.served) for batch in served for sample in batch]


MODES: dict[str, dict[str, Any]] = {
    "rebalance": {},
    "token budget": {"max_tokens": 26},
    "filled": {"max_tokens": 26, "step_unit": "tokens"},
    "lookahead": {"lookahead": 3},
    "skip": {"max_tokens": 40, "oversize": "skip", "lookahead": 2},
}


@pytest.mark.parametrize("after", MODES)
@pytest.mark.parametrize("before", MODES)
def test_every_mode_continues_every_other(before: str, after: str, tmp_path: Path) -> None:
    for stop in (1, 2):
        path = tmp_path / f"{stop}.ckpt"
        first = train(MODES[before], StopAtStep(stop, path), accumulate=2)
        rest = train(MODES[after], checkpoint=path, accumulate=3, batch_size=1)
        check_trained_once([first, rest])
        assert rest.estimated_steps == rest.num_steps
        assert rest.num_validations == 2


def test_workers_may_be_others(tmp_path: Path) -> None:
    options = {"max_tokens": 26}
    whole = train(options)
    path = tmp_path / "saved.ckpt"
    parts = [train(options, StopAtStep(2, path), num_workers=2), train(options, checkpoint=path)]
    check_trained_once(parts)
    assert parts[0].served + parts[1].served == whole.served


def test_a_window_that_was_not_finished_is_trained_under_the_other_plan(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    options = {"samples_per_step": 6}
    whole = train({**options, "max_tokens": 26})
    train({**options, "max_tokens": 26}, StopAfter(4, path))  # the second step has begun
    rest = train({**options, "max_tokens": 40}, checkpoint=path)
    assert rest.num_steps == whole.num_steps
    assert rest.weight == pytest.approx(whole.weight, rel=1e-6)


@pytest.mark.parametrize("limit", [5, 0.5])
def test_a_limit_of_batches_counts_those_before_the_restart(limit: float, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    train({}, StopAtStep(3, path), batch_size=2, limit_train_batches=limit)
    rest = train({}, checkpoint=path, batch_size=4, limit_train_batches=limit)
    # 12 batches of 2, 3 of them done; then 3 + 5 batches: the limit is 5, or 0.5 * 8 = 4. Later epochs have 6 of 4.
    in_epoch = [rest.epochs.count(epoch) for epoch in (0, 1)]
    assert in_epoch == ([2, 5] if limit == 5 else [1, 3])
    assert rest.estimated_steps == rest.num_steps
    assert rest.num_validations == 2


def test_a_limit_before_the_place_of_the_restart_ends_the_epoch_after_one_step(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    train({}, StopAtStep(5, path), batch_size=2)
    rest = train({}, checkpoint=path, accumulate=2, limit_train_batches=3)
    assert [rest.epochs.count(epoch) for epoch in (0, 1)] == [2, 3]
    assert rest.estimated_steps == rest.num_steps
    assert rest.num_validations == 2


class Balanced(BalancedDataModuleMixin, LightningDataModule):
    """A data module that brings its own balancing."""

    def train_dataloader(self) -> Any:
        return loader(DATA, 2, shuffle=True)


def test_a_data_module_with_the_mixin_continues_too(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    models = []
    for options, stop, checkpoint in (
        ({"max_tokens": 26, "lookahead": 2}, [StopAtStep(3, path)], None),
        ({"max_tokens": 60}, [], path),
    ):
        models.append(ScalarModel())
        data = Balanced(print_summary=False, seed=3, samples_per_step=4, **options)
        trainer(callbacks=stop, max_epochs=2).fit(models[-1], datamodule=data, ckpt_path=checkpoint)
    first, rest = ([sample for batch in model.served for sample in batch] for model in models)
    assert sorted(first + rest) == sorted([*range(24), *range(24)])
    assert set(models[0].epochs) == {0}


def test_what_changed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "saved.ckpt"
    train({"max_tokens": 26}, StopAtStep(2, path))
    with caplog.at_level("INFO"):
        train({"max_tokens": 40}, checkpoint=path)
    assert "epoch 0 goes on after 4 of its samples with max_tokens 26 -> 40" in caplog.text


def test_an_epoch_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    data = loader(equal_samples([2, 2, 9, 9]), 2)
    trainer(callbacks=[BalanceCallback(print_summary=False), StopAtStep(1, path)]).fit(ScalarModel(), data)
    skipping = BalanceCallback(print_summary=False, max_tokens=5, oversize="skip")
    with pytest.raises(ValueError, match="nothing is left of epoch 0: every sample that it has not trained is longer"):
        trainer(callbacks=[skipping]).fit(ScalarModel(), data, ckpt_path=path)


def resume_elsewhere(paths: list[Path]) -> str:
    rank = int(os.environ["RANK"])
    try:
        train({"samples_per_step": 4}, place=("ddp", 2), checkpoint=paths[rank])
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_resume_from_other_checkpoints_stop_with_one_sentence(tmp_path: Path) -> None:
    paths = [tmp_path / "1.ckpt", tmp_path / "3.ckpt"]
    for stop, path in zip((1, 3), paths, strict=True):
        train_on(2, {"samples_per_step": 4}, stop, path)
    begun = time.monotonic()
    sentences = run_ranks(resume_elsewhere, 2, paths, timeout_s=60)
    assert time.monotonic() - begun < 30
    assert (
        sentences
        == [
            "the number of batches done differs between ranks: rank 0 has 1, rank 1 has 3;"
            " every rank needs the same checkpoint"
        ]
        * 2
    )

"""The gradient of an optimizer step is that of the mean over all its samples or tokens, whatever the cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from lightning_balance import BalanceCallback
from tests.distributed import RanksError, run_ranks
from tests.toys import IGNORED, ScalarModel, TokenDataset, loader, trainer

NEEDS_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="FSDPStrategy (FSDP1) needs an accelerator")
PLACES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 2),
    pytest.param("fsdp1", max(1, min(2, torch.cuda.device_count())), marks=NEEDS_GPUS),
]
CUTS: list[dict[str, Any]] = [{}, {"max_tokens": 6}, {"max_tokens": 12}, {"max_tokens": 9, "step_unit": "tokens"}]


def random_dataset(seed: int, num_samples: int) -> TokenDataset:
    """Lengths of a long tail; about a third of the labels are ignored, never all of a sample."""
    rng = np.random.default_rng(seed)
    samples: list[list[float | None]] = []
    for length in np.clip(rng.lognormal(1, 0.7, num_samples), 1, 9).astype(int):
        values: list[float | None] = [round(float(v), 3) for v in rng.normal(size=length)]
        for position in range(1, length):
            if rng.random() < 1 / 3:
                values[position] = None
        samples.append(values)
    return TokenDataset(samples)


def reference_gradient(samples: Sequence[Sequence[float | None]], reduction: str) -> float:
    """What the step's gradient has to be, from its samples alone."""
    tokens = [[x for x in sample if x is not None] for sample in samples]
    if reduction == "token_mean":
        flat = list(itertools.chain(*tokens))
        return sum(flat) / len(flat) if flat else 0.0
    per_sample = [sum(values) / len(values) for values in tokens]
    return sum(per_sample) if reduction == "sum" else sum(per_sample) / len(per_sample)


def fit(
    dataset: TokenDataset,
    strategy: str,
    num_ranks: int,
    *,
    batch_size: int = 2,
    accumulate: int = 1,
    reduction: str = "token_mean",
    shuffle: bool = True,
    model: ScalarModel | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    **options: Any,
) -> ScalarModel:
    model = model or ScalarModel(reduction)
    callback = BalanceCallback(loss_reduction=reduction, print_summary=False, **options)
    arguments = {"accumulate_grad_batches": accumulate, "callbacks": [callback], **(trainer_arguments or {})}
    trainer(strategy, num_ranks, **arguments).fit(model, loader(dataset, batch_size, shuffle=shuffle))
    return model


def run_many_cuts(strategy: str, num_ranks: int, seeds: Sequence[int]) -> list[tuple[list[float], str]]:
    """Gradients and reduction of fits with random data and cuts; the callback's seed is the data's."""
    results = []
    for seed in seeds:
        for cut, reduction, accumulate in itertools.product(
            CUTS, ("token_mean", "sample_mean", "sum"), (1, 3) if seed == seeds[0] else (2,)
        ):
            data = random_dataset(seed, 17)
            model = fit(
                data, strategy, num_ranks, reduction=reduction, accumulate=accumulate, seed=seed, batch_size=3, **cut
            )
            served = model.served
            results.append((model.gradients, reduction, accumulate, cut, served, seed))
    return results  # type: ignore[return-value]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLACES)
def test_any_cut_gives_the_gradient_of_the_whole_step(strategy: str, num_ranks: int) -> None:
    ranks = run_ranks(run_many_cuts, num_ranks, strategy, num_ranks, [1, 2], timeout_s=300)
    for case, (gradients, reduction, accumulate, cut, _, seed) in enumerate(ranks[0]):
        data = random_dataset(seed, 17)
        order = np.random.default_rng([seed, 0]).permutation(len(data))
        if "step_unit" not in cut:  # a step is a slice of the seeded shuffle
            per_step = 3 * accumulate * num_ranks
            steps = [order[i : i + per_step] for i in range(0, len(order), per_step)]
            expected = [reference_gradient([data.samples[i] for i in step], reduction) for step in steps]
            assert gradients == pytest.approx(expected, rel=1e-5, abs=1e-6), (cut, reduction, accumulate)
        assert all(other[case][0] == gradients for other in ranks), "ranks disagree about the gradient"
        served = sorted(index for rank in ranks for micro_batch in rank[case][4] for index in micro_batch)
        assert set(served) == set(range(len(data)))


def run_without_weighting(strategy: str, num_ranks: int) -> tuple[float, float]:
    data = TokenDataset([[1.0], [2.0], [3.0], [10.0, 10.0, 10.0, 10.0]])
    plain = ScalarModel()
    trainer(strategy, num_ranks).fit(plain, loader(data, 4 // num_ranks))
    return plain.gradients[0], fit(data, strategy, num_ranks, batch_size=4 // num_ranks, shuffle=False).gradients[0]


def test_without_weighting_the_gradient_is_wrong_so_the_tests_above_can_fail() -> None:
    plain, balanced = run_ranks(run_without_weighting, 2, "ddp", 2)[0]
    assert balanced == pytest.approx(46 / 7, rel=1e-6)
    assert abs(plain - 46 / 7) > 0.5


def run_reported_cases(strategy: str, num_ranks: int) -> dict[str, Any]:
    one_to_ten = TokenDataset([[1.0], [2.0], [3.0], [10.0]])
    split = TokenDataset([[1.0, 2.0, 3.0], [10.0]])
    found: dict[str, Any] = {}
    # HF#34191, HF#34242: token mean over the window and over ranks
    for accumulate in (1, 2):
        batch_size = max(1, 2 // (accumulate * num_ranks))
        found[f"token mean, accumulate {accumulate}"] = fit(
            split, strategy, num_ranks, batch_size=batch_size, accumulate=accumulate
        ).gradients
    # verl#141: any cut of [1, 2, 3, 10] gives 4.0
    for max_tokens in (1, 2, 3, 4):
        found[f"cut to {max_tokens}"] = fit(
            one_to_ten, strategy, num_ranks, samples_per_step=4, max_tokens=max_tokens
        ).gradients
    # prime-rl#2562
    ones = TokenDataset([[1.0] * 3, [10.0]])
    found["ones and ten"] = fit(ones, strategy, num_ranks, batch_size=2 // num_ranks).gradients
    # PL#19987: the last short window
    five = TokenDataset([[1.0]] * 5)
    found["last short window"] = fit(five, strategy, num_ranks, batch_size=1, accumulate=2).gradients
    # pytorch#70348: all labels ignored, here and everywhere
    some = TokenDataset([[1.0, 2.0, 3.0], [None, None, None]])
    found["all ignored on one rank"] = fit(some, strategy, num_ranks, samples_per_step=2, batch_size=1).gradients
    none = TokenDataset([[None], [None]])
    found["all ignored everywhere"] = fit(none, strategy, num_ranks, samples_per_step=2, batch_size=1).gradients
    # PL#9785: fewer samples than ranks
    found["one sample"] = fit(TokenDataset([[4.0, 6.0]]), strategy, num_ranks, batch_size=1).gradients
    # PL#20404: 5 micro-batches on 2 ranks
    found["five micro-batches"] = fit(
        TokenDataset([[float(i)] * 4 for i in range(5)]), strategy, num_ranks, samples_per_step=5, max_tokens=4
    ).gradients
    # HF#47340: the tail's gradient is the mean over its two samples
    tail = TokenDataset([[float(i)] for i in range(18)])
    found["tail"] = fit(tail, strategy, num_ranks, samples_per_step=16, batch_size=8, shuffle=False).gradients
    return found


@pytest.mark.parametrize(("strategy", "num_ranks"), PLACES)
def test_reported_cases_have_the_right_gradient(strategy: str, num_ranks: int) -> None:
    for found in run_ranks(run_reported_cases, num_ranks, strategy, num_ranks, timeout_s=240):
        assert found.pop("ones and ten") == pytest.approx([13 / 4])
        assert found.pop("last short window") == pytest.approx([1.0] * (3 if num_ranks == 1 else 2))
        assert found.pop("all ignored on one rank") == pytest.approx([2.0])
        assert found.pop("all ignored everywhere") == [0.0]
        assert found.pop("one sample") == pytest.approx([5.0])
        assert found.pop("five micro-batches") == pytest.approx([2.0])
        assert found.pop("tail") == pytest.approx([7.5, 16.5])
        for name, gradients in found.items():
            assert gradients == pytest.approx([4.0]), name


class ConstantLoss(ScalarModel):
    """Returns 2.0 whatever the weight, and keeps the very tensor it returned."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * 0 + 2.0
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(batch["x"]))
        self.returned = loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged = self.trainer.callback_metrics["train_loss_step"].item() if batch_idx else 2.0
        assert self.returned.item() == 2.0


def run_constant_loss(strategy: str, num_ranks: int) -> list[float]:
    data = TokenDataset([[1.0] * n for n in (5, 1, 2, 2, 3, 1, 1, 4)])
    values = []
    for accumulate in (1, 2, 4):
        model = ConstantLoss()
        fit(data, strategy, num_ranks, accumulate=accumulate, batch_size=1, model=model)
        values += [model.logged, model.trainer.callback_metrics["train_loss_epoch"].item()]
    return values


@pytest.mark.parametrize(("strategy", "num_ranks"), PLACES[:2])
def test_the_logged_loss_is_not_the_scaled_one(strategy: str, num_ranks: int) -> None:
    for values in run_ranks(run_constant_loss, num_ranks, strategy, num_ranks):
        assert values == pytest.approx([2.0] * 6)


class Regularised(ScalarModel):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.5 * sum(p.square().sum() for p in self.parameters())


def run_regularised(strategy: str, num_ranks: int) -> list[float]:
    data = TokenDataset([[1.0], [2.0], [3.0], [10.0]])
    return [
        fit(data, strategy, num_ranks, samples_per_step=4, model=Regularised(), max_tokens=max_tokens).gradients[0]
        for max_tokens in (1, 2, 4)
    ]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLACES)
def test_a_regulariser_keeps_its_strength_whatever_the_cut(strategy: str, num_ranks: int) -> None:
    for gradients in run_ranks(run_regularised, num_ranks, strategy, num_ranks):
        assert gradients == pytest.approx([4.0 + 1.0] * 3)  # weight 1: gradient of w^2 / 2 is 1


class NormSeen(ScalarModel):
    """Keeps the gradient after clipping and whatever the loop clipped by."""

    def configure_gradient_clipping(self, optimizer: Any, **arguments: Any) -> None:
        self.clip_gradients(optimizer, **arguments)
        self.clipped = self.gradient()


def run_clipping(strategy: str, num_ranks: int) -> list[float]:
    data = TokenDataset([[1.0], [2.0], [3.0], [10.0]])
    values = []
    for clip in (1.0, 100.0):
        model = NormSeen()
        fit(
            data, strategy, num_ranks, samples_per_step=4, max_tokens=2, model=model,
            trainer_arguments={"gradient_clip_val": clip},
        )  # fmt: skip
        values.append(model.clipped)
    return values


@pytest.mark.parametrize(("strategy", "num_ranks"), PLACES[:2])
def test_clipping_sees_the_true_gradient(strategy: str, num_ranks: int) -> None:
    for clipped, unclipped in run_ranks(run_clipping, num_ranks, strategy, num_ranks):
        assert clipped == pytest.approx(1.0, rel=1e-5)
        assert unclipped == pytest.approx(4.0)


class SkipsOnOneRank(ScalarModel):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        return None if self.trainer.global_rank == 1 else super().training_step(batch, batch_idx)


def run_skipping_rank() -> None:
    fit(TokenDataset([[1.0]] * 4), "ddp", 2, model=SkipsOnOneRank())


def test_a_rank_that_skips_its_step_is_an_error_not_a_hang() -> None:
    with pytest.raises(RanksError, match="returning None in distributed training is not supported"):
        run_ranks(run_skipping_rank, 2, timeout_s=60)


class NoGraph(ScalarModel):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return torch.tensor(1.0)


def test_a_loss_without_a_graph_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="loss without a graph"):
        fit(TokenDataset([[1.0]] * 4), "single", 1, model=NoGraph())


def test_a_user_function_counts_the_units() -> None:
    seed_everything(0)
    data = TokenDataset([[1.0], [2.0, 2.0], [9.0, 9.0, 9.0]])
    model = ScalarModel("sample_mean")
    callback = BalanceCallback(loss_reduction=lambda batch: len(batch["x"]), max_tokens=3, samples_per_step=3)
    trainer(callbacks=[callback]).fit(model, loader(data, 1))
    assert model.gradients == pytest.approx([4.0])
    assert IGNORED < 0


class DoubleModel(ScalarModel):
    """Trains in double precision."""

    def __init__(self) -> None:
        super().__init__("token_mean")
        self.double()

    def token_losses(self, batch: dict[str, Tensor]) -> Tensor:
        return super().token_losses({"x": batch["x"].double()})


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_gradients_in_double_precision_are_exact_to_it(options: dict[str, Any]) -> None:
    data = TokenDataset([[1.0] * length for length in (1, 2, 3, 3, 5, 6)])
    model = fit(data, "single", 1, model=DoubleModel(), batch_size=3, accumulate=2, **options)
    assert model.gradients == pytest.approx([1.0] * len(model.gradients), rel=1e-14)


class NamesItTwice(ScalarModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.layer.parameters(), *self.layer.parameters()], lr=0.0)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_the_optimizer_names_twice_is_corrected_once() -> None:
    data = random_dataset(0, 17)
    once, twice = (
        fit(data, "auto", 1, samples_per_step=8, max_tokens=30, model=model).gradients
        for model in (ScalarModel(), NamesItTwice())
    )
    assert twice == pytest.approx(once, rel=1e-6)

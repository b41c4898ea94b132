"""Metrics and logged means of a balanced evaluation are those of every sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score, BinaryPrecision
from torchmetrics.retrieval import RetrievalMRR

from lightning_balance import BalanceCallback
from lightning_balance.agreement import gather_objects
from tests.distributed import run_ranks
from tests.evaluation.toys import Evaluates, values_loader
from tests.toys import trainer

FIRST = 1.0  # the value of sample 0: a copy of it counts in every figure
RAGGED = [3, 1, 4, 1, 5, 9, 2]
CASES: dict[str, tuple[list[int], int | None]] = {
    "seven": (RAGGED, None),
    "alone": (RAGGED, 4),  # most samples have a micro-batch of their own: 7 on 2 ranks leave a filler
    "two": ([4, 2], None),
    "one": ([3], None),  # the second rank has nothing but a filler
    "long tail": ([1] * 20 + [50], 50),
}


def expected(num_values: int) -> dict[str, float]:
    value = FIRST + torch.arange(float(num_values))
    score, target = torch.sigmoid(value - 3), (value % 2).long()
    once = {
        "mean": value.mean(), "own_size": value.mean(), "mean_value": value.mean(), "by_step_epoch": value.mean(),
        "largest": value.max(), "smallest": value.min(), "total": value.sum(), "num_values": float(num_values),
        "area": BinaryAUROC()(score, target),
        "ranked": RetrievalMRR()(score, target, indexes=(value // 3).long()),
    }  # fmt: skip
    for metric in (BinaryAccuracy(), BinaryF1Score(), BinaryPrecision()):
        once[type(metric).__name__] = metric(score, target)
    return {name: float(found) for name, found in once.items()}


def evaluate(strategy: str, num_ranks: int, lengths: list[int], budget: int | None, stage: str) -> Any:
    """What one rank saw in two runs, and what was logged."""
    balance = BalanceCallback(stages=[stage], eval_max_tokens=budget)
    used = trainer(strategy, num_ranks, callbacks=[balance], num_sanity_val_steps=0)
    module = Evaluates()
    run = used.validate if stage == "validate" else used.test
    found = []
    for _ in range(2):
        module.seen.clear()
        logged = run(module, values_loader(lengths, first=FIRST), verbose=False)[0]
        found.append((logged, module.collected, list(module.seen)))
    return gather_objects(found)


def check(of_ranks: Any, lengths: list[int], budget: int | None) -> None:
    for run in range(2):
        for logged, collected, _ in (of_rank[run] for of_rank in of_ranks):
            for name, value in expected(len(lengths)).items():
                assert logged[name] == pytest.approx(value, rel=1e-6), name
            assert collected == [FIRST + index for index in range(len(lengths))]
        counts = {len(of_rank[run][2]) for of_rank in of_ranks}
        assert len(counts) == 1  # as many micro-batches on every rank
        served = [[int(value - FIRST) for value in values] for rank in of_ranks for _, values in rank[run][2]]
        if budget is not None:
            sizes = [len(samples) * max(lengths[sample] for sample in samples) for samples in served]
            assert all(size <= budget or len(samples) == 1 for size, samples in zip(sizes, served, strict=True))
        assert {sample for samples in served for sample in samples} == set(range(len(lengths)))


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("case", CASES)
def test_every_sample_counts_once(case: str, stage: str) -> None:
    lengths, budget = CASES[case]
    check(evaluate("single", 1, lengths, budget, stage), lengths, budget)


def evaluate_all(strategy: str) -> list[Any]:
    return [
        evaluate(strategy, 2, lengths, budget, stage)
        for lengths, budget in CASES.values()
        for stage in ("validate", "test")
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_sample_counts_once_on_two_ranks(strategy: str) -> None:
    found = iter(run_ranks(evaluate_all, 2, strategy, timeout_s=120)[0])
    for lengths, budget in CASES.values():
        for _ in ("validate", "test"):
            check(next(found), lengths, budget)

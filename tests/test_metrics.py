"""Each metric: the function against numpy, the class against the function, two processes against one."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

import lightning_balance
from lightning_balance.efficiency import cost_spread, pad_efficiency
from lightning_balance.memory import GIB
from lightning_balance.metrics import CostSpread, PadEfficiency, PeakMemory
from tests.allocator import Allocator
from tests.distributed import run_ranks

REAL = np.random.default_rng(0).integers(1, 500, 40)
PADDED = REAL + np.random.default_rng(1).integers(0, 300, 40)
COSTS = np.random.default_rng(2).gamma(2.0, 100.0, (40, 4))

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
before_update = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


def test_the_functions_agree_with_numpy() -> None:
    assert pad_efficiency(REAL, PADDED) == REAL.sum() / PADDED.sum()
    expected = np.mean((COSTS.max(axis=1) - COSTS.min(axis=1)) / COSTS.mean(axis=1))
    assert cost_spread(COSTS) == pytest.approx(expected)


def test_pad_efficiency_of_many_updates_is_the_ratio_of_sums() -> None:
    metric = PadEfficiency()
    for real, padded in zip(REAL, PADDED, strict=True):
        metric.update(int(real), int(padded))
    assert float(metric.compute()) == pytest.approx(pad_efficiency(REAL, PADDED))


def test_pad_efficiency_takes_counts_that_are_still_tensors() -> None:
    metric = PadEfficiency()
    metric.update(torch.from_numpy(REAL[:20]), torch.from_numpy(PADDED[:20]))
    metric.update(torch.tensor(True).new_ones(7), torch.tensor(8.0))  # a mask, and a float count
    expected = pad_efficiency(REAL[:20].sum() + 7, PADDED[:20].sum() + 8)
    assert float(metric.compute()) == pytest.approx(expected)


def test_pad_efficiency_stays_exact_beyond_32_bit_counts() -> None:
    metric = PadEfficiency()
    for _ in range(3):
        metric.update(3 * 2**40 + 1, 2**42)
    assert int(metric.real_tokens) == 9 * 2**40 + 3


@pytest.mark.parametrize("kind", [np.float16, np.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8])
def test_pad_efficiency_stays_exact_for_counts_of_few_bits(kind: Any) -> None:
    metric, size = PadEfficiency(), 2**17 + 1
    ones = torch.ones(size, dtype=kind) if isinstance(kind, torch.dtype) else np.ones(size, kind)
    metric.update(ones, size)
    assert int(metric.real_tokens) == size


def test_pad_efficiency_refuses_more_real_than_padded_tokens() -> None:
    with pytest.raises(ValueError, match="between 0 and padded_tokens, got 5 of 4"):
        PadEfficiency().update(5, 4)


@pytest.mark.parametrize("kind", [int, np.int64, np.array, torch.tensor, float, lambda count: [count, 0]])
def test_pad_efficiency_refuses_every_kind_of_number_alike(kind: Any) -> None:
    metric = PadEfficiency()
    with pytest.raises(ValueError, match="between 0 and padded_tokens, got 7 of 3"):
        metric.update(kind(7), 3)
    with pytest.raises(ValueError, match="real_tokens must be whole numbers of at least 0, got -1"):
        metric.update(kind(-1), kind(3))
    metric.update(kind(3), kind(4))
    assert float(metric.compute()) == 0.75


@pytest.mark.parametrize(
    ("padded", "error", "sentence"),
    [
        (10.5, ValueError, "padded_tokens must be whole numbers of at least 0, got 10.5"),
        (torch.tensor([10.25, 0.75]), ValueError, "padded_tokens must be whole numbers of at least 0, got 10.25"),
        ([6.0, 10.5, 0.5], ValueError, "padded_tokens must be whole numbers of at least 0, got 10.5"),
        ([-1, 8], ValueError, "padded_tokens must be whole numbers of at least 0, got -1"),
        (torch.tensor([8, -1]), ValueError, "padded_tokens must be whole numbers of at least 0, got -1"),
        (float("nan"), ValueError, "padded_tokens must be whole numbers of at least 0, got nan"),
        ([5.0, float("inf")], ValueError, "padded_tokens must be whole numbers of at least 0, got inf"),
        ("ten", TypeError, "padded_tokens must be a count or an array of counts, got 'ten'"),
        (None, TypeError, "padded_tokens must be a count or an array of counts, got None"),
        (10**20, TypeError, "padded_tokens must be a count or an array of counts, got 100000000000000000000"),
    ],
)
def test_pad_efficiency_counts_nothing_of_what_it_refuses(padded: Any, error: Any, sentence: str) -> None:
    metric = PadEfficiency()
    with pytest.raises(error, match=re.escape(sentence)):
        metric.update(5, padded)
    assert (int(metric.real_tokens), int(metric.padded_tokens)) == (0, 0)


def test_pad_efficiency_does_not_read_what_is_on_an_accelerator() -> None:
    metric = PadEfficiency().to("meta")  # a device whose values cannot be read
    metric.update(torch.ones(3, device="meta"), torch.ones(3, device="meta"))
    assert metric.real_tokens.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_cost_spread_takes_every_type_of_tensor(dtype: torch.dtype) -> None:
    metric = CostSpread()
    metric.update(torch.tensor([3, 1], dtype=dtype))
    assert float(metric.compute()) == 1.0


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_cost_spread_refuses_what_is_no_cost(cost: float) -> None:
    metric = CostSpread()
    metric.update([3.0, 1.0])
    with pytest.raises(ValueError, match="costs must be"):
        metric.update([cost, 1.0])
    assert float(metric.compute()) == 1.0


def test_cost_spread_weighs_every_synchronisation_alike() -> None:
    metric = CostSpread()
    metric.update(COSTS[0])
    metric.update(COSTS[1:10].reshape(3, 3, 4))
    metric.update(torch.from_numpy(COSTS[10:]))
    metric.update(np.empty((0, 4)))
    assert float(metric.compute()) == pytest.approx(cost_spread(COSTS))


def test_cost_spread_does_not_drift_over_many_updates() -> None:
    metric = CostSpread()
    for _ in range(20_000):
        metric.update([1.05, 0.95])
    assert float(metric.compute()) == pytest.approx(cost_spread([1.05, 0.95]), rel=1e-6)


def test_forward_returns_the_batch_value_and_keeps_the_sum() -> None:
    metric = PadEfficiency()
    assert [float(metric(1, 2)), float(metric(2, 2)), float(metric.compute())] == [0.5, 1.0, 0.75]


@before_update
@pytest.mark.parametrize("metric", [PadEfficiency(), CostSpread(), PeakMemory(), PeakMemory(source="rss")])
def test_compute_before_update_and_after_reset_is_nan(metric: Any) -> None:
    assert metric.compute().isnan()
    metric.reset()
    assert metric.compute().isnan()


@before_update
@pytest.mark.parametrize("metric", [PadEfficiency(), CostSpread(), PeakMemory(source="rss")])
def test_states_are_saved_only_when_asked_and_come_back(metric: Any) -> None:
    arguments: dict[type, tuple[Any, ...]] = {PadEfficiency: (3, 4), CostSpread: ([3.0, 1.0],), PeakMemory: ()}
    metric.update(*arguments[type(metric)])
    assert metric.state_dict() == {}
    metric.persistent(True)
    restored = copy.deepcopy(metric)
    restored.reset()
    restored.load_state_dict(metric.state_dict())
    assert restored.compute() == metric.compute()
    assert pickle.loads(pickle.dumps(metric)).compute() == metric.compute()


def test_rss_says_its_name_and_window() -> None:
    metric = PeakMemory(source="rss")
    metric.update()
    assert metric.available
    assert metric.log_key == "peak_rss_gib"
    assert metric.window == "since the process started"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="shows what happens without an accelerator")
@before_update
def test_accelerator_peak_is_absent_without_an_accelerator() -> None:
    metric = PeakMemory()
    metric.update()
    assert not metric.available
    assert metric.compute().isnan()
    assert metric.log_key == "peak_memory_gib"


@needs_gpu
def test_accelerator_peak_covers_the_window_it_says() -> None:
    metric = PeakMemory(restart_window=True)
    torch.zeros(1, device="cuda")
    metric.reset()
    block = torch.empty(GIB // 4, dtype=torch.uint8, device="cuda")
    del block
    metric.update()
    metric.update()  # a window in which nothing was allocated
    assert 0.25 <= float(metric.compute()) < 0.3
    metric.reset()
    metric.update()
    assert float(metric.compute()) < 0.05
    assert metric.window == "since the last reset of this metric"


@pytest.mark.parametrize("wrap", [lambda metric: metric, lambda metric: MetricCollection({"peak": metric})])
def test_forward_returns_the_peak_since_the_last_update(wrap: Any, allocator: Allocator) -> None:
    metric = PeakMemory(restart_window=True)
    call = wrap(metric)
    values = []
    for gib in (5, 7, 2):
        allocator.use(gib)
        value = call()
        values.append(float(value["peak"] if isinstance(value, dict) else value))
    assert [*values, float(metric.compute())] == [5.0, 7.0, 2.0, 7.0]
    allocator.use(9)
    metric.reset()
    metric.update()
    assert float(metric.compute()) == 0.0


def test_peak_memory_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="source must be one of 'accelerator', 'rss', got 'gpu'"):
        PeakMemory(source="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RSS peak cannot be restarted"):
        PeakMemory(source="rss", restart_window=True)


def test_metrics_are_reached_from_the_package() -> None:
    assert lightning_balance.metrics.PadEfficiency is PadEfficiency


def measure_on_every_rank() -> dict[str, float]:
    """Values on this rank: updates split over ranks, the same on all ranks, or on rank 0 alone."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    split, lonely, planned, gathered, empty = PadEfficiency(), PadEfficiency(), CostSpread(), CostSpread(), CostSpread()
    rss, accelerator = PeakMemory(source="rss"), PeakMemory()
    for real, padded in zip(REAL[rank::num_ranks], PADDED[rank::num_ranks], strict=True):
        split.update(int(real), int(padded))
    for costs in COSTS:
        planned.update(costs)
    if rank == 0:
        lonely.update(int(REAL.sum()), int(PADDED.sum()))
        gathered.update(COSTS)
    else:
        np.ones(2**25).sum()  # 256 MiB more than rank 0, and freed before the peak is read
    rss.update()
    own_rss = int(rss.peak_bytes) / GIB
    metrics = {"split": split, "lonely": lonely, "planned": planned, "gathered": gathered, "empty": empty}
    values = {name: float(metric.compute()) for name, metric in metrics.items()}
    again = float(split.compute())  # the local sums are back after a compute
    split.update(0, 0)
    own = {"again": again, "after_unsync": float(split.compute()), "own_rss": own_rss}
    return {**values, **own, "rss": float(rss.compute()), "accelerator": float(accelerator.compute())}


def test_two_processes_agree_with_one() -> None:
    first, second = run_ranks(measure_on_every_rank, 2, timeout_s=90)
    for name in ("split", "lonely", "again", "after_unsync"):
        assert first[name] == second[name] == pytest.approx(pad_efficiency(REAL, PADDED)), name
    for name in ("planned", "gathered"):
        assert first[name] == second[name] == pytest.approx(cost_spread(COSTS)), name
    assert np.isnan([first["empty"], second["empty"]]).all()
    assert first["rss"] == second["rss"] == pytest.approx(max(first["own_rss"], second["own_rss"]))
    assert second["own_rss"] > first["own_rss"] + 0.2
    if not torch.accelerator.is_available():
        assert np.isnan([first["accelerator"], second["accelerator"]]).all()

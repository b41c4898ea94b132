"""The simulation of many ranks: parts sum to 1, agree with the formulas of the package, and noise only takes."""

import functools
import json
import sys

import numpy as np
import pytest

from benchmarks import environment, peers, simulation
from benchmarks.inputs import Shape
from benchmarks.served import ServedEpoch, figures_of
from benchmarks.tables import documents
from lightning_balance import CostModel
from lightning_balance.efficiency import model_efficiency, modelled_time
from tests.benchmarks.tables import check_table

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 256), 2, 200).astype(np.int64)
SHAPE = Shape(num_ranks=2, num_slots=2, batch_size=8)
COST = CostModel(intercept=40.0, alpha=0.002)
NOISE = simulation.Noise(speed=0.02, jitter=0.05)


def methods_on(lengths, sync):
    return [
        *simulation.peer_methods(lengths, SHAPE, most_groups=8),
        *simulation.own_methods(lengths, SHAPE, cost=COST, sync=sync),
    ]


@functools.cache
def all_methods(sync):
    return methods_on(LENGTHS, sync)


def factors_for(work, run=0):
    return NOISE.factors(*work.times.shape, run)


@pytest.mark.parametrize("sync", simulation.SYNCS)
def test_parts_sum_to_1_and_only_work_by_noise_may_be_below_0(sync):
    for method in all_methods(sync):
        work = simulation.work_of(method.epoch, LENGTHS, COST)
        for factors in (None, factors_for(work)):
            parts = simulation.parts_of(work, sync, factors)
            assert tuple(parts) == simulation.PARTS
            assert sum(parts.values()) == pytest.approx(1, abs=1e-12), method.name
            assert all(parts[name] > -1e-12 for name in simulation.PARTS[:5]), method.name
        work_only = {name: parts[name] for name in ("ideal", "padding", "fixed", "copies", "work_by_noise")}
        waited = simulation.who_waits(work, sync, factors)["mean_waited"]
        assert sum(work_only.values()) + waited == pytest.approx(1, abs=1e-12), method.name


@pytest.mark.parametrize("sync", simulation.SYNCS)
def test_equal_lengths_without_noise_lose_nothing_but_the_fixed_price(sync):
    lengths = np.full(256, 50)
    for method in methods_on(lengths, sync):
        work = simulation.work_of(method.epoch, lengths, COST)
        parts = simulation.parts_of(work, sync)
        rest = {name for name in simulation.PARTS if abs(parts[name]) > 1e-12}
        assert rest == {"ideal", "fixed"}, method.name
        who = simulation.who_waits(work, sync)
        assert who["slowest_share"] == pytest.approx(1 / SHAPE.num_ranks)
        assert who["most_waited"] == 0
        free = simulation.parts_of(simulation.work_of(method.epoch, lengths, CostModel()), sync)
        assert free["ideal"] == pytest.approx(1)


@pytest.mark.parametrize("sync", simulation.SYNCS)
def test_the_share_without_noise_is_the_model_efficiency_without_the_intercepts_of_samples(sync):
    for method in all_methods(sync):
        work = simulation.work_of(method.epoch, LENGTHS, COST)
        share = simulation.parts_of(work, sync)["ideal"]
        ends = np.cumsum(work.num_slots_per_step)[:-1]
        time = sum(modelled_time(step, sync) for step in np.split(work.times, ends))
        figures = figures_of(method.epoch, LENGTHS, max_tokens=None, cost=COST)
        expected = figures.model_efficiency if sync == "micro_batch" else figures.model_efficiency_step
        intercepts = model_efficiency(len(LENGTHS) * COST.intercept, time, SHAPE.num_ranks)
        assert share == pytest.approx(expected - intercepts), method.name


def test_times_of_our_plans_are_those_that_the_planner_says():
    arguments = {"samples_per_step": 32, "num_ranks": 2, "num_slots": 2, "cost": COST, "lookahead": 8}
    plan = simulation.plan_epoch(LENGTHS, sync="step", **arguments)
    method = next(method for method in all_methods("step") if method.name == "rebalance, lookahead 8")
    work = simulation.work_of(method.epoch, LENGTHS, COST)
    np.testing.assert_allclose(work.times, np.concatenate([plan.step(index).costs for index in range(plan.num_steps)]))


def test_every_method_serves_every_sample_once():
    for method in all_methods("step"):
        assert sorted(method.epoch.samples.tolist()) == list(range(len(LENGTHS))), method.name
        assert simulation.work_of(method.epoch, LENGTHS, COST).copies == 0


def test_fillers_and_copies_are_no_ideal_work():
    lengths, cost = np.array([9, 4, 2]), CostModel(intercept=5.0, alpha=0.0)
    epoch = ServedEpoch.of([[0, 2], [2], [1, 2], [1]], num_ranks=2, num_slots_per_step=[2])
    work = simulation.work_of(epoch, lengths, cost)
    assert work.ideal == 9 + 4 + 2
    assert work.fixed == 2 * 5
    assert work.copies == (5 + 2) + (5 + 4) + 2  # two whole micro-batches, and the 2 beside the 4
    assert work.padding == (18 - 11) + (8 - 6)


def test_published_sampler_is_served_to_all_ranks_as_each_rank_would_get_it():
    method = simulation.batch_rebalance(LENGTHS, SHAPE)
    expected = peers.all_ranks(
        lambda rank: peers.batch_rebalance_for_one_rank(
            LENGTHS.tolist(), num_ranks=2, num_slots=2, batch_size=8, seed=simulation.SEED, rank=rank
        ),
        2,
    )
    assert method.epoch.samples.tolist() == [sample for part in expected for sample in part]
    assert method.planning.num_runs == len(LENGTHS) // SHAPE.samples_per_step


def test_the_rank_that_is_waited_for_is_found():
    times = np.array([[3.0, 1.0, 1.0], [3.0, 3.0, 1.0], [3.0, 1.0, 2.0]])
    work = simulation.Work(times=times, num_slots_per_step=np.array([2, 1]), ideal=1.0, fixed=0.0, copies=0.0)
    who = simulation.who_waits(work, "micro_batch")
    assert (who["slowest_rank"], who["slowest_share"]) == (0, (1 + 0.5 + 1) / 3)
    assert (who["rank_that_waits_most"], who["most_waited"]) == (2, 5 / 9)
    assert who["slowest_or_tied"] == 1
    assert simulation.who_waits(work, "step")["slowest_share"] == 1


def test_noise_is_the_same_for_equal_runs_and_keeps_its_means():
    first, again, other = (NOISE.factors(5, 400, run) for run in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:2], NOISE.factors(2, 400, 3))  # whatever is served after it
    assert (first != other).all()
    speeds = simulation.Noise(speed=0.02).factors(5, 400, 0)
    assert (speeds == speeds[0]).all()
    assert speeds[0].mean() == pytest.approx(1)
    assert speeds[0].std() == pytest.approx(0.02, rel=0.1)
    jitter = simulation.Noise(jitter=0.05).factors(200, 400, 0)
    assert jitter.mean() == pytest.approx(1, abs=1e-3)
    assert jitter.std() == pytest.approx(0.05, rel=0.02)


def test_a_slow_rank_is_waited_for_where_the_plan_was_even():
    even = simulation.Work(
        times=np.ones((3, 4)), num_slots_per_step=np.array([1, 1, 1]), ideal=12.0, fixed=0.0, copies=0.0
    )
    factors = np.ones((3, 4))
    factors[:, 2] = 1.25
    parts = simulation.parts_of(even, "micro_batch", factors)
    assert parts["ideal"] == pytest.approx(1 / 1.25)
    assert parts["waiting_planned"] == 0
    assert parts["waiting_by_noise"] == pytest.approx(3 * 0.25 / (4 * 1.25))
    assert simulation.who_waits(even, "micro_batch", factors)["slowest_rank"] == 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulation")
    runs = [{"intercept": value, "alpha": value / 1e5} for value in (90.0, 70.0, 80.0)]
    (folder / "calibration.json").write_text(json.dumps({"runs": runs}))
    for out in ("first", "again"):
        words = ["simulation.py", "--most-ranks", "8", "--steps", "8", "--noise-runs", "2", "--out", str(folder / out)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulation, "steps_at", lambda num_ranks, least: least)
            patch.setattr(sys, "argv", [*words, "--calibration", str(folder / "calibration.json")])
            simulation.main()
    return folder


def saved(folder):
    data = json.loads((folder / "simulation.json").read_text())
    for row in data["rows"]:
        row["planning"] = row["planning"] is not None
    return data


def test_a_run_gives_the_same_figures_again(results):
    first, again = (saved(results / out) for out in ("first", "again"))
    assert first["rows"] == again["rows"]
    assert first["cost"] == {"intercept": 80.0, "alpha": 80.0 / 1e5, "num_calibrations": 3}
    assert len(first["rows"]) == 2 * 7
    assert first["environment"]["command"].endswith("--out DIR --calibration FILE")


def test_noise_takes_from_even_plans_and_each_kind_takes_less_than_both(results):
    for row in saved(results / "first")["rows"]:
        shares = {kind: values["ideal"] for kind, values in row["with_noise"].items()}
        assert all(0 < share["min"] <= share["median"] <= share["max"] < 1 for share in shares.values())
        if row["method"].startswith(("rebalance", "token budget")):  # elsewhere a fast rank may get the heaviest part
            assert shares["both"]["max"] < row["without_noise"]["ideal"], row["method"]
            assert shares["both"]["median"] < min(shares[kind]["median"] for kind in ("speed", "jitter"))


@pytest.mark.parametrize("name", [name for name, (script, _) in documents.TABLES.items() if script == "simulation"])
def test_tables_come_from_the_saved_figures(results, name):
    check_table(name, results / "first")


def test_the_picture_is_drawn_again_from_the_saved_figures(results, monkeypatch):
    picture = results / "first" / "simulation.png"
    before = picture.read_bytes()
    picture.unlink()
    monkeypatch.setattr(sys, "argv", ["simulation.py", "--redraw", "--out", str(picture.parent)])
    simulation.main()
    assert picture.read_bytes() == before


@pytest.mark.parametrize("words", [["--steps", "4"], ["--most-ranks", "4"], ["--noise-runs", "0"]])
def test_sizes_that_cannot_be_simulated_are_refused(monkeypatch, words, capsys):
    monkeypatch.setattr(sys, "argv", ["simulation.py", *words])
    with pytest.raises(SystemExit):
        simulation.main()
    assert "must be" in capsys.readouterr().err


def test_the_default_calibration_is_the_saved_one():
    cost, num_runs = simulation.calibrated(environment.RESULTS / "calibration.json")
    assert num_runs >= 1
    assert cost.intercept > 0
    assert cost.alpha > 0

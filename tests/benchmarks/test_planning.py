"""The benchmark scripts at tiny sizes: wrappers are honest, oracles agree, tables come out."""

import json
import sys
from itertools import product

import numpy as np
import pytest

from benchmarks import (
    environment,
    evaluation,
    lookahead,
    optimality,
    oracles,
    peers,
    plan_report,
    planner,
    scale,
)
from benchmarks.inputs import Profile, Shape, clip_for, draw, read_profiles, synthetic_profiles
from benchmarks.served import ServedEpoch, figures_of
from benchmarks.tables import documents
from benchmarks.timing import alternate
from lightning_balance import CostModel, plan_epoch, plan_step
from lightning_balance.report import summarize
from tests.benchmarks.tables import SCRIPTS_WITH_TESTS, check_table

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 150), 2, 200).astype(np.int64)
SHAPE = Shape(num_ranks=2, num_slots=2, batch_size=4)


@pytest.fixture(scope="module")
def entries():
    return {entry.name: entry for entry in planner.entries(LENGTHS, SHAPE)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # memory of a process of its own is not for a smoke test
        patch.setattr(scale, "in_new_process", lambda function, *arguments: function(*arguments))
        return _save_results(tmp_path_factory.mktemp("results"))


def _save_results(folder):
    profile = Profile(name="lognormal", source="test", lengths=LENGTHS)
    whole = Profile(name="lognormal_whole_steps", source="test", lengths=LENGTHS[:144], is_control=True)
    named = {kind: optimality.sources(None)[kind] for kind in ("lognormal", "constant")}
    name = "64 ranks x 4 slots x 8"
    np.save(folder / "lengths.npy", LENGTHS)
    saved = {
        "planner": {"profiles": [planner.measure(data, SHAPE, 1) for data in (profile, whole)]},
        "optimality": {
            "trying": optimality.against_trying(6, named),
            "programme": optimality.against_programme(4, named),
            "input": optimality.on_the_input(1),
            "peer": optimality.against_peer(4, named, most_groups=16),
        },
        "scale": {
            "one_batch": [scale.one_batch(2, 2, with_peer=peer, num_runs=1) for peer in (True, False)],
            "whole_epoch": [scale.whole_epoch(name, 2100, 1)],
            "first_micro_batch": [scale.first_micro_batch(name, 2100, 1)],
            "budget_of_a_million": None,
        },
        "plan_report": {
            "demo": plan_report.demo(folder / "plan.png", "--ranks", "2", lengths=str(folder / "lengths.npy")),
            "million": plan_report.many_lengths(4096, 1),
            "reading": plan_report.reading(100),
        },
        "evaluation": evaluation.measure(num_functions=20, batch_size=4, hidden_size=16, num_rounds=1),
        "lookahead": {"rows": [lookahead.measure(np.tile(LENGTHS, 4), num, 1) for num in (1, 2)]},
    }
    for script, figures in saved.items():
        environment.save(script, figures, command=f"python -m benchmarks.{script}", folder=folder)
    return folder


def test_every_sampler_serves_every_sample_to_ranks_of_equal_counts(entries):
    for entry in entries.values():
        epoch = entry.serve()
        assert set(epoch.samples.tolist()) == set(range(len(LENGTHS))), entry.name
        assert epoch.counts.shape == (epoch.num_slots_per_step.sum(), SHAPE.num_ranks), entry.name
        assert epoch.counts.sum() == len(epoch.samples), entry.name


def test_samplers_with_a_budget_keep_it_but_lhotse(entries):
    for entry in entries.values():
        if entry.max_tokens is not None and "lhotse" not in entry.name:
            assert figures_of(entry.serve(), LENGTHS, max_tokens=entry.max_tokens).num_over_cap == 0, entry.name


def test_what_one_rank_runs_is_its_part_of_what_all_ranks_run(entries):
    for name in ("transformers BatchRebalanceSampler", "ours", "ours, lookahead 8"):
        epoch = entries[name].serve()
        ends = np.cumsum(epoch.counts.ravel())[:-1]
        own = np.split(epoch.samples, ends)[:: SHAPE.num_ranks]
        assert [list(part) for part in own] == [list(part) for part in entries[name].one_rank()], name


@pytest.mark.skipif(not peers.has_lhotse(), reason="lhotse is not installed")
def test_copies_that_lhotse_makes_are_known_as_copies():
    lengths = np.random.default_rng(100).integers(1, 101, 100)
    cuts = peers.lhotse_cuts(lengths)
    micro_batches = peers.all_ranks(
        lambda rank: peers.lhotse_for_one_rank(cuts, num_ranks=7, max_tokens=100, seed=0, rank=rank), 7
    )
    figures = figures_of(peers.serve(micro_batches, 7, 1), lengths, max_tokens=100)
    assert figures.num_lost == 0
    assert figures.num_copies > 0


def test_figures_of_our_plans_equal_the_report(entries):
    arguments = {"samples_per_step": 16, "num_ranks": 2, "num_slots": 2}
    summary = summarize(plan_epoch(LENGTHS, **arguments), LENGTHS)
    figures = figures_of(entries["ours"].serve(), LENGTHS, max_tokens=None)
    for name in ("pad_efficiency", "slot_efficiency", "model_efficiency", "largest_micro_batch", "num_shapes"):
        assert getattr(figures, name) == pytest.approx(getattr(summary, name)), name
    assert figures.num_copies == summary.num_fillers


def test_figures_count_copies_losses_and_the_budget():
    epoch = ServedEpoch.of([[0, 1], [0]], num_ranks=2, num_slots_per_step=[1])
    figures = figures_of(epoch, np.array([4, 2, 9]), max_tokens=7, cost=CostModel(alpha=0.0))
    assert (figures.num_copies, figures.num_lost, figures.num_over_cap) == (1, 1, 1)
    assert figures.pad_efficiency == 6 / 12
    assert figures.model_efficiency == 6 / 16


def test_a_rank_with_fewer_micro_batches_is_refused():
    with pytest.raises(ValueError, match="2 slots were served for 1 planned ones"):
        ServedEpoch.of([[0], [1]], num_ranks=1, num_slots_per_step=[1])


def test_greedy_fill_takes_as_many_as_the_budget_holds():
    parts = peers.greedy_fill(np.array([4, 9, 4, 4, 1]), np.arange(5), 9)
    assert [part.tolist() for part in parts] == [[1], [0, 2], [3, 4]]


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_trying_every_way_finds_what_a_hand_made_case_needs(sync):
    cost = CostModel(alpha=0.0).cost
    best = oracles.best_by_trying(np.array([6, 3, 2, 1]), num_ranks=2, num_slots=1, cost=cost, cap=9, sync=sync)
    assert best == 9  # [6] beside [3, 2, 1]
    capped = oracles.best_by_trying(np.array([6, 3, 2, 1]), num_ranks=2, num_slots=1, cost=cost, cap=8, sync=sync)
    assert capped == np.inf


def test_both_oracles_agree_where_there_is_one_slot():
    rng = np.random.default_rng(0)
    for num_ranks, count in product((1, 2, 3), (4, 7)):
        lengths, cost = rng.integers(1, 50, count), CostModel().cost
        arguments = {"num_ranks": num_ranks, "num_slots": 1, "cost": cost, "cap": 120}
        trying = oracles.best_by_trying(lengths, sync="micro_batch", **arguments)
        assert oracles.best_of_slots(lengths, **arguments) == trying


def test_the_programme_is_never_below_trying_every_way():
    rng = np.random.default_rng(1)
    for _ in range(10):
        arguments = {"num_ranks": 2, "num_slots": 2, "cost": CostModel().cost, "cap": 10_000}
        lengths = rng.integers(1, 100, 7)
        trying = oracles.best_by_trying(lengths, sync="micro_batch", **arguments)
        assert oracles.best_of_slots(lengths, **arguments) >= trying * (1 - 1e-12)


def test_a_worse_plan_would_be_counted_as_above(monkeypatch):
    def plain(lengths, *, num_ranks, num_slots, **_):
        return plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, cost=lambda n, length: n)

    monkeypatch.setattr(optimality, "plan_step", plain)
    monkeypatch.setattr(optimality, "_time_of", _time_with_real_cost)
    rows = optimality.against_peer(6, optimality.sources(None), most_groups=16)["rows"]
    assert next(row for row in rows if row["batches"] == "all")["num_above"] > 0


def _time_with_real_cost(case, cost, sync, max_tokens):
    plan = optimality.plan_step(case.lengths, num_ranks=case.num_ranks, num_slots=case.num_slots)
    return optimality.modelled_time(cost(np.maximum(plan.num_samples, 1), plan.padded_lengths), sync)


def test_lookahead_1_moves_no_sample():
    row = lookahead.measure(np.tile(LENGTHS, 4), 1, num_epochs=1)
    assert row["share_moved"] == 0
    assert row["length_correlation"] == row["plain_length_correlation"]


def test_correlation_inside_a_step_is_near_0_for_random_steps_and_high_for_sorted_ones():
    values = np.random.default_rng(0).integers(1, 100, 1000)
    random, sorted_ = np.arange(1000) % 10, np.argsort(np.argsort(values)) // 100
    assert abs(lookahead.intraclass_correlation(values, random)) < 0.02
    assert lookahead.intraclass_correlation(values, sorted_) > 0.9


def test_profiles_are_read_clipped_and_thinned(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"name": "A", "lengths": [1] * 199 + [100]}))
    (tmp_path / "other.json").write_text("[1, 2]")
    (profile,) = read_profiles(tmp_path, max_length=64, max_samples=150)
    assert profile.name == "A"
    assert len(profile.lengths) == 150
    assert profile.lengths.max() == 1
    assert clip_for(np.array([5, 5, 5]), 4) == 4


def test_a_folder_without_profiles_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        read_profiles(tmp_path, max_length=8, max_samples=8)


def test_inputs_are_the_same_every_time():
    first, again = (synthetic_profiles()[0].lengths for _ in range(2))
    assert len(first) == 10_000
    np.testing.assert_array_equal(first, again)
    assert set(draw("constant", np.random.default_rng(0), 3)) == {512}


def test_functions_are_timed_in_turn_after_a_round_to_warm_up():
    calls: list[str] = []
    times = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, num_runs=2)
    assert calls == ["a", "b"] * 3
    assert times["a"].num_runs == 2


def test_results_hold_versions_hardware_and_command_but_no_folder(results, monkeypatch):
    saved = json.loads((results / "planner.json").read_text())["environment"]
    assert saved["versions"]["numpy"] == np.__version__
    assert saved["hardware"]["num_cores"] >= 1
    monkeypatch.setattr(sys, "argv", ["planner.py", "--lengths", "/home/me/lengths", "--runs", "2"])
    command = environment.command_line("planner", lengths="DIR")
    assert command == "python -m benchmarks.planner --lengths DIR --runs 2"


@pytest.mark.parametrize(
    "name", sorted(name for name, (script, _) in documents.TABLES.items() if script not in SCRIPTS_WITH_TESTS)
)
def test_every_table_comes_from_the_saved_figures(results, name):
    check_table(name, results)


def test_tables_are_written_between_their_markers_and_nowhere_else(results):
    text = "before\n<!-- table: scale_batch -->\nold\n<!-- end -->\nafter\n"
    written = documents.write_tables(text, results)
    assert "old" not in written
    assert documents.table("scale_batch", results) in written
    assert documents.write_tables(written, results) == written
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")


def test_predictions_of_both_runs_are_the_same(results):
    figures = json.loads((results / "evaluation.json").read_text())
    assert figures["predictions_alike"] > 0.999
    assert figures["largest_micro_batch"]["budget"] <= figures["largest_micro_batch"]["plain"]

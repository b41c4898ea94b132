"""Every table by name, from the saved figures, and documents that hold tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.tables import planning, simulation, training
from benchmarks.tables.formats import Json

TABLES: dict[str, tuple[str, Callable[[Json], str]]] = {
    "planner_samples": ("planner", planning.planner_input),
    "planner_whole_steps": ("planner", lambda data: planning.planner_input(data, "lognormal_whole_steps")),
    "planner_budget": ("planner", lambda data: planning.planner_input(data, group="budget")),
    "planner_profiles": ("planner", planning.planner_profiles),
    "planner_profiles_budget": ("planner", lambda data: planning.planner_profiles(data, group="budget")),
    "planner_peaks": ("planner", planning.planner_peaks),
    "optimality_trying": ("optimality", planning.optimality_trying),
    "optimality_programme": ("optimality", planning.optimality_programme),
    "optimality_peer": ("optimality", planning.optimality_peer),
    "optimality_input": ("optimality", planning.optimality_input),
    "lookahead": ("lookahead", planning.lookahead),
    "scale_batch": ("scale", planning.scale_batch),
    "scale_epoch": ("scale", planning.scale_epoch),
    "scale_first": ("scale", planning.scale_first),
    "calibration": ("calibration", training.calibration),
    "headline": ("end_to_end", training.headline),
    "end_to_end_ddp": ("end_to_end", lambda data: training.end_to_end(data, "ddp")),
    "end_to_end_fsdp2": ("end_to_end", lambda data: training.end_to_end(data, "FSDP2")),
    "loss_curves": ("loss_curves", training.loss_curves),
    "memory": ("memory", training.memory),
    "largest_batch": ("memory", training.largest_batch),
    "budget_sweep_ddp": ("budget_sweep", lambda data: training.budget_sweep(data, "ddp")),
    "budget_sweep_fsdp2": ("budget_sweep", lambda data: training.budget_sweep(data, "FSDP2")),
    "evaluation": ("evaluation", training.evaluation),
    "overhead": ("overhead", training.overhead),
    "overhead_long": ("overhead_long", training.overhead),
    "simulation_micro_batch": ("simulation", lambda data: simulation.simulation(data, "micro_batch")),
    "simulation_step": ("simulation", lambda data: simulation.simulation(data, "step")),
    "simulation_ranks": ("simulation", simulation.simulation_ranks),
    "simulation_ranks_largest": ("simulation", lambda data: simulation.simulation_ranks(data, largest=True)),
    "simulation_noise": ("simulation", simulation.simulation_noise),
    "plan_demo": ("plan_report", planning.plan_demo),
    "plan_million": ("plan_report", planning.plan_million),
    "plan_reading": ("plan_report", planning.plan_reading),
}
"""The script whose figures a table shows, and what makes the table of them."""


def table(name: str, folder: Path = RESULTS) -> str:
    """Return a table with a line that says what made it.

    Raises:
        KeyError: there is no such table.
        FileNotFoundError: its figures have not been saved.
    """
    source, make = TABLES[name]
    data = json.loads((folder / f"{source}.json").read_text(encoding="utf-8"))
    made = data["environment"]
    hardware = f"{made['hardware']['cpu']}, {made['hardware']['num_cores']} cores"
    return f"{make(data)}\n\n`{made['command']}`, commit {made['commit']}, {made['date']}, {hardware}."


def write_tables(text: str, folder: Path = RESULTS) -> str:
    """Return a text with the tables between its markers made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}\n{table(match[2], folder)}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", replace, text, flags=re.DOTALL)

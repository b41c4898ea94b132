"""The cutting algorithms: arrays in, arrays out."""

from lightning_balance.partition.arranging import arrange, turn_of
from lightning_balance.partition.cutting import FILLER, Cut, cut
from lightning_balance.partition.greedy import fewest_groups, smallest_budget
from lightning_balance.partition.problem import Problem, make_problem
from lightning_balance.partition.ranks import balance_ranks

__all__ = [
    "FILLER",
    "Cut",
    "Problem",
    "arrange",
    "balance_ranks",
    "cut",
    "fewest_groups",
    "make_problem",
    "smallest_budget",
    "turn_of",
]

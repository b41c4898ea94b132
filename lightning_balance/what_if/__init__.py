"""`lightning-balance plan`: what balancing would do for given lengths, without training."""

from lightning_balance.what_if.command import run_plan_command
from lightning_balance.what_if.comparison import Comparison, Outcome, compare
from lightning_balance.what_if.files import read_lengths
from lightning_balance.what_if.options import PlanOptions

__all__ = ["Comparison", "Outcome", "PlanOptions", "compare", "read_lengths", "run_plan_command"]

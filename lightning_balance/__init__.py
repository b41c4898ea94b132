"""Length-balanced, exactly weighted distributed training for any LightningModule.

Importing this package loads neither torch nor lightning: every public name is resolved on first use (PEP 562), so the
planner can be used wherever numpy is.

Example:
    >>> import lightning_balance as lb
    >>> plan = lb.plan_step([3, 5, 9, 2], num_ranks=2)
    >>> (plan.num_slots, plan.num_ranks)
    (1, 2)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_balance import metrics
    from lightning_balance.callback import BalanceCallback
    from lightning_balance.cost import CostModel
    from lightning_balance.datamodule import BalancedDataModuleMixin
    from lightning_balance.epoch import EpochPlan, plan_epoch
    from lightning_balance.evaluation.writer import OrderedPredictionWriter
    from lightning_balance.plan import StepPlan, plan_step
    from lightning_balance.sampler import BalancedBatchSampler

__version__ = "0.1.0"

__all__ = [
    "BalanceCallback",
    "BalancedBatchSampler",
    "BalancedDataModuleMixin",
    "CostModel",
    "EpochPlan",
    "OrderedPredictionWriter",
    "StepPlan",
    "__version__",
    "metrics",
    "plan_epoch",
    "plan_step",
]

_MODULE_OF = {
    "BalanceCallback": "callback",
    "BalancedBatchSampler": "sampler",
    "BalancedDataModuleMixin": "datamodule",
    "CostModel": "cost",
    "EpochPlan": "epoch",
    "OrderedPredictionWriter": "evaluation.writer",
    "StepPlan": "plan",
    "plan_epoch": "epoch",
    "plan_step": "plan",
}
_SUBMODULES = frozenset({"metrics"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # resolved once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""torchmetrics classes for what balancing changes: padding, differences between ranks, peak memory.

The formulas live in :mod:`lightning_balance.efficiency`; a class only carries the sums they need. All states are plain
tensors reduced by sum or max, so a rank without any update takes part in the collective like every other one: nothing
hangs, and a figure that has no data anywhere is ``nan`` (torchmetrics then adds its usual warning).

States are not part of a module's ``state_dict`` unless ``metric.persistent(True)`` is called, as everywhere in
torchmetrics. A state saved on one rank holds that rank's sums only; to save the sums of all ranks, save inside
``with metric.sync_context():`` and load on one rank.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_balance.efficiency import cost_spread, pad_efficiency
from lightning_balance.memory import (
    GIB,
    has_accelerator_peak,
    read_accelerator_peak,
    read_rss_peak,
    restart_accelerator_peak,
)
from lightning_balance.validation import LARGEST_INT, check_choice

__all__ = ["CostSpread", "PadEfficiency", "PeakMemory"]


class PadEfficiency(Metric):
    """Real tokens over padded tokens of everything that was processed, on all ranks.

    Guarantee:
        Equal to :func:`lightning_balance.efficiency.pad_efficiency` of all updates of all ranks together: a ratio of
        sums, never a mean of ratios. Token counts are summed as 64-bit integers and therefore exact, as long as those
        of all updates of all ranks come to less than 2**63.

    Units:
        Tokens (or frames, nodes). ``compute`` returns a float32 scalar in [0, 1], ``nan`` before any padded token.

    Example:
        >>> metric = PadEfficiency()
        >>> metric.update(real_tokens=90, padded_tokens=100)
        >>> metric.update(real_tokens=30, padded_tokens=60)
        >>> metric.compute()
        tensor(0.7500)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    real_tokens: Tensor
    padded_tokens: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("real_tokens", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("padded_tokens", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, real_tokens: npt.ArrayLike | Tensor, padded_tokens: npt.ArrayLike | Tensor) -> None:
        """Add micro-batches of this rank: two counts, or two arrays, lists or tensors of counts, which are summed.

        A filler has 0 real tokens. Tensors are summed where they are: nothing is read back from an accelerator, so
        that counts that are there are not checked. What is refused is not counted.

        Raises:
            TypeError: values that are not numbers.
            ValueError: fractions, negative counts, or more real than padded tokens in all.
        """
        real, padded = _total("real_tokens", real_tokens), _total("padded_tokens", padded_tokens)
        if isinstance(real, int) and isinstance(padded, int) and not 0 <= real <= padded <= LARGEST_INT:
            raise ValueError(f"real_tokens must lie between 0 and padded_tokens, got {real} of {padded}")
        self.real_tokens += real if isinstance(real, int) else real.to(self.real_tokens)
        self.padded_tokens += padded if isinstance(padded, int) else padded.to(self.padded_tokens)

    def compute(self) -> Tensor:
        """Pad efficiency of all updates since the last reset, over all ranks."""
        value = pad_efficiency(int(self.real_tokens), int(self.padded_tokens))
        return torch.tensor(value, device=self.real_tokens.device)


class CostSpread(Metric):
    """(max - min) / mean of the ranks' costs inside one synchronisation, averaged over synchronisations.

    Guarantee:
        Equal to :func:`lightning_balance.efficiency.cost_spread` of all updates. Every update holds the costs of *all*
        ranks, because a spread cannot be rebuilt from sums of single ranks. Where each rank knows all costs (planned
        costs do not depend on the rank), each rank calls ``update`` with the same array and the value is the same as
        on one rank; when only one rank has them (gathered measurements), only that one needs to call it.

    Shapes and units:
        ``update`` takes ``(..., num_ranks)`` costs of any unit; ``compute`` returns a float32 scalar >= 0, ``nan``
        before the first synchronisation.

    Example:
        >>> metric = CostSpread()
        >>> metric.update([3.0, 1.0])
        >>> metric.update([[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]])
        >>> metric.compute()
        tensor(0.2500)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0

    spread_sum: Tensor
    spread_rest: Tensor
    num_synchronisations: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Two float32 numbers hold one running sum (Kahan): float64 states cannot be moved to MPS devices, and a plain
        # float32 sum of a million spreads is already 1 % off.
        self.add_state("spread_sum", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("spread_rest", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("num_synchronisations", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, costs: npt.ArrayLike | Tensor) -> None:
        """Add synchronisations: the costs of all ranks in the last axis, one synchronisation per remaining index.

        Raises:
            ValueError: a cost is negative or not finite, or there is no axis of ranks.
        """
        # On the CPU first: not every accelerator has float64.
        ranks = costs.detach().cpu().double().numpy() if isinstance(costs, Tensor) else np.asarray(costs, np.float64)
        spread = cost_spread(ranks)
        if ranks.size == 0:
            return
        num_synchronisations = ranks.size // ranks.shape[-1]
        addend = spread * num_synchronisations - self.spread_rest
        total = self.spread_sum + addend
        self.spread_rest = (total - self.spread_sum) - addend
        self.spread_sum = total
        self.num_synchronisations += num_synchronisations

    def compute(self) -> Tensor:
        """Mean spread of all synchronisations since the last reset."""
        if not self.num_synchronisations:
            return torch.full_like(self.spread_sum, float("nan"))
        return (self.spread_sum - self.spread_rest) / self.num_synchronisations


class PeakMemory(Metric):
    """Highest memory use seen by any rank, in GiB.

    Two sources that must not be mixed up, hence two log keys (:attr:`log_key`):

    - ``"accelerator"`` (``peak_memory_gib``): peak of the tensors allocated on the current device, from the counter of
      its caching allocator. It is read on the host, without waiting for the device.
    - ``"rss"`` (``peak_rss_gib``): peak resident memory of the process, with Python, libraries and data in it.

    Window:
        Which time a value covers is said by :attr:`window`. By default the counter runs since the process started (or
        someone restarted it). With ``restart_window=True`` every ``update`` restarts the allocator's counter after
        reading, so an update covers the time since the last one, ``compute`` the time since the last ``reset``. The
        counter is shared: other users of ``max_memory_allocated`` then see restarted values, too. The peak of a
        process cannot be restarted.

    Guarantee:
        Where the source cannot be read (no accelerator, or one without a peak counter) the value is ``nan`` and
        :attr:`available` is False, never 0: leave the key out of the logs (pytorch#15968).

    Raises:
        ValueError: `source` is unknown, or `restart_window` is asked of a source that cannot restart.

    Example:
        >>> metric = PeakMemory(source="rss")
        >>> metric.update()
        >>> 0 < float(metric.compute()) < 1024
        True
        >>> metric.log_key
        'peak_rss_gib'
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0

    peak_bytes: Tensor

    def __init__(
        self, source: Literal["accelerator", "rss"] = "accelerator", *, restart_window: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_choice("source", source, ("accelerator", "rss"))
        if source == "rss" and restart_window:
            raise ValueError('restart_window=True needs source="accelerator": the RSS peak cannot be restarted')
        self.source = source
        self.restart_window = restart_window
        self._is_in_forward = False
        # -1 means never read: a real peak may be 0 bytes, and max over ranks keeps any rank that could read.
        self.add_state("peak_bytes", torch.tensor(-1, dtype=torch.int64), dist_reduce_fx="max")

    @property
    def log_key(self) -> str:
        """Name of the figure in logs, without a prefix."""
        return "peak_memory_gib" if self.source == "accelerator" else "peak_rss_gib"

    @property
    def available(self) -> bool:
        """Whether the source exists on this machine; the same before and after the device is first used."""
        return has_accelerator_peak() if self.source == "accelerator" else read_rss_peak() is not None

    @property
    def window(self) -> str:
        """The time that a computed value covers, in words."""
        if self.source == "rss":
            return "since the process started"
        if self.restart_window:
            return "since the last reset of this metric"
        return "since the process started or the allocator's peak was last restarted"

    def update(self) -> None:
        """Read the source of this rank now; call it where the peak of interest has passed."""
        peak_bytes = read_accelerator_peak() if self.source == "accelerator" else read_rss_peak()
        if peak_bytes is None:
            return
        self.peak_bytes = torch.clamp(self.peak_bytes, min=peak_bytes)
        if self.restart_window:
            restart_accelerator_peak()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Update, and return the peak of this update alone."""
        self._is_in_forward = True  # torchmetrics resets before it updates: the counter must not restart unread
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._is_in_forward = False

    def compute(self) -> Tensor:
        """Highest peak of all ranks in GiB, ``nan`` if no rank could read one."""
        peak_bytes = int(self.peak_bytes)
        return torch.tensor(peak_bytes / GIB if peak_bytes >= 0 else float("nan"), device=self.peak_bytes.device)

    def reset(self) -> None:
        """Forget the peaks seen so far; with ``restart_window`` also those since the last update."""
        super().reset()
        if self.restart_window and not self._is_in_forward:
            restart_accelerator_peak()


def _total(name: str, tokens: npt.ArrayLike | Tensor) -> int | Tensor:
    """Return the sum of counts; that of a tensor on an accelerator stays there, unread."""
    if isinstance(tokens, Tensor):
        tokens = tokens.detach()
        if tokens.device.type != "cpu":
            return tokens.sum(dtype=torch.int64)
        array = (tokens.double() if tokens.is_floating_point() else tokens).numpy()  # numpy has no bfloat16
    else:
        array = np.asarray(tokens)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be a count or an array of counts, got {tokens!r}")
    is_count = np.isfinite(array) & (array >= 0) & (array == np.floor(array))
    if not is_count.all():
        raise ValueError(f"{name} must be whole numbers of at least 0, got {array[~is_count].flat[0]}")
    return int(array.sum(dtype=np.float64 if array.dtype.kind == "f" else None))

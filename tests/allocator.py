"""An accelerator's counter of peak memory, for machines that have none."""


class Allocator:
    """Stands for an accelerator's module (``torch.cuda``)."""

    def __init__(self) -> None:
        self.peak = 0

    def use(self, gib: int) -> None:
        """Allocate and free."""
        self.peak = max(self.peak, gib * 2**30)

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = 0

"""What holds for every step of a plan, and what follows from it for single samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.shapes import choose_shapes, round_up_to, round_up_to_multiple
from lightning_balance.validation import LONGEST_ALLOWED, check_choice, check_positive_int

SYNCS = ("micro_batch", "step")
OVERSIZE = ("single", "error", "skip")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRules:
    """What holds for every step: checked once by :meth:`checked`."""

    num_ranks: int
    num_slots: int | None
    max_tokens: int | None
    sync: str
    pad_to_multiple_of: int
    oversize: str
    max_shapes: int | None
    default_cap: int | None = None
    shapes: NDArray[np.int64] | None = None

    @property
    def cap(self) -> int | None:
        """The cap on padded tokens of a micro-batch."""
        return self.max_tokens if self.max_tokens is not None else self.default_cap

    @classmethod
    def checked(cls, **rules: Any) -> StepRules:
        """Return the rules after checking each, with the default number of slots filled in.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a value is out of range.
        """
        rules["num_ranks"] = check_positive_int("num_ranks", rules["num_ranks"])
        multiple = check_positive_int("pad_to_multiple_of", rules["pad_to_multiple_of"], largest=LONGEST_ALLOWED)
        rules["pad_to_multiple_of"] = multiple
        for name in ("num_slots", "max_tokens", "max_shapes"):
            if rules[name] is not None:
                rules[name] = check_positive_int(name, rules[name])
        check_choice("sync", rules["sync"], SYNCS)
        check_choice("oversize", rules["oversize"], OVERSIZE)
        if rules["num_slots"] is None and rules["max_tokens"] is None:
            rules["num_slots"] = 1
        return cls(**rules)

    def with_default_cap(self, samples_per_step: int, longest: int) -> StepRules:
        """Return the rules with the cap that holds where no ``max_tokens`` is given: what a plain batch could reach."""
        if self.max_tokens is not None or self.num_slots is None:
            return self
        return replace(self, default_cap=-(-samples_per_step // (self.num_slots * self.num_ranks)) * longest)

    def with_shapes(self, lengths: NDArray[np.int64]) -> StepRules:
        """Return the rules with the padded lengths that ``max_shapes`` allows for these samples."""
        if self.max_shapes is None:
            return self
        return replace(self, shapes=choose_shapes(lengths, self.max_shapes, self.pad_to_multiple_of))

    def padded(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length each sample would be padded to by itself."""
        if self.shapes is not None:
            return round_up_to(lengths, self.shapes)
        if self.pad_to_multiple_of == 1:
            return lengths
        return round_up_to_multiple(lengths, self.pad_to_multiple_of)

    def sort_out_oversize(
        self, lengths: NDArray[np.int64], padded: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return positions to plan and positions to skip.

        Raises:
            ValueError: a sample is over the budget and ``oversize`` is ``"error"``.
        """
        everything, nothing = np.arange(len(lengths)), np.empty(0, dtype=np.int64)
        if self.max_tokens is None or self.oversize == "single" or padded.max() <= self.max_tokens:
            return everything, nothing
        over = padded > self.max_tokens
        if self.oversize == "skip":
            return everything[~over], everything[over]
        index = int(np.argmax(over))
        raise ValueError(
            f"lengths[{index}] is {lengths[index]} (padded to {padded[index]}), above max_tokens={self.max_tokens} "
            f"({int(over.sum())} of {len(lengths)} samples are): raise max_tokens, clip the samples, or set "
            "oversize to 'single' or 'skip'"
        )

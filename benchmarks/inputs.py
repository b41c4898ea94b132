"""What to plan: lengths, drawn from known distributions or read from profiles of real data, and the shape of a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal": lambda rng, count: rng.lognormal(5, 1, count),
    "uniform": lambda rng, count: rng.uniform(1, 1024, count),
    "pareto": lambda rng, count: 16 * (1 + rng.pareto(1.2, count)),
    "bimodal": lambda rng, count: np.where(
        rng.random(count) < 0.8, rng.normal(64, 8, count), rng.normal(900, 60, count)
    ),
    "constant": lambda _, count: np.full(count, 512.0),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Lengths under a name.

    Attributes:
        name: name of the data.
        source: where it comes from, in words.
        lengths: length of each sample in tokens.
        is_control: lengths are so even that there is next to nothing to gain.
    """

    name: str
    source: str
    lengths: NDArray[np.int64]
    is_control: bool = False


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Ranks, slots and samples of a step."""

    num_ranks: int = 8
    num_slots: int = 4
    batch_size: int = 8

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.num_ranks * self.num_slots * self.batch_size


def draw(kind: str, rng: np.random.Generator, count: int, longest: int = 4096) -> NDArray[np.int64]:
    """Return ``count`` lengths of a distribution, clipped to ``[1, longest]``.

    >>> draw("constant", np.random.default_rng(0), 2)
    array([512, 512])
    """
    return np.clip(DISTRIBUTIONS[kind](rng, count), 1, longest).astype(np.int64)


def synthetic_profiles() -> list[Profile]:
    """Return the lognormal input that samplers are compared on, whole steps of it, and two controls."""
    lognormal = np.clip(np.random.default_rng(0).lognormal(5, 1, 10_000), 16, 1024).astype(np.int64)
    formula = "clip(default_rng(0).lognormal(5, 1, 10000), 16, 1024)"
    even = np.random.default_rng(0).integers(480, 513, 10_000)
    constant = np.full(9984, 512)
    return [
        Profile(name="lognormal", source=formula, lengths=lognormal),
        Profile(name="lognormal_whole_steps", source=f"the first 9,984 of {formula}", lengths=lognormal[:9984]),
        Profile(name="near_uniform", source="integers in [480, 512]", lengths=even, is_control=True),
        Profile(name="constant", source="512", lengths=constant, is_control=True),
    ]


def read_profiles(folder: Path, *, max_length: int, max_samples: int) -> list[Profile]:
    """Return a profile for each ``*.json`` file with a list ``"lengths"``.

    Lengths are clipped as a collator would truncate: to the power of two that holds 99 % of the samples, at most
    ``max_length``. Of more than ``max_samples`` samples a random part is taken.

    Raises:
        ValueError: no such file in the folder.
    """
    profiles = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "lengths" not in data:
            continue
        lengths = np.asarray(data["lengths"], dtype=np.int64)
        if len(lengths) > max_samples:
            lengths = np.random.default_rng(0).choice(lengths, max_samples, replace=False)
        profiles.append(
            Profile(
                name=str(data.get("name", path.stem)),
                source=str(data.get("source", "")),
                lengths=np.clip(lengths, 1, clip_for(lengths, max_length)),
            )
        )
    if not profiles:
        raise ValueError(f"{folder} holds no *.json file with a list 'lengths'")
    return profiles


def clip_for(lengths: NDArray[np.int64], max_length: int) -> int:
    """Return the power of two that holds 99 % of the lengths, at most ``max_length``.

    >>> clip_for(np.array([3, 5, 9]), 4096)
    16
    """
    return min(1 << int(np.ceil(np.log2(max(float(np.percentile(lengths, 99)), 1.0)))), max_length)

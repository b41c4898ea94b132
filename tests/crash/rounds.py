"""A round: one job, killed several times and started again from its newest checkpoint, until it ends."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.crash.attempts import KillFromOutside, Outcome, run
from tests.crash.history import (
    assert_equal_results,
    check_every_sample_trained_once,
    check_logs,
    newest_readable_checkpoint,
    read_result,
)
from tests.crash.job import MODES, SAVES, Attempt, JobSettings
from tests.crash.kills import KillPlan

OUTSIDE = "outside"
NUM_EVENTS = {"start": 100_000, "step": 3_000, "validation": 25_000, "writing": 13_000, "epoch end": 12_000}
"""About so many calls and returns of functions does a phase have on each rank."""
CALLS_WHILE_WRITING = ("sendfile", "rename", "remove", "barrier")
MOST_OCCURRENCES = {OUTSIDE: 12, "step": 8, "writing": 4, "validation": 2}
OTHER_DEVICE = Path("/dev/shm")
MODES_WITH_EQUAL_STEPS = ("rebalance", "token budget")
"""With ``samples_per_step`` set, any number of ranks takes the same steps in them."""


@dataclass
class Round:
    """What a round did.

    Attributes:
        attempts: all starts of the job, the last one ended.
        outcomes: how each ended.
        num_torn: checkpoints that a death left half written.
    """

    settings: JobSettings
    attempts: list[Attempt] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    num_torn: int = 0

    @property
    def places(self) -> list[str]:
        """Where the job was killed."""
        return [outcome.place for outcome in self.outcomes if not outcome.finished]


def draw_settings(rng: np.random.Generator, *, elastic: bool) -> JobSettings:
    num_workers = int(rng.choice([0, 0, 0, 2]))
    mode = str(rng.choice(list(MODES)))
    return JobSettings(
        mode=mode,
        saves=_draw_saves(rng),
        accumulate=int(rng.choice([1, 2])),
        loss_reduction=str(rng.choice(["sample_mean", "token_mean"])),
        samples_per_step=6 if elastic and mode in MODES_WITH_EQUAL_STEPS else None,
        num_workers=num_workers,
        persistent_workers=bool(num_workers and rng.choice([True, False])),
        # Inside an epoch validation is a matter of micro-batches, of which other ranks have others.
        val_check_interval=1.0 if elastic else [1.0, 0.5, 3][int(rng.choice(3))],
        check_val_every_n_epoch=int(rng.choice([1, 1, 2])),
        max_steps=int(rng.choice([-1, -1, 1000])),
    )


def _draw_saves(rng: np.random.Generator) -> tuple[str, ...]:
    """One or two ways to save; Lightning refuses two ``ModelCheckpoint`` with the same triggers."""
    saves = [str(name) for name in rng.permutation(list(SAVES))[: rng.choice([1, 1, 2])]]
    triggers = [(SAVES[name].get("every_n_train_steps"), SAVES[name].get("every_n_epochs")) for name in saves]
    return tuple(saves if len(set(triggers)) == len(saves) else saves[:1])


class Rounds:
    """Plays rounds, each a function of its seed, up to when a kill by the clock happens to land.

    Args:
        folder: for the files of all rounds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.played: list[Round] = []
        self._uninterrupted: dict[JobSettings, dict[str, Any]] = {}

    def play(self, seed: int, *, elastic: bool) -> Round:
        """One round, with its checks.

        Args:
            seed: of the settings and of all kills.
            elastic: 1 or 2 ranks in turn instead of 2.
        """
        rng = np.random.default_rng([seed, elastic])
        settings = draw_settings(rng, elastic=elastic)
        played = self._until_it_ends(settings, rng, elastic, self.folder / f"round-{seed}-{elastic}")
        self.played.append(played)
        self._check(played, elastic)
        return played

    def summary(self) -> str:
        """What has been played so far."""
        places = Counter(place.split(":")[0] for one in self.played for place in one.places)
        by_phase = ", ".join(f"{phase} {count}" for phase, count in places.most_common())
        outcomes = [outcome for one in self.played for outcome in one.outcomes]
        torn = sum(one.num_torn for one in self.played)
        return (
            f"{len(self.played)} rounds, {len(outcomes)} starts (the longest took"
            f" {max((outcome.seconds for outcome in outcomes), default=0):.1f} s), {places.total()} kills ({by_phase}),"
            f" {torn} checkpoints half written"
        )

    def _check(self, played: Round, elastic: bool) -> None:
        settings, result = played.settings, read_result(played.attempts[-1])
        check_every_sample_trained_once(result, settings.loss_reduction)
        check_logs(played.attempts, result)
        expected = self.uninterrupted(settings)
        if settings.mode in MODES_WITH_EQUAL_STEPS or not elastic:
            assert_equal_results(result, expected)
        epochs = [[epoch for epoch, _ in books.validations] for books in (result["books"], expected["books"])]
        assert epochs[0] == epochs[1], "validations of epochs"

    def uninterrupted(self, settings: JobSettings) -> dict[str, Any]:
        """What the job ends with on 2 ranks when nobody kills it."""
        if settings not in self._uninterrupted:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            attempt = Attempt(number=0, folder=folder, num_ranks=2)
            assert run(settings, attempt).finished
            self._uninterrupted[settings] = result = read_result(attempt)
            check_every_sample_trained_once(result, settings.loss_reduction)
        return self._uninterrupted[settings]

    def _until_it_ends(self, settings: JobSettings, rng: np.random.Generator, elastic: bool, folder: Path) -> Round:
        folder.mkdir(parents=True)
        played = Round(settings)
        num_kills = int(rng.integers(2, 7))
        # Where temporary files lie on another device than checkpoints, writing one is a copy that can stop half way.
        on_other_device = OTHER_DEVICE.exists() and rng.random() < 0.5
        with tempfile.TemporaryDirectory(dir=OTHER_DEVICE if on_other_device else folder) as temporary:
            for number in range(num_kills + 1):
                checkpoint, torn = newest_readable_checkpoint(folder / "checkpoints")
                played.num_torn += len(torn)
                num_ranks = int(rng.choice([1, 2])) if elastic else 2
                attempt = Attempt(number=number, folder=folder, num_ranks=num_ranks, checkpoint=checkpoint)
                attempt, outside = with_a_kill(attempt, rng) if number < num_kills else (attempt, None)
                grace_s = float(rng.choice([0.0, 0.5]))
                outcome = run(settings, attempt, outside, grace_s=grace_s, env={"TMPDIR": temporary})
                played.attempts.append(attempt)
                played.outcomes.append(outcome)
                if outcome.finished:
                    break
        assert played.outcomes[-1].finished
        return played


def with_a_kill(attempt: Attempt, rng: np.random.Generator) -> tuple[Attempt, KillFromOutside | None]:
    """The attempt with a rank's appointment, or with a kill from outside; the first attempt has an early one."""
    everyone = tuple(range(attempt.num_ranks))
    ranks = everyone if rng.random() < 0.5 else (int(rng.choice(everyone)),)
    phase = str(rng.choice([OUTSIDE, *NUM_EVENTS]))
    occurrence = int(rng.integers(MOST_OCCURRENCES.get(phase, 1))) if attempt.number else 0
    if phase == OUTSIDE:
        return attempt, KillFromOutside(micro_batch=occurrence, delay_s=float(rng.uniform(0, 0.05)), ranks=ranks)
    is_writing = phase == "writing" and rng.random() < 0.5
    event = str(rng.choice(CALLS_WHILE_WRITING)) if is_writing else int(rng.integers(NUM_EVENTS[phase]))
    note = attempt.folder / f"killed-{attempt.number}.txt"
    return replace(
        attempt, kill=KillPlan(phase=phase, occurrence=occurrence, event=event, ranks=ranks, note=note)
    ), None

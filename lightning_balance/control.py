"""Change the token budget of a running job through two small files in its log folder (layer 0).

The job describes itself in one file; a request is the other. Both are written atomically: a reader sees all of a file
or nothing of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_balance.validation import check_positive_int

RUN_FILE = "balance_run.json"
REQUEST_FILE = "balance_request.json"


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What a job says of itself, for whoever wants to change its budget.

    Attributes:
        max_tokens: the token budget in force.
        smallest_max_tokens: the smallest budget that the job can take.
        every_n_steps: the job looks for a request once in so many optimizer steps.
    """

    max_tokens: int
    smallest_max_tokens: int
    every_n_steps: int

    def write(self, folder: Path) -> None:
        """Write the description into the run's log folder."""
        _write(folder / RUN_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunDescription:
        """Return the description in a log folder.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        try:
            return cls(**json.loads((folder / RUN_FILE).read_text()))
        except FileNotFoundError:
            raise ValueError(
                f"{folder} is not the log folder of a running job with a token budget: it has no {RUN_FILE}; give the"
                " folder that the job's first logger writes to, such as lightning_logs/version_0"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{folder / RUN_FILE} cannot be read: {error}") from error


def end_run(folder: Path) -> None:
    """Remove the files of a job that has ended."""
    for name in (RUN_FILE, REQUEST_FILE):
        (folder / name).unlink(missing_ok=True)


def request_max_tokens(folder: Path, max_tokens: int) -> RunDescription:
    """Ask the job that logs to ``folder`` for another token budget; return what the job says of itself.

    Raises:
        TypeError: ``max_tokens`` is not an integer.
        ValueError: no job logs there, or it cannot take this budget.
    """
    check_positive_int("max_tokens", max_tokens)
    run = RunDescription.read(folder)
    if max_tokens < run.smallest_max_tokens:
        raise ValueError(
            f"max_tokens={max_tokens} is too small for the job in {folder}: with oversize='error' or a fixed number of"
            f" slots it needs at least {run.smallest_max_tokens}"
        )
    _write(folder / REQUEST_FILE, {"max_tokens": max_tokens})
    return run


def take_request(folder: Path) -> int | None:
    """Return the budget that was asked for and remove the request; None where there is none.

    Raises:
        ValueError: the request does not hold a positive integer; it is removed all the same.
    """
    path = folder / REQUEST_FILE
    taken = path.with_suffix(".taken")
    try:
        path.replace(taken)  # a request that is written from now on stays for the next time
    except FileNotFoundError:
        return None
    try:
        text = taken.read_text()
    finally:
        taken.unlink()
    try:
        return check_positive_int("max_tokens", json.loads(text)["max_tokens"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} asks for no token budget ({error}): it holds {text[:200]!r}") from error


def _write(path: Path, content: dict[str, int]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.replace(path)

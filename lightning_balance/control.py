"""Change the token budget of a running job through two small files in its log folder (layer 0).

The job describes itself in one file; a request is the other. Both are written atomically: a reader sees all of a file
or nothing of it, however many write at once. Whatever is wrong with the files is a ``ValueError`` of one sentence.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_balance.outputs import write_file
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
        host: the machine that the job's first process runs on; default: this one.
        pid: the number of that process there; default: this one.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a number is not positive.
    """

    max_tokens: int
    smallest_max_tokens: int
    every_n_steps: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "smallest_max_tokens", "every_n_steps", "pid"):
            object.__setattr__(self, name, check_positive_int(name, getattr(self, name)))  # Python's own, for JSON

    @property
    def is_here(self) -> bool:
        """Whether the job runs on this machine, so that its process can be looked for."""
        return self.host == socket.gethostname()

    @property
    def is_own(self) -> bool:
        """Whether this process is the job's."""
        return self.is_here and self.pid == os.getpid()

    @property
    def has_ended(self) -> bool:
        """Whether the job's process is gone; False where that is not known."""
        if not self.is_here or os.name != "posix":  # elsewhere signal 0 is not a mere question
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # somebody else's
            return False
        return False

    def write(self, folder: Path) -> None:
        """Write the description into the run's log folder.

        Raises:
            ValueError: it cannot be written.
        """
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
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{folder / RUN_FILE} cannot be read: {error}") from error


def begin_run(folder: Path, run: RunDescription) -> None:
    """Describe a job in its log folder, in place of one that has ended, and remove what that one was asked for.

    A job of another machine counts as ended: a run that was killed may go on elsewhere.

    Raises:
        ValueError: another job on this machine has the folder, or it cannot be written.
    """
    other = _described(folder)
    if other is not None and other.is_here and not other.is_own and not other.has_ended:
        raise ValueError(
            f"{folder} is the log folder of process {other.pid} too, which is running: give each job a folder of its"
            " own"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REQUEST_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}") from error
    run.write(folder)


def end_run(folder: Path) -> None:
    """Remove the files of this process's job, which has ended; those of another job stay.

    Raises:
        ValueError: they cannot be removed.
    """
    if _is_of_another_job(folder):
        return
    try:
        for name in (RUN_FILE, REQUEST_FILE):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{folder / name} cannot be removed: {error.strerror}") from error


def request_max_tokens(folder: Path, max_tokens: int) -> RunDescription:
    """Ask the job that logs to ``folder`` for another token budget; return what the job says of itself.

    Raises:
        TypeError: ``max_tokens`` is not an integer.
        ValueError: no job logs there, it cannot take this budget, or the request cannot be written.
    """
    max_tokens = check_positive_int("max_tokens", max_tokens)
    run = RunDescription.read(folder)
    if run.has_ended:
        raise ValueError(
            f"the job in {folder} has ended without a word: its process {run.pid} on {run.host} is gone; start it"
            " again, or give the folder of a running job"
        )
    if max_tokens < run.smallest_max_tokens:
        raise ValueError(
            f"max_tokens={max_tokens} is too small for the job in {folder}: with oversize='error' or a fixed number of"
            f" slots it needs at least {run.smallest_max_tokens}"
        )
    _write(folder / REQUEST_FILE, {"max_tokens": max_tokens})
    return run


def take_request(folder: Path) -> int | None:
    """Return the budget that was asked for and remove the request; None where this process's job has none.

    Raises:
        ValueError: the request does not hold a positive integer; it is taken away all the same.
    """
    path = folder / REQUEST_FILE
    try:
        if not path.exists() or _is_of_another_job(folder):  # the job asks in every step: as a rule that is all
            return None
        taken = path.with_name(f".{path.name}.{uuid4().hex}")
        path.replace(taken)  # a request that is written from now on stays for the next time
        text = taken.read_text(errors="replace")
        taken.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return check_positive_int("max_tokens", json.loads(text)["max_tokens"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} asks for no token budget ({error}): it holds {text[:200]!r}") from error


def _described(folder: Path) -> RunDescription | None:
    try:
        return RunDescription.read(folder)
    except ValueError:  # what cannot be read is nobody's
        return None


def _is_of_another_job(folder: Path) -> bool:
    run = _described(folder)
    return run is not None and not run.is_own


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        write_file(path, json.dumps(content))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error

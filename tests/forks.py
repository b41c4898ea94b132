"""Start ranks within milliseconds: an interpreter that has imported everything once forks one process per rank.

    with ForkServer() as forks:
        rank = forks.start(function, args, env=rank_environment(0, 1, port), output=folder / "output.txt")
        ...
        rank.poll()   # None while it runs, then its exit code: -9 if it was killed
        rank.kill()   # with its children; whatever it is doing

Importing torch and Lightning takes seconds; all tests of one process pay for it once (:func:`fork_server`). The server
runs a single thread and never a process group, a backward or a collective, and a fork gets the client's environment,
folder and path and random seeds of its own, so that it is as good as a new interpreter: but for what imports read from
the environment, and for the seed of the hashes of strings, which is the server's. A server ends with its client, for
any reason, and kills all ranks then; a rank also ends itself after its deadline. What a rank raises, SystemExit too, is
an exit code of 1 and a traceback in its output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PRELOAD = "tests.toys"
"""Imports what most ranks need: torch, Lightning, this package."""

_ENVIRONMENT = dict(os.environ)
"""That of the servers: not what a single test has made of it."""
_SERVERS: dict[int, ForkServer] = {}


def fork_server(number: int = 0) -> ForkServer:
    """A server of this process, which begins at the first call and ends with the process.

    Servers of other numbers have other seeds of the hashes of strings.
    """
    if number not in _SERVERS or not _SERVERS[number].is_open:
        _SERVERS[number] = ForkServer().__enter__()
    return _SERVERS[number]


class ForkServer:
    """Client's side of the server; a context manager that leaves no process behind.

    Args:
        preload: module that is imported once, with all that it imports.
    """

    def __init__(self, preload: str = PRELOAD) -> None:
        self._preload = preload

    def __enter__(self) -> ForkServer:
        environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        root = str(Path(__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in [root, *sys.path] if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", self._preload],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the client, which has ranks to kill then
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a server that is gone, to which something is left to write
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    @property
    def is_open(self) -> bool:
        """Whether the server runs and takes requests."""
        assert self._process.stdin is not None
        return not self._process.stdin.closed and self._process.poll() is None

    def start(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        env: Mapping[str, str],
        output: Path,
        limit_s: float,
    ) -> Rank:
        """Call ``function(*args)`` in a fork, in this process's environment and folder, with ``env`` added.

        Its stdout and stderr go to ``output``; it ends itself after ``limit_s`` seconds.
        """
        place = _Place({**os.environ, **env}, sys.path, str(Path.cwd()), str(output.absolute()), limit_s)
        return Rank(self, self._ask("start", function, args, place))

    def _ask(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((command, arguments), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except BaseException as error:  # an interrupt, too: the reply would be taken for that to the next request
            self.__exit__()
            if isinstance(error, (EOFError, BrokenPipeError)):
                raise RuntimeError(f"the server of forks ended with {self._process.returncode}") from error
            raise


class Rank:
    """A forked process, which leads a process group of its own."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Exit code, minus the signal's number if a signal ended it; None while it runs."""
        return self._server._ask("poll", self.pid)

    def kill(self) -> int:
        """SIGKILL to the rank and its children; its exit code, also if it had ended before, as far as that is known."""
        if self._server.is_open:
            return self._server._ask("kill", self.pid)
        with contextlib.suppress(ProcessLookupError):  # a server ends its ranks, unless it was killed itself
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


class _Place(NamedTuple):
    """Where a rank runs, and how long at most."""

    env: dict[str, str]
    path: list[str]
    folder: str
    output: str
    limit_s: float


class _Children:
    """The server's side.

    A rank that ended is waited for only when it is killed: until then its number belongs to it and its group, so that
    no signal reaches a process that got the number later.
    """

    def __init__(self, *pipes: BinaryIO) -> None:
        self._pipes = pipes
        self._exit_codes: dict[int, int | None] = {}

    def start(self, function: Callable[..., Any], args: tuple[Any, ...], place: _Place) -> int:
        pid = os.fork()
        if pid == 0:
            for pipe in self._pipes:
                os.close(pipe.fileno())  # the client would wait for a server that has ended
            _run(function, args, place)
        self._exit_codes[pid] = None
        return pid

    def poll(self, pid: int) -> int | None:
        code = self._exit_codes[pid]
        if code is not None:
            return code
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def kill(self, pid: int) -> int | None:
        if self._exit_codes[pid] is None:
            # The group may have members when its leader has ended: DataLoader workers. It may not have been made yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self._exit_codes[pid] = os.waitstatus_to_exitcode(status)
        return self._exit_codes[pid]

    def kill_all(self) -> None:
        for pid in self._exit_codes:
            self.kill(pid)


def _run(function: Callable[..., Any], args: tuple[Any, ...], place: _Place) -> None:
    code = 1
    try:
        os.setsid()
        descriptor = os.open(place.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
            os.dup2(source, target)
        os.close(descriptor)
        os.close(nothing)
        os.chdir(place.folder)
        sys.path[:] = place.path
        os.environ.clear()
        os.environ.update(place.env)
        tempfile.tempdir = None  # the server may have looked at its own TMPDIR already
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        faulthandler.dump_traceback_later(place.limit_s, exit=True)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
            sys.modules["torch"].seed()  # the forks would share it; Python's own `random` sees to it itself
            sys.modules["numpy"].random.seed()
        function(*args)
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001  # the fork must not return into the server
        traceback.print_exc()
        sys.stdout.flush()
    finally:
        os._exit(code)


def _serve(preload: str, requests: BinaryIO, replies: BinaryIO) -> None:
    importlib.import_module(preload)
    threads = Path("/proc/self/task")  # also those that Python does not know, where the system tells
    if threading.active_count() > 1 or (threads.exists() and len(list(threads.iterdir())) > 1):
        raise RuntimeError(f"importing {preload} started threads, which a fork would lose")
    children = _Children(requests, replies)
    try:
        while True:
            try:
                command, arguments = pickle.load(requests)
            except EOFError:
                return
            pickle.dump(getattr(children, command)(*arguments), replies)
            replies.flush()
    finally:
        children.kill_all()


if __name__ == "__main__":
    from tests import forks

    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not mix with the replies
    forks._serve(sys.argv[1], requests, replies)

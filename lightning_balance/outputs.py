"""Files that are never seen half written, and can be found to be writable before the work for them (layer 0)."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

__all__ = ["check_outputs", "whole_file", "why_not_writable", "write_file"]


def check_outputs(paths: Mapping[str, Path]) -> None:
    """Check that files can be written, before the work whose results they are to hold.

    Args:
        paths: each file by the option that asks for it.

    Raises:
        ValueError: one cannot be written, or two are the same.

    Example:
        >>> check_outputs({"--json": Path("no/such/folder/out.json")})
        Traceback (most recent call last):
            ...
        ValueError: --json no/such/folder/out.json cannot be written: there is no folder no/such/folder
    """
    options: dict[Path, str] = {}
    for option, path in paths.items():
        reason = why_not_writable(path)
        if reason:
            raise ValueError(f"{option} {path} cannot be written: {reason}")
        other = options.setdefault(_target(path), option)
        if other != option:
            raise ValueError(f"{other} and {option} are both {path}: give each a file of its own")


@contextmanager
def whole_file(path: Path, *, keep_mode: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that is written whole or not at all: readers see the old one or the new one.

    A link stays and its target is replaced; a device such as ``/dev/null`` stays and is written to.

    Args:
        path: the file.
        keep_mode: it gets the mode of the file that it replaces; else that of any new file.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(Path(folder, "lengths.txt")) as file:
        ...         _ = file.write(b"3 4")
        ...     Path(folder, "lengths.txt").read_text()
        '3 4'
    """
    target = _target(path)
    if target.is_char_device():
        with target.open("wb") as file:
            yield file
        return
    draft = target.with_name(f".lightning-balance-{uuid4().hex}.tmp")
    try:
        with draft.open("xb") as file:
            if keep_mode:
                _copy_mode(target, draft)
            yield file
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str | bytes) -> None:
    """Write a :func:`whole_file` at once; text in UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def why_not_writable(path: Path) -> str | None:
    """Return the reason why a file cannot be written, in a few words; None where nothing is known against it."""
    try:
        return _fault(path)
    except OSError as error:
        return error.strerror or str(error)


def _fault(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    target = _target(path)
    if target.is_symlink():
        return "its links lead in a circle"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent if path.is_symlink() else path.parent}"
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # what it will be
    else:
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            return "it is neither a regular file nor a character device"
        target.open("ab").close()
    if stat.S_ISREG(mode):
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    return None


def _copy_mode(source: Path, path: Path) -> None:
    with suppress(FileNotFoundError):  # none yet, or somebody has just taken it away
        mode = source.stat().st_mode
        if mode != path.stat().st_mode:  # some file systems refuse to change it
            path.chmod(stat.S_IMODE(mode))


def _target(path: Path) -> Path:
    """Return what a path leads to; unlike ``Path.resolve`` also where links lead in a circle."""
    return Path(os.path.realpath(path))

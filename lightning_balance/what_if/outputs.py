"""Files that are written at the end: found to be writable at the beginning, and never seen half written."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["check_outputs", "write_file"]


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
        reason = _why_not(path)
        if reason:
            raise ValueError(f"{option} {path} cannot be written: {reason}")
        other = options.setdefault(_target(path), option)
        if other != option:
            raise ValueError(f"{other} and {option} are both {path}: give each a file of its own")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: readers see the old one or the new one, which has the old one's mode.

    A link stays and its target is replaced; a device such as ``/dev/null`` stays and is written to.

    Raises:
        OSError: it cannot be written.
    """
    target, data = _target(path), content.encode() if isinstance(content, str) else content
    if target.is_char_device():
        target.write_bytes(data)
        return
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".lightning-balance-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes it readable for the user only
        Path(temporary).chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _why_not(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    target = _target(path)
    if target.is_symlink():
        return "its links lead in a circle"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent if path.is_symlink() else path.parent}"
    if target.exists() and not (target.is_file() or target.is_char_device()):
        return "it is neither a regular file nor a character device"
    try:
        if target.exists():
            target.open("ab").close()
        if not target.is_char_device():
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        return error.strerror or str(error)
    return None


def _target(path: Path) -> Path:
    """Return what a path leads to; unlike ``Path.resolve`` also where links lead in a circle."""
    return Path(os.path.realpath(path))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Files that are written at the end: found to be writable at the beginning, and never seen half written."""

from __future__ import annotations

import os
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
        other = options.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(f"{other} and {option} are both {path}: give each a file of its own")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: readers see the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(temporary).chmod(0o666 & ~_umask())  # mkstemp makes it readable for the user only
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _why_not(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    try:
        if path.exists():
            path.open("ab").close()
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

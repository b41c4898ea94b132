"""Real text that is on every machine with Python: the source of the standard library's functions."""

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests are not installed everywhere, and site-packages lies inside the folder of the standard library.
_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function: where it stands (`json/decoder.py:12 scanstring`) and its exact source."""

    name: str
    source: str


def find_functions(
    root: Path | str | None = None, *, num_functions: int | None = None, num_files: int | None = None
) -> list[Function]:
    """Find the functions and methods below a folder of Python files, by default the installed standard library.

    The order is deterministic: files by path, functions as they stand in the file. A function inside a function is part
    of the outer one's source and not listed again. The source starts at `def`, without decorators, as in
    `ast.get_source_segment`.

    Args:
        root: folder of Python files.
        num_functions: stop after so many functions.
        num_files: read only the first so many files.

    Raises:
        ValueError: a limit below 1, or no function found.

    Example:
        >>> first, *others = find_functions(num_functions=3)
        >>> len(others), first.source.startswith(("def ", "async def "))
        (2, True)
    """
    for name, limit in (("num_functions", num_functions), ("num_files", num_files)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, or None for all, got {limit}")
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    functions: list[Function] = []
    for path in _python_files(root)[:num_files]:
        functions.extend(_functions_of(path, path.relative_to(root).as_posix()))
        if num_functions is not None and len(functions) >= num_functions:
            return functions[:num_functions]
    if not functions:
        raise ValueError(f"root must hold Python files with functions, found none below {root}: give another folder")
    return functions


def _python_files(root: Path) -> list[Path]:
    files = (path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _functions_of(path: Path, shown_path: str) -> Iterator[Function]:
    try:
        with tokenize.open(path) as file:  # honours the file's own encoding
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old syntax in the parsed files is not the user's concern
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # files that are broken on purpose, or written for another version
    lines = [line.encode() for line in source.split("\n")]  # columns of the tree count UTF-8 bytes
    for node in _outermost_functions(tree):
        yield Function(name=f"{shown_path}:{node.lineno} {node.name}", source=_segment(lines, node))


def _outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _outermost_functions(node)


def _segment(lines: list[bytes], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    assert node.end_lineno is not None
    segment = lines[node.lineno - 1 : node.end_lineno]
    segment[-1] = segment[-1][: node.end_col_offset]
    segment[0] = segment[0][node.col_offset :]
    return b"\n".join(segment).decode()

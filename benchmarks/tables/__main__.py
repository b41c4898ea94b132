"""Print the tables of the documentation from the saved figures.

    python -m benchmarks.tables                     # all tables
    python -m benchmarks.tables scale_batch         # one of them
    python -m benchmarks.tables --write docs/planner.md

``--write`` puts each table between its markers ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.tables.documents import TABLES, table, write_tables


def main() -> None:
    """Print tables, or write them into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"tables to print: {', '.join(TABLES)}")
    parser.add_argument("--write", type=Path, action="append", default=[], help="file whose tables are made anew")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {unknown[0]!r}; tables are: {', '.join(TABLES)}")
    for path in args.write:
        path.write_text(write_tables(path.read_text(encoding="utf-8"), args.results), encoding="utf-8")
    if not args.write:
        for name in args.names or TABLES:
            print(f"{name}\n\n{table(name, args.results)}\n")


if __name__ == "__main__":
    main()

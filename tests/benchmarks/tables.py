"""What every table of the documentation has to be."""

from benchmarks.tables import documents

SCRIPTS_WITH_TESTS = {
    "budget_sweep",
    "calibration",
    "end_to_end",
    "loss_curves",
    "memory",
    "overhead",
    "overhead_long",
    "simulation",
}
"""Scripts whose figures take training or long, and that have tests of their own."""


def check_table(name, folder):
    lines = documents.table(name, folder).splitlines()
    num_columns = lines[0].count("|")
    assert len(lines) >= 5
    assert all(line.count("|") == num_columns for line in lines[:-2])
    assert lines[-1].startswith("`python -m benchmarks.")

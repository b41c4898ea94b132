"""The releases that CI installs are the oldest and the newest that pyproject.toml states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def read_pins(lines: list[str]) -> dict[str, Version]:
    """Name and release of each `name==release`."""
    pins = {}
    for line in lines:
        if text := line.partition("#")[0].strip():
            requirement = Requirement(text)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[canonicalize_name(requirement.name)] = Version(specifier.version)
    return pins


def read_file(name: str) -> dict[str, Version]:
    return read_pins((REPOSITORY / ".ci" / name).read_text().splitlines())


def requirements_of(project: dict[str, Any], listed: list[str]) -> list[Requirement]:
    """Requirements with those of the package's own extras in place of `lightning-balance[extra, ...]`."""
    found = []
    for requirement in map(Requirement, listed):
        if requirement.name != project["name"]:
            found.append(requirement)
        for extra in requirement.extras if requirement.name == project["name"] else ():
            found += requirements_of(project, project["optional-dependencies"][extra])
    return found


def lower_bounds(project: dict[str, Any]) -> dict[str, Version]:
    """The `>=` of everything that a test run installs."""
    bounds = {}
    for requirement in requirements_of(project, [*project["dependencies"], f"{project['name']}[test]"]):
        (bound,) = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
        bounds[canonicalize_name(requirement.name)] = Version(bound)
    return bounds


def test_the_oldest_releases_in_ci_are_the_lower_bounds(pyproject: dict[str, Any]) -> None:
    assert read_file("oldest.txt") == lower_bounds(pyproject["project"])


def test_the_newest_releases_in_ci_are_those_stated(pyproject: dict[str, Any]) -> None:
    assert read_file("newest.txt") == read_pins(pyproject["tool"]["lightning-balance"]["newest-tested"])


def test_ci_installs_both() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert all(f"--constraint .ci/{name}.txt" in script for name in ("oldest", "newest"))

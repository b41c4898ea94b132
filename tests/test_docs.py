"""The written word holds: commands exist, links lead somewhere, examples run.

A Python block runs in a fresh interpreter with all blocks before it in the same file. One that cannot run everywhere
(eight GPUs, a class of the reader's) is preceded by a line `<!-- not run: REASON -->` and is only compiled.
"""

import os
import re
import subprocess
import sys

import pytest

import lightning_balance
from lightning_balance.cli import COMMANDS
from tests.command import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
BLOCK = re.compile(
    r"(?P<mark><!-- not run: .+? -->\s*)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def blocks(page, *kinds):
    return [match for match in BLOCK.finditer(page.read_text()) if match["kind"] in kinds]


def commands(text):
    """The words after each `lightning-balance` in shell lines, with lines that end in a backslash joined."""
    return [
        words.split() for words in re.findall(r"\blightning-balance +([a-z][^\n|&;#`]*)", text.replace("\\\n", " "))
    ]


@page_by_page
def test_links_lead_to_files(page):
    text = BLOCK.sub("", page.read_text())
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@page_by_page
def test_named_files_of_the_repository_exist(page):
    names = re.findall(r"\b(?:configs|tests|benchmarks|docs|lightning_balance)/[\w./-]+\.\w+", page.read_text())
    assert [name for name in names if not (REPOSITORY / name).exists()] == []


@page_by_page
def test_shell_commands_exist(page):
    for block in blocks(page, "bash", "sh", "shell", "console"):
        for words in commands(block["text"]):
            assert words[0] in COMMANDS


@page_by_page
def test_names_of_the_package_exist(page):
    for name in re.findall(r"\blb\.(\w+(?:\.\w+)*)", page.read_text()):
        value = lightning_balance
        for part in name.split("."):
            value = getattr(value, part)


@page_by_page
def test_python_examples_run(page, tmp_path):
    found = blocks(page, "python", "py")
    for block in found:
        compile(block["text"], str(page), "exec")
    code = "\n".join(block["text"] for block in found if not block["mark"])
    if code:
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert run.returncode == 0, f"{code}\n{run.stderr[-3000:]}"


def test_the_readme_starts_with_the_two_commands():
    text = (REPOSITORY / "README.md").read_text()
    assert 'pip install -e ".[demo]"' in text
    assert "lightning-balance fit --config configs/demo.yaml" in text
    assert 'pip install -e ".[test]"' in text
    assert re.search(r"^pytest|&& pytest", text, re.MULTILINE)


def test_the_checks_can_fail(tmp_path):
    page = tmp_path / "page.md"
    example = "```bash\nlightning-balance \\\n  train x\n```\n```python\n1 / 0\n```\n"
    page.write_text(f"[a](nowhere.md) configs/nowhere.yaml lb.Nothing\n{example}")
    for check in (test_links_lead_to_files, test_named_files_of_the_repository_exist, test_shell_commands_exist):
        with pytest.raises(AssertionError):
            check(page)
    with pytest.raises(AttributeError):
        test_names_of_the_package_exist(page)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        test_python_examples_run(page, tmp_path)
    page.write_text("<!-- not run: needs eight GPUs -->\n```python\n1 / 0\n```\n")
    test_python_examples_run(page, tmp_path)


def test_version_is_in_the_changelog_or_unreleased():
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"## [{lightning_balance.__version__}]" in text or "## [Unreleased]" in text

"""The README: what it shows is what happens."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from doc_pages import ROOT, Page, blocks_of

README = ROOT / "README.md"


@pytest.mark.timeout(600)
def test_every_block_and_command_of_the_readme_runs(tmp_path: Path) -> None:
    for name in ("examples", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = Page(README, tmp_path)
    page.run()
    assert [command.split()[0] for command in page.ran] == ["python", "samestep", "torchrun", "samestep"]
    assert len(page.seen) == 2  # the fingerprint of the example, and that of the demo


def test_the_training_it_shows_is_the_example() -> None:
    (shown,) = (block.text for block in blocks_of(README) if block.language == "python")
    stored = (ROOT / "examples" / "train.py").read_text()
    assert stored.partition("\n\n")[2] == shown


def test_the_two_commands_are_targets_that_build_the_environment() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (commands,) = (b.text for b in blocks_of(README) if b.language == "console" and "$ make" in b.text)
    for target in re.findall(r"^\$ make (\w+)$", commands, re.MULTILINE):
        assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE)
        needed = {target}
        while (
            more := {
                name
                for goal in needed
                for line in re.findall(rf"^{goal}: (.*)$", makefile, re.MULTILINE)
                for name in line.split()
            }
            - needed
        ):
            needed |= more
        assert ".venv/installed" in needed, target
    assert "samestep train examples/austen.yaml" in makefile.partition("\ndemo:")[2].partition("\n\n")[0]
    assert ">=3.11" in (ROOT / "pyproject.toml").read_text()


def test_every_link_of_a_page_leads_somewhere() -> None:
    pages = [README, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_an_installed_package_has_every_file() -> None:
    """An editable installation would not miss one that `pip install .` leaves out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kept = settings["tool"]["setuptools"]["package-data"]
    source = ROOT / "src"
    listed = {
        path
        for package, patterns in kept.items()
        for pattern in patterns
        for path in (source / package.replace(".", "/")).glob(pattern)
    }
    others = {
        path
        for path in (source / "samestep").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert others <= listed, sorted(str(path.relative_to(source)) for path in others - listed)

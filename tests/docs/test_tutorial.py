"""The tutorial: every block and every command runs and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, Page


@pytest.mark.timeout(600)
def test_every_block_and_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    page = Page(ROOT / "docs" / "tutorial.md", tmp_path)
    page.run()
    assert len(page.ran) == 7
    assert len(page.seen) == 3  # of the script and the loop, of the recipe, and of its first steps

"""The design page: every file and every test that it names is there."""

from __future__ import annotations

import re

import pytest
from doc_pages import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text()
SOURCE = ROOT / "src" / "samestep"
RULES = re.findall(r"^### (\d+)\. (.*?)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("number", "title", "text"), RULES, ids=[title for _, title, _ in RULES])
def test_a_rule_names_code_and_tests_that_exist(number: str, title: str, text: str) -> None:
    assert RULES[int(number) - 1][1] == title
    code = re.findall(r"`([a-z_]+/(?:[a-z_]+\.py)?)`", text.partition("*Code:*")[2])
    assert code
    assert all((SOURCE / name).exists() for name in code), code
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert tests
    for path, name in tests:
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
    for note in re.findall(r"Note (\[[^\]]+\])", text.replace("\n", " ")):
        files = [path for path in SOURCE.rglob("*.py") if f"Note {note}:" in path.read_text()]
        assert files, f"no file has the note {note}"


def test_every_path_on_the_page_exists() -> None:
    for path in re.findall(r"`((?:tests/)?[a-z_]+/[\w/]+\.py)", PAGE):
        assert (ROOT / path).is_file() or (SOURCE / path).is_file(), path

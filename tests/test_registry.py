"""Tasks are found by name, by entry point and by dotted path."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from samestep import registry
from samestep.errors import ConfigError
from samestep.registry import find_task, task_names


def test_a_task_is_found_by_its_name() -> None:
    assert find_task("lm").__name__ == "LanguageModel"


def test_a_class_is_found_by_its_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task_for_registry.py").write_text("class Digits:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_task_for_registry.Digits", "own_task_for_registry:Digits"):
        assert find_task(name).__name__ == "Digits"
    with pytest.raises(ConfigError, match=r"has no class Digit\. Did you mean Digits"):
        find_task("own_task_for_registry.Digit")


def test_an_error_inside_the_users_module_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_task_for_registry.py").write_text("import no_such_module_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_mine"):
        find_task("broken_task_for_registry.Digits")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lmm", "Did you mean lm"),
        ("nowhere.Digits", "there is no module nowhere"),
        ("samestep.no.X", "samestep.no"),
    ],
)
def test_an_unknown_task_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_task(name)


def test_installed_packages_add_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("digits", "their.tasks:Digits", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda **_: entries)
    assert task_names()["digits"] == "their.tasks:Digits"
    entries.append(EntryPoint("digits", "other:Digits", registry.GROUP))
    with pytest.raises(ConfigError, match="registered twice"):
        task_names()

"""Settings say which key is wrong, where, and which one was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from samestep.config import Batching, Recipe, Settings
from samestep.errors import ConfigError


class Inner(Settings):
    depth: int = 1
    place: Path = Path("x")


class Left(Settings):
    name: Literal["left"]
    size: int


class Outer(Settings):
    inner: Inner = Inner()
    kind: Left | None = None


def message(call: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    return str(caught.value)


def test_an_unknown_key_of_inner_settings_is_named_with_its_place() -> None:
    text = message(Outer, inner={"dept": 2})
    assert text == "Outer: unknown key inner.dept. Did you mean depth? Known keys: depth, place."


def test_the_source_and_the_place_stand_before_the_key() -> None:
    text = message(Inner.read, {"dept": 2}, source="a.yaml", place=("model",))
    assert text.startswith("a.yaml: unknown key model.dept. Did you mean depth?")


def test_a_wrong_value_is_named_with_its_key() -> None:
    assert message(Outer, inner={"depth": "deep"}).startswith("Outer: inner.depth is 'deep': ")


def test_every_problem_is_named_at_once() -> None:
    assert len(message(Outer, inner={"dept": 2}, knid=1).splitlines()) == 2


def test_settings_are_frozen() -> None:
    settings = Inner()
    with pytest.raises(Exception, match="frozen"):
        settings.depth = 2  # type: ignore[misc]


def test_only_relative_paths_are_anchored() -> None:
    assert Inner(place="a/b").anchored(Path("/base")).place == Path("/base/a/b")
    assert Inner(place="/a/b").anchored(Path("/base")).place == Path("/a/b")


def test_a_micro_batch_larger_than_the_global_batch_is_refused() -> None:
    assert "Lower micro_batch to 2" in message(Batching, global_batch=2, micro_batch=3)


@pytest.mark.parametrize(("global_batch", "micro_batch"), [(1, 1), (8, 1), (9, 2), (32, 4)])
def test_the_micro_batch_is_chosen_from_the_global_batch_alone(global_batch: int, micro_batch: int) -> None:
    assert Batching(global_batch=global_batch).resolved().micro_batch == micro_batch


def test_every_key_of_a_recipe_is_described() -> None:
    assert [name for name, field in Recipe.model_fields.items() if not field.description] == []

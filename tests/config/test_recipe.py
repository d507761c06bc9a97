"""A recipe comes from its layers, and a mistake in any of them is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.config import Recipe, load_recipe, write_yaml
from samestep.config.plain_yaml import parse_yaml
from samestep.errors import ConfigError

TEXT = """
task: lm
model: {layers: 2}
data: {text: a.txt}
batching: {global_batch: 32}
optimizer: {name: adamw, lr: 3e-4}
steps: 200
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path, *assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, assignments)
    return str(caught.value)


def test_a_recipe_is_read_with_its_defaults(write: Write) -> None:
    recipe = load_recipe(write(TEXT))
    assert (recipe.steps, recipe.optimizer.lr, recipe.threads, recipe.precision) == (200, 3e-4, 1, "fp32")


def test_later_layers_win(write: Write) -> None:
    path = write(TEXT)
    recipe = load_recipe(path, ["steps=5", "optimizer.lr=1e-2", "schedule.name=linear"], workers=3)
    assert (recipe.steps, recipe.optimizer.lr, recipe.schedule.name, recipe.workers) == (5, 0.01, "linear", 3)
    assert load_recipe(path, ["steps=5"], steps=7).steps == 7


def test_the_option_steps_replaces_epochs(write: Write) -> None:
    recipe = load_recipe(write(TEXT.replace("steps: 200", "epochs: 2")), steps=3)
    assert (recipe.steps, recipe.epochs) == (3, None)


def test_paths_are_relative_to_the_file(write: Write) -> None:
    path = write(TEXT + "folder: out\n")
    assert load_recipe(path).folder == path.parent / "out"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("global_batch", "globl_batch", "unknown key batching.globl_batch. Did you mean global_batch?"),
        (
            "lr: 3e-4",
            "lr: 3e-4, weight_dcay: 1",
            "unknown key optimizer.weight_dcay. Did you mean weight_decay?",
        ),
        ("adamw", "admaw", "optimizer.name is 'admaw'. Did you mean adamw? Known values: adamw, adam, sgd."),
        ("name: adamw, ", "", "the key optimizer.name is missing. Known names: adamw, adam, sgd."),
        ("steps: 200", "stpes: 200", "unknown key stpes. Did you mean steps?"),
        ("steps: 200", "", "either steps or epochs, and not both: neither is set"),
        ("steps: 200", "steps: 2\nepochs: 1", "not both: steps 2 and epochs 1"),
        (
            "steps: 200",
            "steps: 2\nprecision: fp61",
            "precision is 'fp61'. Did you mean fp16? Known values: fp32",
        ),
        ("lr: 3e-4", "lr: -1", "optimizer.lr is -1: input should be greater than 0"),
        ("lr: 3e-4", "lr: .inf", "optimizer.lr is inf: "),
        ("steps: 200", "steps: 2\nsteps: 3", "the key steps stands twice, on lines 7 and 8"),
        ("steps: 200", "steps: [", "line 8, column 1: this is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(write: Write, old: str, new: str, expected: str) -> None:
    text = refusal(write(TEXT.replace(old, new)))
    assert expected in text
    assert "recipe.yaml" in text


def test_a_mistake_of_an_assignment_is_named(write: Write) -> None:
    path = write(TEXT)
    assert "expected key.path=value" in refusal(path, "steps")
    assert "expected key.path=value" in refusal(path, "a..b=1")
    assert "task is 'lm' and has no key x" in refusal(path, "task.x=1")
    assert "--set model.layers=[: this is not YAML" in refusal(path, "model.layers=[").replace(
        ", line 1, column 2", ""
    )
    assert "--set optimzer.lr=1: unknown key optimzer. Did you mean optimizer?" in refusal(
        path, "optimzer.lr=1"
    )


def test_a_missing_or_empty_file_is_refused(tmp_path: Path, write: Write) -> None:
    assert "there is no such file" in refusal(tmp_path / "none.yaml")
    assert "expected keys with values" in refusal(write(""))
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("12", 12),
        ("0x10", 16),
        ("true", True),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'3e-4'", "3e-4"),
        ("e3", "e3"),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}", "here")
    assert found == {"key": value}
    assert type(found["key"]) is type(value)


def test_anchors_and_merges_are_understood() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\n"
    assert parse_yaml(text, "here") == {"base": {"a": 1, "b": 2}, "other": {"a": 1, "b": 3}}


@given(st.floats(allow_nan=False, min_value=1e-300, max_value=1e300))
def test_a_written_float_is_read_back_exactly(value: float) -> None:
    assert parse_yaml(write_yaml({"lr": value}), "here") == {"lr": value}


def test_a_written_recipe_is_the_same_recipe(write: Write, tmp_path: Path) -> None:
    recipe = load_recipe(write(TEXT), ["clip_norm=0.1", "optimizer.betas=[0.9, 0.95]"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(write_yaml(recipe.written()))
    assert load_recipe(copy) == recipe


def test_keys_that_belong_together_are_checked() -> None:
    base = {"task": "lm", "batching": {"global_batch": 1}, "steps": 1}
    with pytest.raises(ConfigError, match="nesterov"):
        Recipe(**base, optimizer={"name": "sgd", "lr": 0.1, "nesterov": True})
    with pytest.raises(ConfigError, match=r"schedule\.decay"):
        Recipe(**base, optimizer={"name": "sgd", "lr": 0.1}, schedule={"name": "wsd"})

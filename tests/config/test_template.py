"""The recipe that `samestep init` writes: every key, each with its own description, and all of it valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli.app import app
from samestep.cli.init import init
from samestep.config import Recipe, load_recipe
from samestep.config.template import recipe_template
from samestep.errors import ConfigError, LossError
from samestep.tasks.lm import GptSettings, TextSettings
from samestep.tasks.prepare import prepare


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 40)
    return path


def filled(template: str, text: Path) -> str:
    return template.replace("PATH/TO/TEXT.txt", str(text))


def test_the_recipe_is_valid_as_written(tmp_path: Path, text: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(filled(recipe_template("lm", GptSettings, TextSettings), text))
    prepared = prepare(load_recipe(path), path)
    assert prepared.recipe.steps == 200


def test_each_comment_is_a_key_with_its_default(tmp_path: Path, text: Path) -> None:
    template = filled(recipe_template("lm", GptSettings, TextSettings), text)
    path = tmp_path / "recipe.yaml"
    path.write_text(template)
    before = prepare(load_recipe(path), path).recipe
    opened = re.sub(r"^# (?=\s*\w+:)(?!See|Train)", "", template, flags=re.MULTILINE)
    path.write_text(opened)
    after = prepare(load_recipe(path), path).recipe
    switched_on = {"checkpoint", "ema"}  # an empty section is a section
    assert after.model_dump(exclude=switched_on) == before.model_dump(exclude=switched_on)


def test_every_key_is_there_with_its_description(text: Path) -> None:
    template = recipe_template("lm", GptSettings, TextSettings)
    for kind in (Recipe, GptSettings, TextSettings):
        for name, field in kind.model_fields.items():
            description = re.escape(" ".join((field.description or "").split()))
            assert re.search(rf"^(# )? *{name}:.*# {description}$", template, flags=re.MULTILINE), name


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.yaml is there already\. Name another file with --to"):
        init("lm", to=path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        init("lm", to=tmp_path / "none" / "mine.yaml")


def test_a_dry_run_tells_the_plan_and_trains_nothing(tmp_path: Path, text: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(filled(recipe_template("lm", GptSettings, TextSettings), text))
    sizes = ["--set", "batching.global_batch=5", "--set", "batching.micro_batch=2"]
    told = CliRunner().invoke(app, ["train", str(path), "--dry-run", "--workers", "3", *sizes])
    assert told.exit_code == 0, told.output
    lines = {line[:24].strip(): line[24:] for line in told.output.splitlines()}
    assert lines["samples"] == "12"
    assert lines["global batch"] == "5 samples = 3 micro-batches"
    assert lines["ranks"] == "3, with 1 micro-batches of a step each"
    assert lines["steps"] == "200; 3 in an epoch"
    assert lines["last batch of an epoch"] == "2 samples (keep)"
    assert lines["first loss"].endswith("over a weight of 256 in the first micro-batch")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["recipe.yaml", "text.txt"]


BROKEN = """
from samestep.tasks.lm import LanguageModel

class Broken:
    model_settings = LanguageModel.model_settings
    data_settings = LanguageModel.data_settings

    def __init__(self, model, data):
        self._task = LanguageModel(model, data)

    def build_model(self):
        return self._task.build_model()

    def build_dataset(self):
        return self._task.build_dataset()

    def loss(self, model, batch):
        return self._task.loss(model, batch).total  # a bare tensor
"""


def test_a_dry_run_finds_a_loss_that_means_nothing(tmp_path: Path, text: Path) -> None:
    (tmp_path / "broken_dry.py").write_text(BROKEN)
    path = tmp_path / "recipe.yaml"
    path.write_text(filled(recipe_template("broken_dry.Broken", GptSettings, TextSettings), text))
    told = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert isinstance(told.exception, LossError)
    assert "the loss returned a bare tensor" in str(told.exception)


def test_a_task_of_the_user_s_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "task_beside.py").write_text("from samestep.tasks.lm import LanguageModel as Mine\n")
    init("task_beside.Mine", to=tmp_path / "mine.yaml")
    assert "task: task_beside.Mine" in (tmp_path / "mine.yaml").read_text()

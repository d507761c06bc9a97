"""The task `lm`: exact weights, no look ahead, the same model and text from the same seed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from samestep.config import Recipe
from samestep.errors import ConfigError
from samestep.numerics.fingerprint import model_fingerprint
from samestep.tasks.assembly import assemble
from samestep.tasks.gpt import Gpt, next_byte_losses, write
from samestep.tasks.lm import LanguageModel
from samestep.tasks.prepare import prepare

SHAPE = {"layers": 2, "width": 8, "heads": 2, "context": 6}


def small(seed: int = 0, **changes: object) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(**{**SHAPE, **changes})  # type: ignore[arg-type]


def recipe(tmp_path: Path, **changes: object) -> Recipe:
    (tmp_path / "a.txt").write_text("abcdefg" * 30)
    values: dict[str, object] = {
        "task": "lm",
        "model": SHAPE,
        "data": {"text": "a.txt", "sample": 20},
        "batching": {"global_batch": 8},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "epochs": 2,
    }
    return Recipe(**{**values, **changes})


def test_the_loss_is_the_cross_entropy_of_every_next_byte() -> None:
    model = small()
    windows = torch.randint(0, 256, (3, 7), dtype=torch.uint8)
    losses = next_byte_losses(model, windows)
    assert losses.shape == (18,)
    logits = model(windows[:, :6])
    for sample in range(3):
        for place in range(6):
            target = windows[sample, place + 1].long()
            expected = cross_entropy(logits[sample, place], target)
            torch.testing.assert_close(losses[sample * 6 + place], expected)


def test_no_position_sees_what_comes_after_it() -> None:
    model = small()
    first = torch.randint(0, 256, (1, 6))
    second = first.clone()
    second[0, 4:] = 7
    assert torch.equal(model(first)[0, :4], model(second)[0, :4])
    assert not torch.equal(model(first)[0, 4:], model(second)[0, 4:])


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_is_tied_where_wanted(tied: bool) -> None:
    model = small(tied=tied)
    assert (model.output.weight is model.bytes.weight) == tied
    assert len(list(model.parameters())) == 2 + 2 * 12 + 2 + (not tied)


def test_dropout_is_drawn_in_training_only() -> None:
    model = small(dropout=0.5)
    content = torch.randint(0, 256, (2, 6))
    assert not torch.equal(model(content), model(content))
    model.eval()
    assert torch.equal(model(content), model(content))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_weights_write_the_same_text_and_touch_no_generator(temperature: float) -> None:
    model = small(dropout=0.5)
    before = torch.get_rng_state()
    texts = {write(model, b"\n", 20, context=6, temperature=temperature) for _ in range(2)}
    assert len(texts) == 1
    assert len(texts.pop()) == 20
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_a_recipe_becomes_the_same_model_whatever_was_drawn_before(tmp_path: Path) -> None:
    prepared = prepare(recipe(tmp_path), tmp_path / "r.yaml")
    first = assemble(prepared)
    torch.rand(3)
    second = assemble(prepared)
    assert model_fingerprint(first.model) == model_fingerprint(second.model)
    other = assemble(prepare(recipe(tmp_path, seed=1), tmp_path / "r.yaml"))
    assert model_fingerprint(first.model) != model_fingerprint(other.model)


def test_a_prepared_recipe_has_every_default_and_stands_anywhere(tmp_path: Path) -> None:
    resolved = prepare(recipe(tmp_path), tmp_path / "r.yaml").recipe
    assert resolved.data["text"] == str(tmp_path / "a.txt")
    assert resolved.model["dropout"] == 0.0
    assert resolved.batching.micro_batch == 1
    assert prepare(resolved, Path("/elsewhere/r.yaml")).recipe == resolved


def test_the_parts_fit_each_other(tmp_path: Path) -> None:
    prepared = prepare(recipe(tmp_path, schedule={"name": "warmup_cosine", "warmup": 1}), tmp_path / "r.yaml")
    assembly = assemble(prepared)
    batch = default_collate([assembly.dataset[i] for i in range(4)])
    loss = prepared.task.loss(assembly.model, batch)
    assert not isinstance(loss, dict)
    assert float(loss.weight) == 24  # type: ignore[union-attr]
    optimizer = assembly.optimizer(assembly.model.parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert assembly.schedule(8) == 0.0  # 2 epochs of 30 samples are 8 steps
    assert assembly.schedule(0) == 1.0


def test_the_end_shows_a_text(tmp_path: Path) -> None:
    task = prepare(recipe(tmp_path), tmp_path / "r.yaml").task
    assert isinstance(task, LanguageModel)
    assert task.describe(small()) == task.describe(small())
    silent = prepare(recipe(tmp_path, data={"text": "a.txt", "sample": 0}), tmp_path / "r.yaml").task
    assert isinstance(silent, LanguageModel)
    assert silent.describe(nn.Linear(1, 1)) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"layer": 2}}, r"r\.yaml: unknown key model\.layer\. Did you mean layers\?"),
        (
            {"model": {"width": 10, "heads": 4}},
            r"width is 10, which 4 heads do not divide\. Set model\.width to 8",
        ),
        ({"model": {"dropout": 1.0}}, r"model\.dropout is 1\.0"),
        ({"data": {}}, r"the key data\.text is missing"),
        ({"data": {"text": "b.txt"}}, r"data\.text is .*b\.txt: there is no such file"),
        ({"data": {"text": "r.yaml"}}, r"known are files that end in \.txt"),
        ({"task": "lmm"}, "Did you mean lm"),
        ({"task": "pathlib.Path"}, "has no model_settings, data_settings, build_model, build_dataset, loss"),
        ({"steps": 3, "epochs": None, "schedule": {"name": "wsd", "warmup": 2, "decay": 2}}, "do not fit"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_built(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    (tmp_path / "r.yaml").write_text("")
    with pytest.raises(ConfigError, match=expected):
        prepare(recipe(tmp_path, **changes), tmp_path / "r.yaml")


def test_a_cached_text_gives_the_same_samples_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepare(recipe(tmp_path), tmp_path / "r.yaml").task.build_dataset()
    cached_recipe = recipe(tmp_path, data={"text": "a.txt", "cache": "cache"})
    for _ in range(2):
        cached = prepare(cached_recipe, tmp_path / "r.yaml").task.build_dataset()
        copy = pickle.loads(pickle.dumps(cached))
        assert len(cached) == len(plain) == len(copy)
        for ours in (cached, copy):
            batches = [default_collate([data[i] for i in range(len(plain))]) for data in (plain, ours)]
            assert torch.equal(*batches)
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".bin"]
        monkeypatch.setattr("samestep.tasks.lm.read_text", None)  # not asked a second time

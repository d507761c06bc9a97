"""Weights alone: from whatever holds them, wholly or in part, and out again for other programs."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from stored_models import Motley, store_model
from torch import Tensor, nn

import samestep
from samestep.checkpoint.state import save_state
from samestep.checkpoint.weights import LoadReport, export_weights, load_weights
from samestep.cli.main import main
from samestep.comm.transport import Transport
from samestep.errors import CheckpointError, ConfigError
from samestep.numerics.fingerprint import model_fingerprint
from samestep.testing.threads import run_threads
from samestep.testing.workloads import WORKLOADS

GPT = WORKLOADS["gpt"]()


def train_gpt(folder: Path, world_size: int, **changes: Any) -> samestep.Result:
    def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted(*GPT.values(model, batch))

    def run(transport: Transport) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = GPT.make_model()
        return samestep.train(
            model,
            GPT.dataset,
            loss,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            batching=samestep.Batching(global_batch=8, micro_batch=2),
            steps=4,
            collate_fn=GPT.collate_fn,
            folder=folder,
            transport=transport,
            checkpoint=samestep.Checkpointing(every=2),
            **{"ema": 0.5, **changes},
        )

    return run_threads(run, world_size)[0]


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, samestep.Result]:
    folder = tmp_path_factory.mktemp("gpt") / "run"
    return folder, train_gpt(folder, 3, strategy="zero1")


def fresh() -> nn.Module:
    torch.manual_seed(9)
    return GPT.make_model()


def test_from_a_run_a_checkpoint_a_manifest_and_a_file(gpt_run: tuple[Path, samestep.Result]) -> None:
    folder, result = gpt_run
    newest = folder / "checkpoints" / "step-00000004"
    sources = [folder, folder / "checkpoints", newest, newest / "manifest.json", folder / "state.safetensors"]
    for source in sources:
        model = fresh()
        report = load_weights(model, source)
        assert model_fingerprint(model) == result.fingerprint
        assert report.path in (newest, folder / "state.safetensors")
        assert set(report.loaded) == set(model.state_dict())
        assert (report.missing, report.unexpected, report.mismatched) == ((), (), {})
    model = fresh()
    load_weights(model, str(folder / "checkpoints" / "step-00000002"))
    assert model_fingerprint(model) != result.fingerprint


def test_the_state_at_the_end_of_a_run_without_checkpoints(tmp_path: Path) -> None:
    model = fresh()
    save_state(model, tmp_path / "state.safetensors")
    other = GPT.make_model()
    load_weights(other, tmp_path)
    assert model_fingerprint(other) == model_fingerprint(model)


def test_averaged_weights(gpt_run: tuple[Path, samestep.Result], tmp_path: Path) -> None:
    folder, result = gpt_run
    model = fresh()
    load_weights(model, folder, ema=True)
    assert result.ema is not None
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in result.ema.items())
    assert model_fingerprint(model) != result.fingerprint
    store_model(tmp_path, Motley(0), step=1, world_size=1)
    with pytest.raises(CheckpointError, match="holds no averaged weights: that run was made without ema"):
        load_weights(Motley(1), tmp_path, ema=True)
    with pytest.raises(CheckpointError, match="is a single file, which has no averaged weights"):
        load_weights(model, folder / "state.safetensors", ema=True)


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    stored, model = Motley(0), Motley(1)
    place = store_model(tmp_path, stored, step=1, world_size=2)
    load_weights(model, place)
    assert model_fingerprint(model) == model_fingerprint(stored)


class Other(nn.Module):
    """A gpt with another head, one layer more and one less."""

    def __init__(self) -> None:
        super().__init__()
        gpt = fresh()
        self.tokens, self.norm, self.qkv, self.mlp = gpt.tokens, gpt.norm, gpt.qkv, gpt.mlp
        self.head = nn.Linear(8, 5)
        self.extra = nn.Linear(2, 2)


def test_strict_lists_what_differs_and_changes_nothing(gpt_run: tuple[Path, samestep.Result]) -> None:
    model = Other()
    before = model_fingerprint(model)
    with pytest.raises(CheckpointError) as raised:
        load_weights(model, gpt_run[0])
    text = str(raised.value)
    assert "not in the file: head.bias, extra.weight, extra.bias" in text
    assert "not in the model: places.weight" in text
    assert "other: head.weight: shape (11, 8) in the file, (5, 8) in the model" in text
    assert "Nothing was changed. Build the model as it was, or take what fits: partial=True." in text
    assert model_fingerprint(model) == before


def test_partial_takes_what_fits_and_says_what_not(gpt_run: tuple[Path, samestep.Result]) -> None:
    model, whole = Other(), fresh()
    head = model.head.weight.clone()
    load_weights(whole, gpt_run[0])
    report = load_weights(model, gpt_run[0], partial=True)
    assert isinstance(report, LoadReport)
    assert report.missing == ("head.bias", "extra.weight", "extra.bias")
    assert report.unexpected == ("places.weight",)
    assert list(report.mismatched) == ["head.weight"]
    assert set(report.loaded) == set(model.state_dict()) - {*report.missing, *report.mismatched}
    for name in report.loaded:
        assert torch.equal(model.state_dict()[name], whole.state_dict()[name])
    assert torch.equal(model.head.weight, head)
    assert str(report).startswith(f"{report.path}: 9 tensors loaded\n  not in the file: head.bias, extra")
    with pytest.raises(CheckpointError, match="Nothing fits: is this a file of another model"):
        load_weights(nn.Conv2d(1, 1, 1), gpt_run[0], partial=True)


def test_files_of_other_writers(tmp_path: Path) -> None:
    model = fresh()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = GPT.make_model()
    safetensors.torch.save_model(model, str(tmp_path / "tied.safetensors"))  # without the tied name
    load_weights(other, tmp_path / "tied.safetensors")
    assert model_fingerprint(other) == model_fingerprint(model)
    halves = {name: tensor.to(torch.float64) for name, tensor in values.items()}
    safetensors.torch.save_file(halves, tmp_path / "wide.safetensors")
    load_weights(other, tmp_path / "wide.safetensors")
    assert model_fingerprint(other) == model_fingerprint(model)
    values["head.weight"] += 1.0
    safetensors.torch.save_file(values, tmp_path / "untied.safetensors")
    with pytest.raises(CheckpointError, match=r"head.weight: is one tensor with tokens.weight in the model"):
        load_weights(other, tmp_path / "untied.safetensors")


def test_what_would_lose_its_meaning_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    waves = {name: tensor.to(torch.complex64) for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(waves, tmp_path / "waves.safetensors")
    with pytest.raises(CheckpointError, match=r"torch\.complex64 in the file, torch\.float32 in the model"):
        load_weights(model, tmp_path / "waves.safetensors")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("exploded").touch, ())


def test_pickles_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Bomb()}, tmp_path / "model.pt")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    for name in ("model.pt", "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"is a pickle, .* convert it once: safetensors.torch.save"):
            load_weights(nn.Linear(1, 1), tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_a_safetensors_file_that_begins_like_a_pickle_is_none(tmp_path: Path) -> None:
    path, model, length = tmp_path / "x.safetensors", nn.Linear(1, 1), 0x280
    for padding in range(0, length, 8):
        safetensors.torch.save_file(model.state_dict(), path, metadata={"n": "x" * padding})
        if int.from_bytes(path.read_bytes()[:8], "little") >= length:
            break
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    load_weights(model, path)


def test_wrong_paths_and_damage(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for path in (tmp_path / "nowhere", Path("n" * 300)):
        with pytest.raises(CheckpointError, match=r"is not there. Name a checkpoint \(a folder step-...\)"):
            load_weights(model, path)
    with pytest.raises(CheckpointError, match="holds no checkpoint that was finished"):
        load_weights(model, tmp_path)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CheckpointError, match="this is no whole state file"):
        load_weights(model, tmp_path / "text")
    place = store_model(tmp_path / "kept", nn.Linear(1, 1), step=1, world_size=1)
    file = place / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged: "):
        load_weights(model, place)
    wrong: Any = "model"
    with pytest.raises(ConfigError, match=r"model is a str, not a torch.nn.Module"):
        load_weights(wrong, place)


def test_an_export_is_a_state_dict_for_plain_torch(
    gpt_run: tuple[Path, samestep.Result], tmp_path: Path
) -> None:
    folder, result = gpt_run
    train_gpt(tmp_path / "alone", 1)
    for source, name in ((folder, "three"), (tmp_path / "alone", "one")):
        export_weights(source, tmp_path / "deep" / f"{name}.safetensors")
        export_weights(source, tmp_path / "deep" / f"{name}-ema.safetensors", ema=True)
        export_weights(source, tmp_path / "deep" / f"{name}-2.safetensors", step=2)
    contents = {path.stem: path.read_bytes() for path in (tmp_path / "deep").iterdir()}
    assert len(contents) == 6  # and no temporary file
    for kind in ("", "-ema", "-2"):
        assert contents[f"one{kind}"] == contents[f"three{kind}"]
    assert len(set(contents.values())) == 3
    state = safetensors.torch.load_file(tmp_path / "deep" / "three.safetensors")
    model = fresh()
    assert list(model.load_state_dict(state)) == [[], []]
    assert model_fingerprint(model) == result.fingerprint
    with safetensors.safe_open(tmp_path / "deep" / "one.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_an_export_of_every_kind_of_tensor(tmp_path: Path) -> None:
    stored, model = Motley(0), Motley(1)
    stored.spectrum = stored.spectrum.to(torch.complex64)
    model.spectrum = model.spectrum.to(torch.complex64)
    store_model(tmp_path / "kept", stored, step=1, world_size=2)
    export_weights(tmp_path / "kept", tmp_path / "model.safetensors")
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert model_fingerprint(model) == model_fingerprint(stored)


def test_the_command(
    gpt_run: tuple[Path, samestep.Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["samestep", "export", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    to = str(tmp_path / "model.safetensors")
    told = f"{to}: the averaged weights of {gpt_run[0]}/checkpoints/step-00000002\n"
    assert call(str(gpt_run[0]), "--to", to, "--ema", "--step", "2") == (0, told, "")
    code, out, err = call(str(tmp_path / "nowhere"), "--to", to)
    assert (code, out) == (2, "")
    assert err.startswith(f"{tmp_path}/nowhere is not there. Name a checkpoint")
    assert err.count("\n") == 1


def test_wrong_orders_of_an_export(gpt_run: tuple[Path, samestep.Result], tmp_path: Path) -> None:
    folder, to = gpt_run[0], tmp_path / "model.safetensors"
    with pytest.raises(
        CheckpointError, match="no checkpoint of step 3; there are: step-00000002, step-000000"
    ):
        export_weights(folder, to, step=3)
    with pytest.raises(CheckpointError, match="is no run folder, so it has no checkpoint of step 2 to pick"):
        export_weights(folder / "checkpoints" / "step-00000004", to, step=2)
    with pytest.raises(CheckpointError, match=f"{tmp_path} is a folder. Name the file to be written"):
        export_weights(folder, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: "):
        export_weights(folder, tmp_path / "file" / "model.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_transformers_loads_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=9)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    store_model(tmp_path / "kept", model, step=1, world_size=2)
    config.save_pretrained(tmp_path / "out")
    export_weights(tmp_path / "kept", tmp_path / "out" / "model.safetensors")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    state: dict[str, Tensor] = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())

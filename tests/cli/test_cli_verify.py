"""`samestep verify` and `samestep compare`: the proof, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep.checkpoint.state import read_state, save_state
from samestep.cli.compare import compare
from samestep.cli.verify import kept, parse_workers, verify
from samestep.errors import ConfigError
from samestep.events import RunEnded
from samestep.track.folder import LEDGER, STATE, RunFolder, read_fingerprint
from samestep.track.ledger import read_ledger
from samestep.verify import proof
from samestep.verify.compare import compare_runs
from samestep.verify.proof import RunFailed, Size, all_same, table

RECIPE_TEXT = """
task: lm
model: {layers: 1, width: 8, heads: 2, context: 7, dropout: 0.1}
data: {text: text.txt}
batching: {global_batch: 6, micro_batch: 2}
optimizer: {name: adamw, lr: 1e-2}
clip_norm: 1.0
strategy: zero1
steps: 3
digest_every: 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 8)
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE_TEXT)
    return path


@pytest.mark.timeout(240)
def test_one_and_three_ranks_end_in_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "samestep", "verify", str(recipe), "--workers", "1,3", "--steps", "2"]
    line += ["--keep", str(tmp_path / "kept")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=220, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    runs = [tmp_path / "kept" / name for name in ("1-workers-1", "2-workers-3")]
    assert lines[-1] == f"fingerprint: {read_fingerprint(runs[0])}"
    assert [row.split()[:2] for row in lines[-3:-1]] == [["1", "2"], ["3", "2"]]
    assert all(" same " in row for row in lines[-3:-1])
    assert [step.world_size for step in read_ledger(runs[1] / LEDGER).steps] == [3, 3]
    assert read_state(runs[1] / STATE).keys() == read_state(runs[0] / STATE).keys()
    with pytest.raises(SystemExit) as code:
        compare(*runs)
    assert code.value.code == 0
    with pytest.raises(ConfigError, match="holds a run already"):
        verify(recipe, workers="1,3", keep=tmp_path / "kept")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Make two runs whose second step and one weight differ in the last place."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, end in zip(folders, (1.0, 1.0 + 2**-23), strict=True):
        with RunFolder(folder) as keep:
            keep(RunEnded(step=2, update=2, fingerprint=f"{end:.20f}"))
        model = nn.Linear(1, 2, bias=False)
        model.weight = nn.Parameter(torch.tensor([[0.5], [end]]))
        save_state(model, folder / STATE)
    return folders


def test_compare_names_the_difference_and_exits_with_1(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as code:
        compare(*runs)
    assert code.value.code == 1
    text = capsys.readouterr().out
    assert text.startswith("level: rounding\n")
    assert "the first: weight" in text
    assert "the first at [1, 0]: 1.0 in A, 1.0000001192092896 in B, 1 ulp apart" in text


def sizes(runs: list[Path]) -> list[Size]:
    return [
        Size(workers=count, folder=run, seconds=1.25, comparison=compare_runs(runs[0], run))
        for count, run in zip((1, 3), runs, strict=True)
    ]


def test_the_table_shows_what_differs(runs: list[Path]) -> None:
    heading, first, second = table(sizes(runs))
    assert heading.split() == ["ranks", "steps", "fingerprint", "ledger", "states", "level", "seconds"]
    assert first.split() == ["1", "0", "1.00000000000000", "reference", "reference", "same", "1.2"]
    assert "1 tensors differ  rounding" in second
    assert not all_same(sizes(runs))


def test_a_run_that_did_not_end_proves_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a"):
        pass
    assert not all_same(sizes([tmp_path / "a", tmp_path / "a"]))


def test_no_fingerprint_is_printed_where_runs_differ(
    recipe: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "run_sizes", lambda *_, **__: sizes(runs))
    with pytest.raises(SystemExit) as code:
        verify(recipe, workers="1,3")
    assert code.value.code == 1
    text = capsys.readouterr().out
    assert "1 rank (A) against 3 ranks (B):" in text
    assert "level: rounding" in text
    assert "fingerprint: " not in text


def test_a_failed_run_is_told_with_its_own_words_and_code(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunFailed(3, 2, "the key is wrong\n")

    monkeypatch.setattr(proof, "run_sizes", fail)
    with pytest.raises(SystemExit) as code:
        verify(recipe, workers="1,3")
    assert code.value.code == 2
    expected = "the key is wrong\nsamestep verify: the run on 3 ranks ended with exit code 2.\n"
    assert capsys.readouterr().err == expected


def test_wrong_settings_run_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "run_sizes", lambda *_, **__: pytest.fail("a run was started"))
    with pytest.raises(ConfigError, match="Did you mean layers"):
        verify(recipe, assignments=["model.layer=2"])
    with pytest.raises(ConfigError, match="one size alone proves nothing"):
        verify(recipe, workers="3")


@pytest.mark.parametrize("text", ["", "1,", "a", "0,1", "1;2", "-1,2"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 1,2,3"):
        parse_workers(text)


def test_sizes_may_be_repeated() -> None:
    assert parse_workers("2, 2,1") == [2, 2, 1]


def test_folders_are_removed_unless_kept(tmp_path: Path) -> None:
    with kept(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with kept(tmp_path / "x" / "y") as folder:
        pass
    assert folder.is_dir()
